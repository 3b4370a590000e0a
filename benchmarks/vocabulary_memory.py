"""What does every rank hold of a GPT with a large vocabulary? Bytes of parameters, and of activations at their peak.

A small GPT trains in float32 on random tokens, with its vocabulary on the first and the last stage (off), with fewer layers
beside the output layer (redistribution), and in shards. Run it with one process per rank:

    torchrun --nproc-per-node 4 benchmarks/vocabulary_memory.py --schedules 1f1b v-half

"without" leaves out what only one rank has in any case: position embeddings and the final norm. "Expected" is the peak of the
schedule at what passes of one microbatch alone were measured to hold.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import command_line, print_table
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron.pipeline import patches
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.record.cost_profile import measured_costs
from megatron.pipeline.record.report import Report
from megatron.pipeline.schedule.time.simulate import activation_peaks
from megatron.pipeline.trainer.data import forward_step
from megatron.pipeline.trainer.planning import plan_pipeline
from megatron.pipeline.trainer.state import build_training, initialize_model_parallel

METHODS = {
    "off": "",
    "redistribution": "--layer-redistribution",
    "interlaced": "--vocab-parallel interlaced",
    "1": "--vocab-parallel 1",
    "2": "--vocab-parallel 2",
}
ON_ONE_RANK = ("position_embeddings", "final_layernorm")


@dataclass(frozen=True)
class Held:
    """Bytes of all ranks.

    Attributes:
        parameters: all of them.
        without: those that are not ``ON_ONE_RANK``.
        activations: at their peak.
        expected: the same, by the schedule.
    """

    parameters: list[int]
    without: list[int]
    activations: list[int]
    expected: list[float]


def train(options: argparse.Namespace, schedule: str, method: str, microbatches: int) -> tuple[list[torch.nn.Module], Report]:
    """This rank's chunks, and the report of an iteration after one that warms up."""
    world = torch.distributed.get_world_size()
    flags = (
        f"--num-layers {options.layers * world} --hidden-size {options.hidden} --num-attention-heads 4 --lr 1e-4 "
        f"--seq-length {options.seq} --mock-data --tokenizer-type NullTokenizer --vocab-size {options.vocabulary} "
        f"--micro-batch-size 1 --global-batch-size {microbatches} --train-iters 2 --pipeline-model-parallel-size {world} "
        f"--untie-embeddings-and-output-weights --pipeline-schedule {schedule} {METHODS[method]}"
    )
    args = parse(flags.split())
    validate(args, world)
    args.padded_vocab_size = options.vocabulary
    pipeline = plan_pipeline(args, measure=True)
    initialize_model_parallel(args, pipeline.placement)
    chunks: list[Any] = build_training(args, pipeline.placement).chunks
    pipeline.install()
    for _ in range(2):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[batches(options) for _ in chunks] if len(chunks) > 1 else batches(options),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=microbatches,
            seq_length=options.seq,
            micro_batch_size=1,
        )
    report = pipeline.report()
    assert report is not None
    parallel_state.destroy_model_parallel()
    return chunks, report


def batches(options: argparse.Namespace) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        tokens = torch.randint(0, options.vocabulary, (1, options.seq + 1))
        yield {
            "tokens": tokens[:, :-1].contiguous(),
            "labels": tokens[:, 1:].contiguous(),
            "loss_mask": torch.ones(1, options.seq),
            "position_ids": torch.arange(options.seq)[None],
            "attention_mask": torch.ones(1, 1, options.seq, options.seq, dtype=torch.bool).triu(1),
        }


def held(options: argparse.Namespace, schedule: str, method: str) -> Held:
    _, one = train(options, schedule, method, 1)
    costs = measured_costs([one], one)
    chunks, report = train(options, schedule, method, options.microbatches)
    named = [item for chunk in chunks for item in chunk.named_parameters()]
    mine = [sum(_bytes(parameter) for _, parameter in named)]
    mine.append(mine[0] - sum(_bytes(parameter) for name, parameter in named if any(part in name for part in ON_ONE_RANK)))
    everyone: list[list[int]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    parameters, without = map(list, zip(*everyone, strict=True))
    return Held(parameters, without, report.peak_activation_bytes, activation_peaks(report.schedule, costs))


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _spread(numbers: Sequence[float]) -> str:
    """How much more than the least the most is."""
    return f"{100 * (max(numbers) / min(numbers) - 1):.2f}%"


def _row(numbers: Sequence[float]) -> str:
    return " ".join(f"{number / 2**20:.2f}" for number in numbers)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="*", default=["1f1b"], metavar="NAME")
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=2, help="of a rank, where all have the same")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args()

    patches.install()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    title = (
        f"{torch.distributed.get_world_size()} ranks, {options.microbatches} microbatches of {options.seq} tokens, "
        f"{options.layers} layers a rank of hidden size {options.hidden}, {options.vocabulary} rows; MiB of each rank"
    )
    columns = ("schedule", "vocabulary", "parameters", "most / least", "without", "activations", "expected", "apart by")
    rows = []
    for schedule in options.schedules:
        for method in options.methods:
            found = held(options, schedule, method)
            apart = max(abs(real / expected - 1) for real, expected in zip(found.activations, found.expected, strict=True))
            parameters = _row(found.parameters), _spread(found.parameters), _spread(found.without)
            rows.append([schedule, method, *parameters, _row(found.activations), _row(found.expected), f"{100 * apart:.2f}%"])
    if torch.distributed.get_rank() == 0:
        print_table(title, columns, rows, left=8, width=150)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
