"""The problems of ``golden.py``: of every family as many as it takes to meet each of its options, and those chosen by hand."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from megatron.pipeline.planner.schedule.core.costs import CopyCosts

STOCK = "stock"  # megatron-core's own schedules: no family, and nothing is planned but where its stages are


@dataclass(frozen=True)
class Case:
    """One problem, in words that do not depend on the planner's types. The defaults are left out of its key."""

    family: str
    ranks: int
    microbatches: int
    chunks: int | None = None
    splits: int | None = None
    group: int | None = None
    costs: str = "equal"
    limit: str = "none"
    vocabulary: str = "off"
    offload: str = "off"
    host: str = "any"
    copies: str = "slow"
    recompute: str = "no"
    fused: str = "no"
    objective: str = "span"
    evaluation: bool = False

    @property
    def key(self) -> str:
        named = (field for field in fields(self)[3:] if getattr(self, field.name) != field.default)
        words = (f"{field.name}={getattr(self, field.name)}" for field in named)
        return " ".join((f"{self.family} p{self.ranks} m{self.microbatches}", *words))


COPIES = {
    "slow": CopyCosts(to_host=1.4, to_device=1.6),
    "fast": CopyCosts(to_host=0.4, to_device=0.3),
    "free": CopyCosts(),
    "turns": CopyCosts(to_host=0.6, to_device=0.5, both=0.5),
    "switch": CopyCosts(to_host=0.5, to_device=0.5, both=0.8, switch=2, shared=0.6),
}


@dataclass(frozen=True)
class _Shapes:
    """What a family takes, written down here so that the cases do not depend on how the registry says it."""

    chunks: tuple[int | None, ...] = (None,)
    splits: tuple[int | None, ...] = (None,)
    grouped: bool = False
    searches: bool = False
    spreads: bool = True  # the vocabulary
    limits: tuple[str, ...] = ("loose", "loose", "loose", "tight", "low")


_ANY = ("tight", "tight", "loose", "uneven", "uneven", "low")  # for families that plan for a limit
SHAPES = {
    "1f1b": _Shapes(),
    "interleaved": _Shapes(chunks=(None, 2, 3, 4)),
    "gis": _Shapes(chunks=(None, 2, 3), grouped=True),
    "gis-h": _Shapes(chunks=(None, 2, 3), grouped=True),
    "seq-1f1b": _Shapes(splits=(None, 1, 2, 3, 4), spreads=False),
    "zb-h1": _Shapes(),
    "zb-h2": _Shapes(),
    "zb-auto": _Shapes(chunks=(None, None, 2, 3), searches=True, limits=_ANY),
    "1f1b-v": _Shapes(searches=True),
    "zb-v": _Shapes(searches=True),
    "v-half": _Shapes(searches=True),
    "v-min": _Shapes(searches=True),
    "v-auto": _Shapes(chunks=(None, None, 2, 3), searches=True, limits=_ANY),
    "dualpipe-v": _Shapes(),
}
_OF_ONE, _OF_ONE_THAT_SEARCHES = 52, 34  # cases of a family that are drawn
# One case of how many is run by ``make test``, and by ``make test-rest``.
_PART, _MORE = 12, 6
_COSTS = ("equal", "uneven", "hops", "shares", "ends", "mixed", "mixed", "free")


