"""Every family measured: span, makespan, memory, and how far each is above the proven bound at its own memory.

Prints the tables of benchmarks/README.md in Markdown. The pictures of docs/images/schedules are those of ``mpipe draw``.
"""

from __future__ import annotations

from collections.abc import Iterator

from common import command_line, markdown

from megatron.pipeline.planner.planning import Planned
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform

RANKS, MICROBATCHES = 8, 32
COSTS = ((1, 1, 1, 0), (1, 1.2, 0.8, 0.05))  # F, B, W, hop


def measure(name: str, ranks: int, microbatches: int, costs: tuple[float, float, float, float]) -> Planned:
    """Plan one family for equal stages, with its own memory."""
    return Request(name, ranks, microbatches, uniform(families.placement(name, ranks), *costs)).plan()


def table(rows: list[Planned]) -> Iterator[str]:
    """The lines of a table in Markdown, shortest makespan first."""
    columns = ("schedule", "span", "bubble", "makespan", "bubble", "peak", "least span at this peak", "above it")
    cells = [
        (
            f"`{row.schedule.name}`", f"{row.timeline.span:g}", f"{row.timeline.span_bubble_rate:.1%}",
            f"{row.timeline.makespan:g}",
            f"{row.timeline.bubble_rate:.1%}", f"{row.peak:g}", f"{row.bound:g}", f"{row.gap:z.1%}",
        )
        for row in sorted(rows, key=lambda row: (round(row.timeline.makespan, 9), row.peak))
    ]  # fmt: skip
    yield from markdown(columns, cells).splitlines()


def main() -> None:
    command_line(__doc__).parse_args()
    for costs in COSTS:
        forward, backward, weight, hop = costs
        rows = [measure(name, RANKS, MICROBATCHES, costs) for name in families.FAMILIES]
        print(f"F={forward:g}, B={backward:g}, W={weight:g}, comm={hop:g}; p={RANKS}, m={MICROBATCHES}:", *table(rows), sep="\n")


if __name__ == "__main__":
    main()
