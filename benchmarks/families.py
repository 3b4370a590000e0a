"""Every family measured: span, makespan, memory, and how far each is above the proven bound at its own memory.

Prints the tables of benchmarks/README.md in Markdown; with --pictures it also draws docs/images/schedules/*.png.

    .venv/bin/python benchmarks/families.py --pictures docs/images/schedules
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from common import command_line, markdown
from PIL import Image

from megatron.pipeline import planning
from megatron.pipeline.planning import Planned
from megatron.pipeline.planning.choose import candidates, choose
from megatron.pipeline.planning.request import Request, variants
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import VocabularyCosts, uniform
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.placement import linear
from megatron.pipeline.schedule.families import AUTO
from megatron.pipeline.schedule.time.simulate import simulate
from megatron.pipeline.view import draw

RANKS, MICROBATCHES = 8, 32
COSTS = ((1, 1, 1, 0), (1, 1.2, 0.8, 0.05))  # F, B, W, hop
# Microbatches, where a plan at the family's own memory looks like another's.
DRAWN_WITHIN = {"zb-auto": 5.0, "v-auto": 2.5, "auto": 3.0}
COLOURS = 128  # a picture has few: with a palette it takes a third of the space


def measure(
    name: str, ranks: int, microbatches: int, costs: tuple[float, float, float, float], limit: float | None = None
) -> Planned:
    """Plan one family for equal stages, with its own memory where there is no limit."""
    return Request(name, ranks, microbatches, uniform(families.placement(name, ranks), *costs), memory_limit=limit).plan()


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


def picture(name: str, path: Path) -> None:
    """Draw a family, or what ``auto`` chooses, on 4 ranks with 8 microbatches, all passes equal."""
    limit = DRAWN_WITHIN.get(name)
    title = f"{name}, within {limit:g} microbatches" if limit else name
    if name == "auto":
        wanted = Request(AUTO, 4, 8, lambda placement: uniform(placement, *COSTS[0]), memory_limit=limit)
        best = choose(candidates(wanted, variants(4))[0]).best
        draw({f"{title}: {best.variant}": best.timeline}, path)
    else:
        shown = measure(name, 4, 8, COSTS[0], limit)
        draw({title: shown.timeline}, path, splits={title: shown.schedule.splits})
    _shrink(path)


def picture_of_vocabulary(path: Path) -> None:
    """Draw 1F1B on 4 ranks with an output layer of 0.6 of a rank's other work: on the last stage, and spread both ways."""
    alone = uniform(linear(4), *COSTS[0])
    last = replace(alone.stages[3], forward=1.6, backward=1.6, weight=1.6)
    drawn = {
        "off: the output layer on the last stage": simulate(
            planning.plan("1f1b", 4, 8), replace(alone, stages=(*alone.stages[:3], last))
        )
    }
    for name, shards in (("1", VocabularyCosts(S=0.15, T=0.3, IF=0.05, IB=0.05)), ("2", VocabularyCosts(0.3, 0.15, 0.05, 0.05))):
        costs = replace(alone, vocabulary=shards)
        drawn[f"--vocab-parallel {name}"] = simulate(planning.plan("1f1b", 4, 8, costs, vocabulary=Vocabulary(name)), costs)
    draw(drawn, path)
    _shrink(path)


def _shrink(path: Path) -> None:
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS).save(path, optimize=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw every family there")
    options = parser.parse_args()
    for costs in COSTS:
        forward, backward, weight, hop = costs
        rows = [measure(name, RANKS, MICROBATCHES, costs) for name in families.FAMILIES]
        print(f"F={forward:g}, B={backward:g}, W={weight:g}, comm={hop:g}; p={RANKS}, m={MICROBATCHES}:", *table(rows), sep="\n")
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        for name in [*families.FAMILIES, "auto"]:
            picture(name, options.pictures / f"{name}.png")
        picture_of_vocabulary(options.pictures.parent / "vocabulary.png")


if __name__ == "__main__":
    main()
