"""What wins where: the search of ``mpipe tune`` at the papers' settings, beside what the papers found by hand.

python benchmarks/tuning.py [--only PART] prints Markdown tables: for each model the best training under megatron-core's own
schedules and the best of ours, and the two claims that need a search: pipelines with offload against tensor parallelism (Wan et
al., "PipeOffload", 12 to 19 %), and V-Half against 1F1B, each after a grid search (Qi et al., "Controllable Memory", 16 %).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.cli.tune import base_flags, layout_of
from megatron.pipeline.costmodel.device import named
from megatron.pipeline.costmodel.memory import GIB
from megatron.pipeline.tune.candidate import Cluster
from megatron.pipeline.tune.iteration import Result
from megatron.pipeline.tune.layouts import Choices, Layouts
from megatron.pipeline.tune.search import WORK, search
from megatron.pipeline.tune.write import chosen, extras

CONFIGS = Path(__file__).parents[1] / "configs"

# Model, GPUs, and flags of its training.
SETTINGS = (
    ("zero_bubble/1.5B", 8, "--global-batch-size 192"),
    ("zero_bubble/14.6B", 16, "--global-batch-size 64"),
    ("vocabulary_parallelism/4B", 8, "--global-batch-size 128 --vocab-size 262143"),
    ("vocabulary_parallelism/16B", 24, "--global-batch-size 144"),
    ("pipe_offload/18.1B", 16, "--global-batch-size 128"),
    ("pipe_offload/42.9B", 32, "--global-batch-size 256"),
)
OFFLOADED = (
    ("pipe_offload/42.9B", 32, "--global-batch-size 256 --seq-length 8192"),
    ("pipe_offload/66.6B", 32, "--global-batch-size 256 --seq-length 8192"),
    ("pipe_offload/83.8B", 32, "--global-batch-size 256 --seq-length 8192"),
)
SEARCHED = (
    ("zero_bubble/14.6B", 16, "--global-batch-size 64 --seq-length 16384"),
    ("zero_bubble/28.3B", 32, "--global-batch-size 128 --seq-length 4096"),
    ("zero_bubble/28.3B", 32, "--global-batch-size 128 --seq-length 16384"),
    ("vocabulary_parallelism/16B", 24, "--global-batch-size 96 --seq-length 16384"),
)


def fastest(model: str, gpus: int, flags: str, choices: Choices, stock: bool) -> Result | None:
    base = base_flags(["--config", str(CONFIGS / f"{model}.yaml"), *flags.split()], named("A100-80GB"))
    layouts = Layouts(base, Cluster(named("A100-80GB"), gpus, 8), choices)
    found = search(layouts, stock=stock, wanted=1, budget=WORK)
    return found.best(1)[0] if found.results else None


def cell(result: Result | None) -> str:
    if result is None:
        return "nothing fits"
    what = ", ".join([chosen(result), *extras(result)])
    return (
        f"{layout_of(result)} b{result.candidate.args.micro_batch_size}, {what}: {result.tokens_per_second:.0f} tokens/s, "
        f"{result.mfu:.1%}, {result.fullest.total / GIB:.0f} GiB"
    )


def line(model: str, gpus: int, flags: str, one: Result | None, other: Result | None) -> str:
    """A row: two trainings and the second over the first."""
    gain = f"{other.tokens_per_second / one.tokens_per_second - 1:+.1%}" if one and other else ""
    return f"| {model} | {gpus} | {' '.join(flags.split()[1::2])} | {cell(one)} | {cell(other)} | {gain} |"


def table(title: str, heads: tuple[str, str], rows: Iterable[str]) -> None:
    """Print a table, line by line as it is known."""
    print(f"\n{title}\n\n| model | GPUs | batch, length or rows | {' | '.join(heads)} | faster by |")
    print("|---|---:|---|---|---|---:|")
    for row in rows:
        print(row, flush=True)


def undivided(model: str, gpus: int, flags: str, schedule: str, stock: bool) -> Result | None:
    """The best on one replica of the model, over all ways to share it by tensor and pipeline parallelism."""
    found = []
    for tensor in (1, 2, 4, 8):
        choices = Choices(tensor=(tensor,), pipeline=(gpus // tensor,), context=(1,), schedules=(schedule,))
        try:
            found.append(fastest(model, gpus, flags, choices, stock))
        except ValueError:
            continue
    return max((one for one in found if one), key=lambda one: one.tokens_per_second, default=None)


def settings() -> Iterator[str]:
    every = Choices(context=(1,))
    for one in SETTINGS:
        yield line(*one, fastest(*one, every, True), fastest(*one, every, False))


def offloaded() -> Iterator[str]:
    tensor = Choices(tensor=(8,), pipeline=(4,), context=(1,), schedules=("interleaved",))
    piped = Choices(tensor=(1,), pipeline=(32,), context=(1,), microbatch=(1,), schedules=("v-auto",))
    for one in OFFLOADED:
        yield line(*one, fastest(*one, tensor, True), fastest(*one, piped, False))


def searched() -> Iterator[str]:
    for one in SEARCHED:
        yield line(*one, undivided(*one, "1f1b", True), undivided(*one, "v-half", False))


TABLES: dict[str, tuple[str, tuple[str, str], Callable[[], Iterator[str]]]] = {
    "settings": ("All layouts and schedules", ("stock", "megatron.pipeline"), settings),
    "offload": ("PP with offload against TP", ("stock, TP8 x PP4", "PP32, v-auto"), offloaded),
    "search": ("V-Half against 1F1B, each after a search, one replica", ("stock 1F1B", "V-Half"), searched),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=TABLES, help="one of the tables")
    only = parser.parse_args().only
    with quietly():
        for title, heads, rows in [TABLES[only]] if only else TABLES.values():
            table(title, heads, rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
