"""``mpipe tune``: the fastest training of a model on a cluster, as a file that ``pretrain_gpt.py --config`` runs."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.pipeline.cli.arguments import Commands, add_command, names, whole_numbers
from megatron.pipeline.cli.gpu import add_gpu_flags, check_given, measured_engine, measured_gpu, named_gpu
from megatron.pipeline.cli.memory import FUSED, LOCAL, gpu_memory, quietly, read_flags, say_not_modelled
from megatron.pipeline.cli.progress import Progress
from megatron.pipeline.cli.summary import wrote
from megatron.pipeline.flags.flag_types import count
from megatron.pipeline.flags.packages import no_picture
from megatron.pipeline.flags.settings import Flags, Settings
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner import device, families, parameters, ranges, rank_memory, view
from megatron.pipeline.tune.candidate import SIZES, Candidate, Cluster
from megatron.pipeline.tune.iteration import Result
from megatron.pipeline.tune.layouts import LayoutChoices, Layouts
from megatron.pipeline.tune.relax import least_needed, smallest_changes
from megatron.pipeline.tune.search import BEST, WORK, SearchLimits, SearchResult, place, search
from megatron.pipeline.tune.trial import WARM_UP
from megatron.pipeline.tune.write import chosen, extras, write_config

_OVERHEAD = rank_memory.OVERHEAD / rank_memory.GIB
NOTE = f"""\
Tokens per second of all GPUs. MFU: operations of the model, without recomputation. GiB of the fullest GPU: weights, gradients
and optimizer; activations; temporaries and {_OVERHEAD:g} GiB for CUDA and NCCL. Lost to: the largest part of an iteration
that does not compute: bubble (idle time of the busiest rank), unequal stages, messages of ranks that share layers,
recomputation, or the step (gradients, optimizer and weights between two pipelines); "memory" where more of it would be faster."""
# docs/model.md says what the figures were learnt from.
TRUST = """\
All of it is predicted. Published trainings of this class had {throughput.low:.2f} to {throughput.high:.2f} times the predicted
tokens/s, and gains of one schedule over another were within {schedules:.0%}: rows with = are as good as the best within that,
so try them (docs/tuning.md). Of equal ones the best is the fastest that is likely to fit."""
_WORTH_SAYING = 0.005  # of an iteration
_LOST = {"between": "step", "imbalance": "unequal stages"}
_FILES = ("best", "second", "third")
_MOST_GPUS = 2**17  # more than any cluster
_TRIED = 3  # of the best that --verify runs


def add(commands: Commands) -> None:
    others = "All other flags are those of pretrain_gpt.py, --config FILE among them; their layout and schedule are replaced."
    parser = add_command(
        commands,
        "tune",
        "find the fastest training of a model on a cluster",
        run,
        "mpipe tune --config configs/llama3/70B.yaml --gpus 64 --gpu A100-80GB --global-batch-size 64",
        "mpipe tune --config configs/llama3/8B.yaml --gpus 16 --gpu H100-80GB --pipeline 4,8 --schedules zb-v,v-auto",
        epilog=f"{others} {NOTE}",
    )
    parser.flag("--gpus", "GPUs of the cluster", count, metavar="N")
    add_gpu_flags(parser)
    taken = f"GB of each that a training may take ({rank_memory.SHARE:.0%}% of what it has)"
    parser.flag("--gpu-memory", taken, gpu_memory, metavar="X")
    parser.flag("--sequence-length", "the same as --seq-length", count, metavar="S")
    parser.flag("-o --output", "directory for the trainings, the picture and the report (runs/tune)", str, metavar="DIR")
    parser.flag("--json", "print one JSON object")
    parser.flag("--work", f"budget of planning, which is counted, not timed ({WORK})", count, WORK, metavar="N")
    parser.flag("--seconds", "end planning after this time: the result then depends on the machine", count, metavar="S")
    parser.flag("--processes", "processes that plan (all cores); the result does not depend on it", count, metavar="N")
    group = parser.add_argument_group("limits of the search")
    group.add_argument("--tensor", type=whole_numbers, metavar="1,2", help="tensor-parallel sizes (those of a node)")
    group.add_argument("--pipeline", type=whole_numbers, metavar="4,8", help="pipeline-parallel sizes (all)")
    group.add_argument("--context", type=whole_numbers, metavar="1,2", help="context-parallel sizes (leaving 4096 tokens)")
    group.add_argument("--expert", type=whole_numbers, metavar="1,2", help="expert-parallel sizes (powers of two)")
    group.add_argument("--micro-batch-sizes", type=whole_numbers, metavar="1,2", help="samples at once (1,2,4,8)")
    group.add_argument(
        "--schedules", type=names, metavar="NAME,..", help="families (those that can be best); auto ones plan for what fits"
    )
    group.add_argument("--change-numerics", action="store_true", help="also try gradients, moments and weights in fewer bits")
    group = parser.add_argument_group("trying")
    group.add_argument(
        "--verify", action="store_true", help="run the three best and stock here, and compare with what is predicted"
    )
    group.add_argument("--iterations", type=count, default=6, metavar="N", help="of each run of --verify (6)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(takes_flags=True)


def run(options: argparse.Namespace) -> int:
    if options.measure:
        raise ValueError(
            "--measure is gone: measure with mpipe rehearse, or a short training with --pipeline-costs profile, and give the "
            "file that it writes: mpipe tune --gpu-from runs/rehearsal/costs.json"
        )
    directory = Path(options.output or "runs/tune")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"-o {directory} is a file: give a directory, which gets best.yaml and all else")
    for name in options.schedules or ():
        families.named(name)
    if options.verify and options.iterations <= WARM_UP:
        raise ValueError(f"--iterations {options.iterations}: --verify needs more than {WARM_UP}, which are to warm up")
    flags = options.flags + (["--seq-length", str(options.sequence_length)] if options.sequence_length else [])
    with quietly():
        base = base_flags(flags, measured_engine(options), options)
        say_not_modelled(base)
        cluster = _cluster(options)
        cluster = replace(cluster, device=measured_gpu(cluster.device, options, _model(base)))
        sizes = options.tensor, options.pipeline, options.context, options.expert, options.micro_batch_sizes
        layouts = Layouts(base, cluster, LayoutChoices(*sizes, options.schedules, options.change_numerics))
        if max(options.expert or [1]) > 1 and not base.num_experts:
            raise ValueError(f"--expert {','.join(map(str, options.expert))} is for a model with --num-experts: leave it out")
        directory.mkdir(parents=True, exist_ok=True)  # fails before the search, if it does
        found, stock = _searched(layouts, options)
        written = _write(directory, flags, cluster, found, stock)
    contents = report(base, cluster, found, stock) | {"files": [str(path) for path in written.values()]}
    (directory / "report.json").write_text(json.dumps(contents) + "\n", encoding="utf-8")
    print(json.dumps(contents) if options.json else _text(contents, cluster, found, stock), flush=True)
    more = [*_write_gpu(directory, cluster, options), directory / "report.json"]
    picture = _draw(directory / "throughput.png", cluster, found, stock)
    if not options.json:
        print()
        for path in (*written.values(), *picture, *more):
            wrote(str(path))
        print(f"\n{_how_to_run(cluster, directory, _script(base))}")
    if options.verify and not found.interrupted:
        _verify(options, written, [*ranked(found)[:_TRIED], *stock.best(1)])
    return 130 if found.interrupted else 0  # as after SIGINT


def _searched(layouts: Layouts, options: argparse.Namespace) -> tuple[SearchResult, SearchResult]:
    """All that was found, and what megatron-core's own schedules can run.

    Stock's come first, in at most half of the time: where a search ends early, nothing slower than those is the best.

    Raises:
        ValueError: nothing fits, or nothing was found before the search had to end.
        KeyboardInterrupt: it was ended before anything was found.
        SystemExit: a process died.
    """
    seconds = options.seconds or float("inf")
    error = 1 / ranges.learnt("schedules", shape_of(_model(layouts.base)), layouts.cluster.device).low
    limits = SearchLimits(options.processes, options.work, error=error)
    end, before = time.monotonic() + seconds, signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress("planning stock's") as progress:
            stock = found = ours = search(layouts, True, 3, replace(limits, seconds=seconds / 2), progress)
        if not stock.interrupted:
            with Progress("planning schedules") as progress:
                beat = min((result.seconds for result in stock.results), default=float("inf"))
                left = replace(limits, seconds=end - time.monotonic(), beat=beat)
                ours = search(layouts, False, BEST, left, progress)
            found = stock.joined(ours)
    except BrokenProcessPool:
        raise SystemExit("mpipe tune: a process that plans has died, as when memory runs out; fewer: --processes 1") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    unfinished = "unfinished: stopped before all trainings were planned"
    if found.interrupted and not found.results:
        raise KeyboardInterrupt(unfinished)
    if found.interrupted:
        print(f"mpipe: {unfinished}", file=sys.stderr)
    if not found.results and found.left_out:
        limit = f"--seconds {options.seconds}" if found.stopped else f"--work {options.work}"
        raise ValueError(
            f"nothing that fits was found with {limit}, and {found.left_out} trainings were not planned: raise it, "
            "or restrict the search with --tensor, --pipeline, --micro-batch-sizes and --schedules"
        )
    if not found.results:
        raise ValueError(_fits_nowhere(layouts, ours))
    return found, stock


def _model(base: Flags) -> Settings:
    """The flags of the model, which are the same in any layout, validated."""
    return Layouts(base, Cluster(device.named("A100-80GB"), 1, 1)).changed({})


def report(base: Flags, cluster: Cluster, found: SearchResult, stock: SearchResult) -> dict[str, Any]:
    """Content of ``--json``."""
    shape = shape_of(_model(base))
    return {
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.per_node,
        "gpus_per_host": cluster.per_host,
        "gpu": cluster.device.name,
        "global_batch_size": base.global_batch_size,
        "seq_length": base.seq_length,
        "parameters": parameters.total_parameters(shape, not base.untie_embeddings_and_output_weights),
        "planned": found.tried,
        "slower": found.beaten,
        "misfits": len(found.misfits),
        "failed": dict(found.failed),
        "left_out": found.left_out,
        "work": found.work,
        "stopped": bool(found.stopped),
        "bound_seconds": found.bound,
        "transformer_impl": base.transformer_impl,
        "best_is_stock": ranked(found)[0].candidate.is_stock,
        "best": [row(result) for result in ranked(found)],
        "stock": [row(result) for result in stock.best(3)],
        "front": [row(result) for result in found.front()],
        "stock_front": [row(result) for result in stock.front()],
    }


def ranked(found: SearchResult) -> list[Result]:
    """The best of every layout: first the fastest that is likely to fit of all that are as good as the fastest within the error,
    or the one that needs least where none is; then the others, the fastest first."""
    best = found.best()
    equal = [one for one in found.results if alike(one, best[0])]
    sure = (one for one in equal if likely_bytes(one)[1] <= one.device.memory)
    first = next(sure, None) or min(equal, key=lambda one: one.fullest.total)
    return [first, *(one for one in best if place(one.candidate) != place(first.candidate))][: len(best)]


def alike(one: Result, other: Result) -> bool:
    """Tell whether one may be as fast as another, as far as gains are known."""
    return one.tokens_per_second >= _range("schedules", other).low * other.tokens_per_second


def likely_bytes(result: Result) -> tuple[float, float]:
    """Least and most bytes that its fullest GPU is likely to need."""
    low, high = _range("memory", result).of(result.fullest.counted)
    return low + rank_memory.OVERHEAD, high + rank_memory.OVERHEAD


def row(result: Result) -> dict[str, Any]:
    """Entry of the report about one training."""
    fullest = result.fullest
    return {
        **result.candidate.sizes,
        "micro_batch_size": result.candidate.args.micro_batch_size,
        "microbatches": result.candidate.microbatches,
        "schedule": chosen(result),
        "with": extras(result),
        "hybrid_layer_pattern": result.candidate.args.hybrid_layer_pattern,
        "memory_limit": result.memory_limit,
        "iteration_seconds": result.seconds,
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_range": _range("throughput", result).of(result.tokens_per_second),
        "mfu": result.mfu,
        "bubble": result.parts.bubble / result.seconds,
        "parts": asdict(result.parts),
        "lost_to": result.parts.limit,
        "starved": result.memory_bound,
        "bytes": {
            "state": fullest.state,
            "activations": fullest.activations,
            "other": fullest.total - fullest.state - fullest.activations,
            "total": fullest.total,
            "range": likely_bytes(result),
        },
        "ranks": [asdict(rank) | {"total": rank.total} for rank in result.ranks],
    }


def base_flags(flags: list[str], engine: str | None = None, options: argparse.Namespace | None = None) -> Flags:
    """The flags that a search begins with. Layers whose flags name no engine have this one, by default that of GPUs.

    Raises:
        ValueError: a flag is wrong; or some are missing, among those of ``options``.
    """
    import megatron.core  # noqa: F401 - if it is not installed, say that before anything about the flags

    from megatron.pipeline.flags.validation_hybrid import pattern_of
    from megatron.pipeline.session.tokenizer import vocabulary_size

    base = read_flags(flags, engine=engine or "transformer_engine")
    if options:
        check_given(options, base | {"micro_batch_size": 1}, "gpus", "global_batch_size")
    if pattern := pattern_of(base):
        base |= {"hybrid_layer_pattern": pattern.replace("|", "")}  # stages are searched
    return base | {"rampup_batch_size": None, "vocab_size": vocabulary_size(base)}


def _cluster(options: argparse.Namespace) -> Cluster:
    gpus, gpu = options.gpus, named_gpu(options)
    assert gpu
    per_node = min(gpus, options.gpus_per_node or gpu.node(gpus))
    if gpus % per_node:
        raise ValueError(f"{gpus} GPUs are not whole nodes of {per_node}: change --gpus or --gpus-per-node")
    if gpus > _MOST_GPUS:
        raise ValueError(f"--gpus {gpus}: give at most {_MOST_GPUS}")
    memory = rank_memory.usable(gpu.memory) if options.gpu_memory is None else options.gpu_memory * rank_memory.GIB
    if memory > gpu.memory:
        raise ValueError(f"--gpu-memory {options.gpu_memory:g}: {gpu.name} has {gpu.memory / rank_memory.GIB:g} GB")
    return Cluster(replace(gpu, memory=memory), gpus, per_node)


def _write(directory: Path, flags: list[str], cluster: Cluster, found: SearchResult, stock: SearchResult) -> dict[str, Path]:
    """The files of the best trainings, by what they are."""
    results = dict(zip(_FILES, ranked(found), strict=False)) | dict(zip(("stock",), stock.best(1), strict=False))
    written = {}
    for name, result in results.items():
        path = directory / f"{name}.yaml"
        why = _stocks(found, stock) if result.candidate.is_stock and name == "best" else ""
        what = ", ".join([chosen(result), *extras(result)]) + why
        head = (
            f"Found by mpipe tune for {_cluster_name(cluster)}: {what}.\n"
            f"Predicted: {result.tokens_per_second:.0f} tokens/s, {result.mfu:.1%} MFU, "
            f"{result.fullest.total / rank_memory.GIB:.1f} GiB; "
            f"likely {ranges.in_words(*_range('throughput', result).of(result.tokens_per_second), 'tokens/s')}."
        )
        write_config(result, flags, path, head)
        written[name] = path
    return written


def _write_gpu(directory: Path, cluster: Cluster, options: argparse.Namespace) -> list[Path]:
    """A file for ``--gpu`` of what ``--gpu-from`` has measured, if it is given."""
    named = named_gpu(options)
    if not options.gpu_from or named is None:
        return []
    path = directory / "gpu.json"
    path.write_text(replace(cluster.device, memory=named.memory).to_json(), encoding="utf-8")
    return [path]


def _draw(path: Path, cluster: Cluster, found: SearchResult, stock: SearchResult) -> list[Path]:
    """The picture; none, and a line on stderr that says what to install, where what draws it is missing."""
    groups = {"megatron.pipeline, stock included": [_training(each) for each in found.results]}
    if stock.results:
        groups["stock Megatron"] = [_training(each) for each in stock.results]
    title = f"{cluster.gpus} x {cluster.device.name}: throughput against memory"
    try:
        error = _range("schedules", found.results[0]).low
        view.draw_throughput(groups, path, cluster.device.memory / rank_memory.GIB, title, error)
    except ModuleNotFoundError as error:
        print(no_picture(path, error), file=sys.stderr)
        return []
    return [path]


def _training(result: Result) -> view.PlottedTraining:
    sizes = " ".join(f"{name.upper()}{size}" for name, size in result.candidate.sizes.items() if size > 1) or "PP1"
    layout = f"{sizes} batch {result.candidate.args.micro_batch_size}"
    name = ", ".join([layout, chosen(result), *extras(result)])
    return view.PlottedTraining(name, result.tokens_per_second, result.fullest.total / rank_memory.GIB)


def _text(contents: dict[str, Any], cluster: Cluster, found: SearchResult, stock: SearchResult) -> str:
    title = (
        f"{contents['parameters'] / 1e9:.3g} billion parameters on {_cluster_name(cluster)}; "
        f"{contents['global_batch_size']} samples of {contents['seq_length']} tokens per iteration\n"
        f"{contents['planned']} trainings planned, {contents['slower']} skipped as slower; {contents['misfits']} do not fit"
    )
    if found.left_out:
        why = "--seconds ended the search: another run may find others" if found.stopped else "--work was used up: raise it"
        title += f"; {found.left_out} were skipped when {'it was stopped' if found.interrupted else why}"
    if found.failed:
        title += f"; {found.failed.total()} could not be planned: {next(iter(found.failed))}"
    best, under = ranked(found), stock.best(3)
    above = f"{found.results[0].seconds / found.bound - 1:.1%} above the lower bound of all that was searched"
    sure = _range("throughput", best[0])
    least_most = ranges.in_words(*sure.of(best[0].tokens_per_second), "tokens/s")
    least, most = (size / rank_memory.GIB for size in likely_bytes(best[0]))
    needs = ranges.in_words(least, most, "GiB")
    limit = f"{needs} of {cluster.device.memory / rank_memory.GIB:.4g}"
    parts = [title, _table(best), f"the best: {least_most}, learnt from {sure.source}; its fullest GPU likely needs {limit}"]
    parts.append(f"the fastest is {above}: layouts, schedules, recomputation, and any order of their passes")
    if under:
        ours = (each.tokens_per_second for each in found.results if not each.candidate.is_stock)
        error = 1 - _range("schedules", under[0]).low
        gains = [_gain(fastest / under[0].tokens_per_second - 1, error) for fastest in ours][:1]
        words = [f"the fastest of ours {gain}" for gain in gains]
        if best[0].candidate.is_stock:
            words = [f"the best is stock's{_stocks(found, stock)}", *words]
        parts.append(f"the best under megatron-core's own schedules\n\n{_table(under)}")
        parts.append("; ".join(words) + _not_interleaved(under[0].candidate))
    else:
        parts.append("nothing fits under megatron-core's own schedules")
    if best[0].mfu > 1:
        parts.append(f"WARNING: more than all of the peak: {cluster.device.name} was measured on a busy machine; measure again")
    assumed = f"{FUSED}: --transformer-impl {LOCAL} is without"
    if contents["transformer_impl"] == LOCAL:
        assumed = f"attention is not fused (--transformer-impl {LOCAL})"
    parts += ranges.doubts(shape_of(best[0].candidate.args), best[0].device)
    trust = TRUST.format(throughput=sure, schedules=1 - _range("schedules", best[0]).low)
    return "\n\n".join([*parts, NOTE, f"{trust}\n{assumed}"])


def _stocks(found: SearchResult, stock: SearchResult) -> str:
    """Words about a best training that is stock's, with how many of ours were planned where not all were looked at."""
    planned, left = found.tried - stock.tried, found.left_out - stock.left_out
    if found.left_out and not planned:
        return ", megatron-core's own schedule; none of ours was planned"
    some = f"the {planned} of ours that were planned, of at least {planned + left},"
    ours = some if found.left_out else "ours that was planned"
    return f", megatron-core's own schedule, and none of {ours} is faster by more than the error"


