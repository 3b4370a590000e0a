"""``mpipe costs``: what every pass of a model takes on a GPU, by the model of time and memory; a file for other commands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from megatron.pipeline.cli.arguments import Commands, add_command, report_flags
from megatron.pipeline.cli.gpu import add_gpu_flags, check_given, measured_engine, measured_gpu, named_gpu
from megatron.pipeline.cli.letters import by_letter
from megatron.pipeline.cli.memory import predicted, quietly, read_flags, say_not_modelled
from megatron.pipeline.cli.summary import check_output, write
from megatron.pipeline.flags.flag_types import count
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner import (
    Costs,
    Device,
    Links,
    Placement,
    Shape,
    estimate,
    interleaved,
    origin,
    ranges,
    refusals,
    view,
    with_replicas,
)

HOW = "docs/model.md has the formulas and how far they are off; mpipe rehearse and --pipeline-costs profile measure instead."


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "costs",
        "predict what the passes of a model take on a GPU, as a file for plan, compare and serve",
        run,
        "mpipe costs --config configs/llama3/8B.yaml --gpu H100-80GB -o costs.json",
        "mpipe costs --config configs/mixtral/8x7B.yaml --gpu A100-80GB --micro-batch-size 2 --json",
        epilog="All other flags are those of pretrain_gpt.py, --config FILE among them. Data need not be given. Stages are those "
        f"of --pipeline-schedule; the other commands cut and join them for other numbers of stages. {HOW}",
        parents=[report_flags("one JSON object, which --costs takes", "write there instead of to the terminal: .json or .txt")],
    )
    add_gpu_flags(parser)
    parser.add_argument("--data-parallel-size", type=count, metavar="D", help="replicas of the model (as few as experts allow)")
    parser.flag("--by-layer", "every layer as a stage, and before and behind them what is none: for mpipe plan --balance PATTERN")
    parser.set_defaults(takes_flags=True)


def run(options: argparse.Namespace) -> None:
    check_output(options)
    gpu = named_gpu(options)
    if gpu is None:
        with quietly():
            check_given(options, read_flags(options.flags))
    assert gpu
    prediction = predicted(options.flags, options.data_parallel_size, engine=measured_engine(options))
    args, layers, placement = prediction.args, prediction.layers, prediction.schedule.placement
    say_not_modelled(args)
    gpu = measured_gpu(gpu, options, args)
    model = describe(args)
    links = Links.of_model(gpu, model, options.gpus_per_node)
    letters = by_letter(model, gpu, placement.depth, links, timed=True)
    if options.by_layer:
        costs = estimate.by_layer(model, gpu, placement.depth, links)
        placement, layers = interleaved(len(costs.stages), 1), [0, *[1] * args.num_layers, 0]
    else:
        costs = estimate.remade(model, estimate.costs_of_training(model, placement, layers, gpu, links))
        if model.copies > 1:  # what ranks do between two iterations
            costs = with_replicas(model, costs, placement, layers, links, gpu)
    data: dict[str, Any] = costs.fields() | {"of": origin.described(model, "predicted", layers)}
    brief = f"{len(costs.stages)} stages, seconds and bytes of a microbatch of {args.micro_batch_size} x {args.seq_length} tokens"
    write(data, lambda: _text(costs, placement, layers, gpu, Shape.of(model), letters), options, brief)


def _text(costs: Costs, placement: Placement, layers: Sequence[int], gpu: Device, shape: Shape, letters: str) -> str:
    heads = ["stage", "rank", "layers", "F ms", "B ms", "W ms", "activations, MiB", "held until W, MiB"]
    cells = [
        [
            *(str(number) for number in (index, placement.home(index)[0], layers[index])),
            *(f"{1e3 * seconds:.4g}" for seconds in (stage.forward, stage.backward, stage.weight)),
            *(refusals.MIB.number(memory) for memory in (stage.activation, stage.retained)),
        ]
        for index, stage in enumerate(costs.stages)
    ]
    if costs.has_boundary:
        heads += ["RS ms", "OPT ms", "AG ms"]
        for row, stage in zip(cells, costs.stages, strict=True):
            row += [f"{1e3 * seconds:.4g}" for seconds in stage.between]
    spread = costs.vocabulary
    shards = f"; S takes {1e3 * spread.S:.4g} ms and T {1e3 * spread.T:.4g} ms on every rank" if spread.total else ""
    sure = ranges.learnt("throughput", shape, gpu)
    likely = f"published trainings of this class took {1 / sure.high:.2f} to {1 / sure.low:.2f} times as long ({sure.source})"
    message = f"a message between stages takes {1e3 * costs.hop:.4g} ms{shards}"
    table = f"one microbatch on {gpu.name}\n\n{view.plain_table(heads, cells)}\n" + (f"\n{letters}\n" if letters else "")
    return "\n".join([table, message, likely, *ranges.doubts(shape, gpu), HOW])
