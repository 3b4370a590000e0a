"""Random placements, costs and schedules for property tests: any schedule that obeys the rules, not only those of a family."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

from hypothesis import strategies as st

from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts
from megatron.pipeline.planner.schedule.core.kinds import BRAIDED
from megatron.pipeline.planner.schedule.core.link_costs import LinkCosts
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement, from_rows, interleaved, linear, wave
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Operation, Program


def exact(numerator: int, denominator: int = 1) -> Any:
    """A time without rounding. Costs are typed as floats, and compute as well with fractions: hence ``Any``."""
    return Fraction(numerator, denominator)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    shape = draw(st.sampled_from(["linear", "interleaved", "wave", "any"]))
    if shape == "any":
        stages = draw(st.permutations(range(ranks * chunks)))
        return from_rows([stages[rank * chunks : (rank + 1) * chunks] for rank in range(ranks)])
    return linear(ranks) if shape == "linear" else interleaved(ranks, chunks) if shape == "interleaved" else wave(ranks, chunks)


@st.composite
def costs_of(draw: st.DrawFn, placement: Placement) -> Costs:
    """Exact costs, different on every stage; zero is likely, because ties are what breaks an order."""
    numbers = st.sampled_from([0, 0, 1, 1, 2, 3, 5]).map(exact)
    stages = []
    for _ in range(placement.ranks * placement.chunks):
        activation = draw(numbers)
        stages.append(
            StageCosts(draw(numbers), draw(numbers), draw(numbers), activation, activation * draw(st.sampled_from([0, 1])))
        )
    seconds = st.sampled_from([exact(0), exact(0), exact(1, 2), exact(1), exact(4)])
    return Costs(tuple(stages), draw(seconds), links=draw(links_of(placement.ranks, seconds)))


@st.composite
def links_of(draw: st.DrawFn, ranks: int, seconds: st.SearchStrategy[Any]) -> tuple[LinkCosts, ...]:
    """Some ways between neighbours in the ring with seconds of their own; often none."""
    ways = sorted({(rank, other % ranks) for rank in range(ranks) for other in (rank - 1, rank + 1)} if ranks > 1 else ())
    some = draw(st.lists(st.sampled_from(ways), max_size=3, unique=True)) if ways else []
    return tuple(LinkCosts(*way, draw(seconds), draw(seconds)) for way in sorted(some))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A schedule that obeys every rule, made by running passes that can run in a random order."""
    placement, microbatches = draw(placements()), draw(st.integers(1, 4))
    generator = random.Random(draw(st.integers(0, 2**32)))
    fused = {
        (rank, microbatch, chunk): generator.random() < 0.4
        for rank in range(placement.ranks)
        for microbatch in range(microbatches)
        for chunk in range(placement.chunks)
    }
    done: list[list[Pass]] = [[] for _ in range(placement.ranks)]
    candidates = list(_runnable(placement, microbatches, fused, done))
    while candidates:
        rank, work = generator.choice(candidates)
        done[rank].append(work)
        candidates = list(_runnable(placement, microbatches, fused, done))
    return Schedule("random", placement, microbatches, tuple(map(tuple, done)))


def _runnable(
    placement: Placement, microbatches: int, fused: dict[tuple[int, int, int], bool], done: list[list[Pass]]
) -> Iterator[tuple[int, Pass]]:
    """The rules, written a second time and in another way than in ``verify``."""

    def finished(rank: int, microbatch: int, chunk: int, *kinds: Kind) -> bool:
        return any(Pass(kind, microbatch, chunk) in done[rank] for kind in kinds)

    for rank in range(placement.ranks):
        for chunk in range(placement.chunks):
            stage = placement.stage(rank, chunk)
            before = placement.home(stage - 1) if stage else None
            after = placement.home(stage + 1) if stage < placement.last_stage else None
            for m in range(microbatches):
                if not finished(rank, m, chunk, Kind.F):
                    data = m == 0 or finished(rank, m - 1, chunk, Kind.F)
                    if data and (before is None or finished(before[0], m, before[1], Kind.F)):
                        yield rank, Pass(Kind.F, m, chunk)
                elif not finished(rank, m, chunk, Kind.B, Kind.BW):
                    in_turn = m == 0 or finished(rank, m - 1, chunk, Kind.B, Kind.BW)
                    weights = m == 0 or finished(rank, m - 1, chunk, Kind.W, Kind.BW)
                    arrived = after is None or finished(after[0], m, after[1], Kind.B, Kind.BW)
                    if in_turn and arrived and (weights or not fused[rank, m, chunk]):
                        yield rank, Pass(Kind.BW if fused[rank, m, chunk] else Kind.B, m, chunk)
                elif not finished(rank, m, chunk, Kind.W, Kind.BW) and (m == 0 or finished(rank, m - 1, chunk, Kind.W, Kind.BW)):
                    yield rank, Pass(Kind.W, m, chunk)


def parse(*rows: str) -> tuple[tuple[Pass, ...], ...]:
    """Passes of every rank from rows such as ``"F0 B0 W0"`` (chunk 0) or ``"F0.1 BW0.1"``."""
    return tuple(tuple(Pass.parse(text if "." in text else f"{text}.0") for text in row.split()) for row in rows)


def one_rank(row: str, copies: CopyCosts = CopyCosts(1, 1), **stage: Any) -> tuple[Schedule, Costs]:  # noqa: B008  # frozen
    """A schedule of one rank, by default with F, B and W of a second each, and copies that take a second."""
    passes = parse(row)
    costs = Costs((StageCosts(**{"forward": 1.0, "backward": 1.0, "weight": 1.0} | stage),), copies=copies)
    return Schedule("own", linear(1), 1 + max(work.microbatch for work in passes[0]), passes), costs


def same(one: object, other: object) -> bool:
    """Operations are tuples: a Join and a Wait of one collective are equal."""
    return type(one) is type(other) and one == other


def without(program: Program, what: Operation) -> Program:
    return tuple(one for one in program if not same(one, what))


def moved(program: Program, what: Operation, to: Operation, after: bool = False) -> Program:
    """A program with one operation before (after) another."""
    rest = without(program, what)
    place = next(place for place, one in enumerate(rest) if same(one, to)) + after
    return (*rest[:place], what, *rest[place:])


def unbraided(schedule: Schedule) -> Schedule:
    """The same order of passes, each alone."""
    alone = {braided: kind for kind, braided in BRAIDED.items()}
    rows = (tuple(work._replace(kind=alone.get(work.kind, work.kind)) for work in row) for row in schedule.passes)
    return replace(schedule, passes=tuple(rows))


def with_parts_of(stages: int, layers: int = 4) -> Costs:
    """Layers of experts whose all-to-alls take 0.4 of every F and B."""
    stage = StageCosts(
        1.0, 1.2, 0.8, dispatch=0.2, experts=0.3, combine=0.2, backward_combine=0.2, backward_experts=0.35,
        backward_dispatch=0.2, weight_experts=0.4, layers=layers,
    )  # fmt: skip
    return Costs((stage,) * stages)