def _gain(gain: float, error: float) -> str:
    keep = f", within the error of {error:.0%}: keep what you have" if 0 < gain <= error else ""
    return f"is {gain:+.1%} against stock's{keep}"


def _range(what: str, result: Result) -> ranges.Range:
    found = ranges.learnt(what, shape_of(result.candidate.args), result.device)
    return found if what != "throughput" else ranges.at_scale(found, describe(result.candidate.args).gpus, result.seconds)


def _not_interleaved(stock: Candidate) -> str:
    """Why megatron-core cannot interleave in a layout; empty if it can."""
    ranks, microbatches = stock.placement.ranks, stock.microbatches
    if stock.variant.name != "1f1b" or microbatches % ranks == 0:
        return ""
    return f", which cannot interleave there: {microbatches} microbatches are not a multiple of {ranks} pipeline ranks"


def _cluster_name(cluster: Cluster) -> str:
    hosts = f" of hosts of {cluster.per_host}" if cluster.per_host < cluster.per_node else ""
    return f"{cluster.gpus} x {cluster.device.name}, {cluster.per_node} per node{hosts}"


def _table(results: list[Result]) -> str:
    heads = ["", "TP", "CP", "EP", "PP", "DP", "batch", "tokens/s", "MFU", "s", "bubble", "state", "activations", "other", "GiB"]
    heads += ["lost to", "schedule"]
    cells = []
    for number, result in enumerate(results, 1):
        contents = row(result)
        # Gains of one over another are known within a range: this one may be as fast as the best.
        equal = " =" if result is not results[0] and alike(result, results[0]) else ""
        share = contents["parts"][contents["lost_to"]] / result.seconds
        lost = f"{_LOST.get(contents['lost_to'], contents['lost_to'])} {share:.1%}" if share >= _WORTH_SAYING else "-"
        cells.append(
            [
                f"{number}{equal}",
                *(str(contents[name]) for name in (*SIZES, "micro_batch_size")),
                f"{result.tokens_per_second:.0f}",
                f"{result.mfu:.1%}",
                f"{result.seconds:.3g}",
                f"{contents['bubble']:.1%}",
                *(f"{contents['bytes'][name] / rank_memory.GIB:.1f}" for name in ("state", "activations", "other", "total")),
                f"{lost}{', memory' if result.memory_bound else ''}",
                ", ".join([chosen(result), *extras(result)]),
            ]
        )
    return view.plain_table(heads, cells, words=2)