def _drawn(family: str, shapes: _Shapes) -> Iterator[Case]:
    """Endless cases of a family, always the same ones."""
    draw = random.Random(f"golden {family}")
    while True:
        ranks = draw.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8))
        most = max(4, min(2 * ranks + 3, 9)) if shapes.searches else 2 * ranks + 5
        spreads = ranks > 1 and shapes.spreads and draw.random() < 0.3
        offloads = draw.random() < 0.3
        yield Case(
            family,
            ranks,
            microbatches=draw.randint(1, most) if draw.random() < 0.5 else draw.randint(ranks, max(ranks, most)),
            chunks=draw.choice(shapes.chunks),
            splits=draw.choice(shapes.splits),
            group=draw.randint(-(-ranks // 2), ranks) if shapes.grouped and draw.random() < 0.3 else None,
            costs=draw.choice(_COSTS),
            limit=draw.choice(shapes.limits) if draw.random() < 0.5 else "none",
            vocabulary=draw.choice(("1", "2", "interlaced")) if spreads else "off",
            offload=draw.choice(("selective", "full", "full")) if offloads else "off",
            host=draw.choice(("any", "any", "any", "some", "some", "none")) if offloads else "any",
            copies=draw.choice(list(COPIES)) if offloads else "slow",
            recompute=draw.choice(("all", "odd", "half", "last")) if draw.random() < 0.25 else "no",
            fused=draw.choice(("all", "odd", "half", "last")) if draw.random() < 0.25 else "no",
            objective=draw.choice(("span", "makespan")),
            # Of a family that searches the last number counts: the others stay the cases that they were.
            evaluation=[draw.random() for _ in range(1 + shapes.searches)][-1] < 0.12,
        )


_CHOSEN_BY_HAND = (
    *(Case(name, 16, 64, costs="mixed") for name in ("gis", "v-half", "zb-auto")),
    *(Case(name, 16, 64, costs="hops") for name in ("v-auto", "zb-v")),
    Case("v-auto", 16, 64, costs="ends", limit="tight", objective="makespan"),
    Case("zb-auto", 16, 64, costs="ends", limit="tight", objective="makespan"),
    Case("zb-auto", 8, 48, chunks=2, costs="hops"),
    Case("v-auto", 16, 64, limit="tight", vocabulary="1"),
    Case("zb-auto", 8, 32, costs="uneven", limit="tight", offload="full", copies="fast"),
    Case("1f1b", 16, 64, costs="mixed", vocabulary="2", offload="full", copies="switch"),
    Case("interleaved", 16, 64, chunks=4, costs="ends"),
    # What is refused whatever it costs.
    Case("1f1b", 4, 8, chunks=2),
    Case("interleaved", 4, 8, chunks=1),
    Case("v-half", 4, 8, chunks=3),
    Case("seq-1f1b", 4, 8, splits=2, vocabulary="1"),
    Case("seq-1f1b", 4, 8, splits=2, offload="full"),
    Case("1f1b", 4, 8, splits=2),
    Case("zb-h1", 4, 8, group=2),
    Case("gis", 4, 8, group=1),
    Case("gis-h", 4, 8, group=5),
    Case("1f1b", 1, 8, vocabulary="1"),
    Case("1f1b", 4, 0),
    Case("1f1b", 0, 4),
    Case("1f1b", 4, 8, host="some"),
    Case("no-such-schedule", 4, 8),
    *(Case(STOCK, ranks, 2 * ranks, chunks) for ranks in (1, 2, 4, 8) for chunks in (None, 1, 2, 3)),
    *(Case(STOCK, 4, microbatches, chunks) for microbatches in (3, 6) for chunks in (None, 2)),
    *(Case(STOCK, 3, microbatches, 2) for microbatches in (4, 9)),
)


def cases() -> dict[str, Case]:
    """All cases by key: so many of every family, with turns taken, and those chosen by hand."""
    found: dict[str, Case] = {}
    for family, shapes in SHAPES.items():
        own: dict[str, Case] = {}
        for case in _drawn(family, shapes):
            own[case.key] = case
            if len(own) == (_OF_ONE_THAT_SEARCHES if shapes.searches else _OF_ONE):
                break
        found |= own
    return found | {case.key: case for case in _CHOSEN_BY_HAND}


def part(every: Mapping[str, Case], more: bool = False) -> dict[str, Case]:
    """The cases that ``make test`` runs, or twice as many; none for which torch would have to be imported, or whose search takes
    seconds."""
    return {
        key: case
        for at, (key, case) in enumerate(every.items())
        if at % (_MORE if more else _PART) == 0 and case.family != STOCK and case.ranks * case.microbatches < 1000
    }
