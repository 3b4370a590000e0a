"""What wins where: the search of ``mpipe tune`` at the papers' settings, beside what the papers found by hand.

python benchmarks/tuning.py [--only PART] prints Markdown tables: for each model the best training under megatron-core's own
schedules and the best of ours, and the two claims that need a search: pipelines with offload against tensor parallelism (Wan et al.,
"PipeOffload", 12 to 19 %), and V-Half against 1F1B, each after a grid search (Qi et al., "Controllable Memory", 16 %).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.cli.tune import _base
from megatron.pipeline.tune.device import named
from megatron.pipeline.tune.iteration import Cluster, Result
from megatron.pipeline.tune.layouts import Choices, Layouts
from megatron.pipeline.tune.memory import GIB
from megatron.pipeline.tune.search import search
from megatron.pipeline.tune.write import chosen, extras

CONFIGS = Path(__file__).parents[1] / "configs"

# Model, GPUs, and flags of its training.
SETTINGS = (
    ("zero_bubble/1.5B", 8, "--global-batch-size 192"),
    ("zero_bubble/6.2B", 8, "--global-batch-size 96"),
    ("zero_bubble/14.6B", 16, "--global-batch-size 64"),
    ("zero_bubble/28.3B", 32, "--global-batch-size 128"),
    ("vocabulary_parallelism/4B", 8, "--global-batch-size 128 --vocab-size 262143"),
    ("vocabulary_parallelism/16B", 24, "--global-batch-size 144"),
    ("pipe_offload/10.5B", 8, "--global-batch-size 64"),
    ("pipe_offload/18.1B", 16, "--global-batch-size 128"),
    ("pipe_offload/42.9B", 32, "--global-batch-size 256"),
)
OFFLOADED = (
    ("pipe_offload/42.9B", 32, "--global-batch-size 256 --seq-length 8192"),
    ("pipe_offload/66.6B", 32, "--global-batch-size 256 --seq-length 8192"),
    ("pipe_offload/83.8B", 32, "--global-batch-size 256 --seq-length 8192"),
)
SEARCHED = (
    ("zero_bubble/6.2B", 16, "--global-batch-size 64"),
    ("zero_bubble/14.6B", 16, "--global-batch-size 64"),
    ("zero_bubble/28.3B", 32, "--global-batch-size 128"),
    ("vocabulary_parallelism/30B", 32, "--global-batch-size 128"),
)


def fastest(model: str, gpus: int, flags: str, choices: Choices, stock: bool, seconds: float = 120.0) -> Result | None:
    """The best that a search finds."""
    base = _base(["--config", str(CONFIGS / f"{model}.yaml"), *flags.split()])
    layouts = Layouts(base, Cluster(named("A100-80GB"), gpus, 8), choices)
    found = search(layouts, stock=stock, wanted=1, seconds=seconds)
    return found.best(1)[0] if found.results else None


def cell(result: Result | None) -> str:
    """One training in a table."""
    if result is None:
        return "nothing fits"
    args = result.candidate.args
    sizes = (
        ("TP", args.tensor_model_parallel_size),
        ("CP", args.context_parallel_size),
        ("PP", args.pipeline_model_parallel_size),
        ("DP", args.data_parallel_size),
    )
    layout = " ".join(f"{name}{size}" for name, size in sizes if size > 1)
    what = ", ".join([chosen(result), *extras(result)])
    return (
        f"{layout} b{args.micro_batch_size}, {what}: {result.tokens_per_second:.0f} tokens/s, "
        f"{result.mfu:.1%}, {result.fullest.total / GIB:.0f} GiB"
    )


def line(model: str, gpus: int, flags: str, one: Result | None, other: Result | None) -> str:
    """A row: two trainings and the second over the first."""
    gain = f"{other.tokens_per_second / one.tokens_per_second - 1:+.1%}" if one and other else ""
    return f"| {model} | {gpus} | {' '.join(flags.split()[1::2])} | {cell(one)} | {cell(other)} | {gain} |"


def table(title: str, heads: tuple[str, str], rows: list[str]) -> None:
    print(
        f"\n{title}\n\n| model | GPUs | batch, length or rows | {heads[0]} | {heads[1]} | faster by |\n|---|---:|---|---|---|---:|"
    )
    print("\n".join(rows), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("settings", "offload", "search"), help="one of the tables")
    only = parser.parse_args().only
    every = Choices(context=(1,))
    with quietly():
        if only in (None, "settings"):
            rows = []
            for setting in SETTINGS:
                rows.append(line(*setting, fastest(*setting, every, True), fastest(*setting, every, False)))
            table("All layouts and schedules", ("stock", "megatron.pipeline"), rows)
        if only in (None, "offload"):
            tensor = Choices(tensor=(8,), pipeline=(4,), context=(1,))
            piped = Choices(
                tensor=(1,), pipeline=(32,), context=(1,), microbatch=(1,), schedules=("interleaved", "gis", "gis-h", "zb-auto")
            )
            rows = [line(*setting, fastest(*setting, tensor, True), fastest(*setting, piped, False)) for setting in OFFLOADED]
            table("PP with offload against TP", ("stock, TP8 x PP4", "PP32 with offload"), rows)
        if only in (None, "search"):
            rows = []
            for setting in SEARCHED:
                ours = fastest(*setting, Choices(context=(1,), schedules=("v-half",)), False)
                rows.append(line(*setting, fastest(*setting, Choices(context=(1,), schedules=("1f1b",)), True), ours))
            table("V-Half against 1F1B, each after a search", ("stock 1F1B", "V-Half"), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