def _script(base: Flags) -> str:
    """The script that trains this model under ``mpipe launch``: what freezes weights is one's own."""
    if base.trained != "all":
        return "YOURS.py"
    return f"Megatron-LM/pretrain_{'hybrid' if base.hybrid_layer_pattern is not None else 'gpt'}.py"


def _how_to_run(cluster: Cluster, directory: Path, script: str) -> str:
    """One line for each way to start the best: this repository's script, by torchrun or SLURM, and Megatron-LM's own or another,
    which alone have hybrid models and weights that do not train."""
    alone = not script.endswith("/pretrain_gpt.py")
    nodes, best, data = -(-cluster.gpus // cluster.per_host), directory / "best.yaml", "--data-path ..."
    ranks, lines = f"--nproc-per-node {cluster.per_host}", []
    if nodes > 1:
        ranks = f"--nnodes {nodes} {ranks} --rdzv-backend c10d --rdzv-endpoint NODE:29500"
        size = f"--nodes {nodes} --gpus-per-node {cluster.per_host}"
        slurm = f"CONFIG={best} sbatch {size} scripts/slurm/pretrain_gpt.sbatch {data}"
        lines = ["on every node"] if alone else [slurm, "or on every node"]
    lines += [] if alone else [f"torchrun {ranks} pretrain_gpt.py --config {best} {data}"]
    return "\n".join([*lines, f"mpipe launch {ranks} {script} --config {best} {data}"])


def _fits_nowhere(layouts: Layouts, found: SearchResult) -> str:
    """Say how much memory is missing, and the smallest changes with which something fits."""
    cluster, base = layouts.cluster, layouts.base
    if not found.misfits:
        reasons = (found.failed + found.refused).most_common(3)
        whys = "; ".join(f"{reason} ({times} times)" if times > 1 else reason for reason, times in reasons)
        return f"there is no layout of this model for {cluster.gpus} GPUs and a batch of {base.global_batch_size}: {whys}"
    least = least_needed(layouts, found.misfits)
    sizes = least.candidate.sizes
    result = ", ".join(f"{name.upper()} {sizes[name]}" for name in ("tp", "cp", "pp", "dp") if sizes[name] != 1)
    size, needs = cluster.device.memory / rank_memory.GIB, least.needs / rank_memory.GIB
    changes = smallest_changes(layouts)
    would = f"; what would fit: {'; or '.join(changes)}" if changes else "; no number of GPUs up to 16 times as many would help"
    return (
        f"this model fits nowhere on {cluster.gpus} x {cluster.device.name}: its fullest GPU needs at least {needs:.1f} "
        f"GiB, {needs - size:.1f} GiB more than the {size:.4g} that it may take ({result or 'one GPU'}; "
        f"{least.state / rank_memory.GIB:.1f} GiB of it are weights, gradients and optimizer state){would}"
    )


def _verify(options: argparse.Namespace, written: dict[str, Path], results: list[Result]) -> None:
    from megatron.pipeline.tune import trial

    ranks = options.gpus
    names_ = [f"{name}: {chosen(result)}" for name, result in zip(written, results, strict=True)]
    measured = trial.run(list(written.values()), ranks, options.iterations)
    print("\n" + view.plain_table(*trial.table(names_, [result.seconds for result in results], measured)))
    if warning := trial.disagreement(names_, measured):
        print(f"WARNING: {warning}")
    failed = [name for name, one in zip(names_, measured, strict=True) if one.failure]
    if failed:
        reasons = "; ".join(one.failure for one in measured if one.failure)
        raise ValueError(f"{' and '.join(failed)} could not be run here: {reasons}")
