"""What is planned for several hundred problems stays what it was: digests of schedules, programs and times, in ``golden.json``.

A change that should leave plans alone leaves this file alone. One that is meant to change them writes it anew, from the
repository's root, and the commit shows which cases changed:

    .venv/bin/python -m tests.schedule.golden --write

Every case has three digests, so that a difference says whether the order of the passes changed, the programs that it is lowered
to, or only the times and the memory. A refusal has the name of its exception, without its message.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts, VocabularyCosts
from megatron.pipeline.planner.schedule.core.passes import Offload, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate

from .golden_cases import COPIES, STOCK, Case, cases

GOLDEN = Path(__file__).with_name("golden.json")
# All calls into the planner are in these four functions.


def make_schedule(case: Case) -> tuple[Schedule, Costs]:
    """The schedule of a case, and the costs that it was planned for.

    Raises:
        ValueError: it is refused.
    """
    if case.family == STOCK:
        from megatron.pipeline.runtime.pipeline import Pipeline  # imports torch

        pipeline = Pipeline(planning.Request(STOCK, case.ranks, case.microbatches, chunks=case.chunks))
        pipeline.plans.check(case.microbatches)
        return Schedule(STOCK, pipeline.placement, case.microbatches, ((),) * case.ranks), make_costs(case, pipeline.placement)
    placement = families.placement(case.family, case.ranks, case.chunks)
    costs = make_costs(case, placement)
    stages = range(case.ranks * placement.chunks)
    microbatch = max(sum(costs.stages[stage].activation for stage in row) for row in placement.stages)
    schedule = planning.plan(
        case.family,
        case.ranks,
        case.microbatches,
        costs,
        case.chunks,
        _limit(case, microbatch),
        objective=case.objective,
        recompute=_CHOSEN[case.recompute](stages),
        fused=_CHOSEN[case.fused](stages),
        splits=case.splits,
        group=case.group,
        vocabulary=None if case.vocabulary == "off" else Vocabulary(case.vocabulary),
        offload=None if case.offload == "off" else Offload(case.offload),
        host_limit={"any": None, "some": 1.3 * microbatch, "none": 1e-3 * microbatch}[case.host],
    )
    return schedule.forward_only() if case.evaluation else schedule, costs


def make_costs(case: Case, placement: Placement) -> Costs:
    """The costs of a case, for a placement."""
    vocabulary = VocabularyCosts()
    if case.vocabulary != "off":
        exchange = None if case.costs in ("equal", "hops") else 0.15
        vocabulary = VocabularyCosts(S=0.45, T=0.4, IF=0.05, IB=0.1, activation=0.3, exchange=exchange)
    count = case.ranks * placement.chunks
    stages = tuple(_stage(case, stage, count, placement.chunks) for stage in range(count))
    hop = {"hops": 0.3, "mixed": 0.12, "free": 0.0}.get(case.costs, 0.0)
    return Costs(stages, hop, vocabulary, COPIES[case.copies] if case.offload != "off" else CopyCosts())


def programs(schedule: Schedule, costs: Costs) -> Iterator[str]:
    """Every rank's program, one line for each operation."""
    for rank, program in enumerate(lower(schedule, costs)):
        yield f"rank {rank}"
        for operation in program:
            yield canonical(operation)


def times(schedule: Schedule, costs: Costs) -> Iterator[str]:
    """When every pass and every copy starts, how long it all takes, and what every rank holds at most."""
    timeline = simulate(schedule, costs)
    for what, table in (("rank", timeline.ranks), ("copies of rank", timeline.copies)):
        for rank, row in enumerate(table):
            yield f"{what} {rank}"
            for work, start, end in row:
                yield f"{work} {_number(start)}" if what == "rank" else f"{work} {_number(start)} {_number(end)}"
    yield f"span {_number(timeline.span)} makespan {_number(timeline.makespan)}"
    yield from ("peak", *map(_number, activation_peaks(schedule, costs)))


def orders(schedule: Schedule) -> Iterator[str]:
    """The placement, and every rank's passes in their order."""
    placement = schedule.placement
    yield f"replicas 1 splits {schedule.splits} vocabulary {canonical(schedule.vocabulary)}"
    for rank, (stages, passes) in enumerate(zip(placement.stages, schedule.passes, strict=True)):
        yield f"rank {rank} stages {' '.join(map(str, stages))}"
        yield " ".join(map(str, passes))


def canonical(value: object) -> str:
    """An operation, or a part of one, as text: the same wherever its class is defined, and however that one prints itself."""
    match value:
        case Pass():
            return str(value)
        case Compute(work, None):  # one that is not braided: as it was before there were braids
            return f"Compute ({work})"
        case Enum():
            return str(value.value)
        case None | bool() | int() | str():
            return str(value)
        case float():
            return _number(value)
        case tuple():
            parts: Iterable[object] = value
        case _ if is_dataclass(value):
            parts = [getattr(value, field.name) for field in fields(value)]
        case _:
            raise TypeError(f"no text for {type(value).__name__}: say here what it is")
    return " ".join((type(value).__name__, *(f"({canonical(part)})" for part in parts)))


def _number(value: float) -> str:
    return f"{float(value) + 0.0:.9g}"  # + 0.0: no -0


class Digests(NamedTuple):
    """What is kept of a case; for a refusal each is the exception's name."""

    plan: str
    program: str
    times: str


def digests(case: Case) -> Digests:
    try:
        schedule, costs = make_schedule(case)
    except ValueError as error:
        return Digests(*[type(error).__name__] * 3)
    return Digests(*(_digest(lines) for lines in (orders(schedule), programs(schedule, costs), times(schedule, costs))))


def _digest(lines: Iterable[str]) -> str:
    try:
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    except ValueError as error:
        return type(error).__name__


def _first(stages: Sequence[int]) -> Sequence[int]:
    return stages[: (len(stages) + 1) // 2]


_CHOSEN = {
    "no": lambda stages: (),
    "all": lambda stages: stages,
    "odd": lambda stages: stages[1::2],
    "half": _first,
    "last": lambda stages: stages[-1:],
}


def _stage(case: Case, stage: int, count: int, parts: int) -> StageCosts:
    """The costs of one of ``count`` stages, of which a microbatch goes through ``parts`` on every rank."""
    forward, backward, weight, activation, retained = {
        "equal": (1.0, 1.0, 1.0, 1.0, 1.0),
        "hops": (1.0, 1.2, 0.9, 1.0, 1.0),
        "uneven": (1.0 + 0.13 * (stage * 7 % 5), 1.1 + 0.17 * (stage * 3 % 4), 0.8 + 0.11 * (stage % 3), 1.0, 1.0),
        "shares": (1.0, 1.3, 0.7, 1.0, 0.35),
        "ends": (1.0, 1.05, 0.95, 1.0, 0.6),
        "mixed": (0.9 + 0.07 * (stage % 4), 1.2 - 0.06 * (stage % 3), 0.85, 1.0 + 0.2 * (stage % 2), 0.4 + 0.1 * (stage % 3)),
        "free": (1.0, 0.0 if stage % 3 == 1 else 1.0, 0.0 if stage % 3 else 0.5, 0.0 if stage % 4 == 3 else 1.0, 0.0),
    }[case.costs]
    if case.costs in ("ends", "mixed") and stage == 0:
        forward, weight, activation = forward + 0.2, weight + 0.25, activation + 0.1
    if case.costs in ("ends", "mixed") and stage == count - 1:
        forward, backward, weight, activation = forward + 0.45, backward + 0.4, weight + 0.35, activation + 0.5
    fused = 0.95 * (backward + weight) if case.costs == "mixed" else None
    movable = 0.8 * activation if case.costs in ("shares", "mixed") else None
    return StageCosts(
        forward / parts,
        backward / parts,
        weight / parts,
        activation / parts,
        retained / parts,
        None if fused is None else fused / parts,
        0.9 * forward / parts,
        0.1 * activation / parts,
        None if movable is None else movable / parts,
    )


def _limit(case: Case, microbatch: float) -> float | tuple[float, ...] | None:
    """The memory limit of a case."""
    spread = 0.0 if case.vocabulary == "off" else 2 * microbatch + 1
    few, many = max(1.2, 0.45 * case.ranks), 1.5 * case.ranks + 1
    match case.limit:
        case "none":
            return None
        case "low":
            return 0.6 * microbatch
        case "tight":
            return few * microbatch + spread
        case "loose":
            return many * microbatch + spread
        case _:
            return tuple((few + 0.7 * (rank * 5 % 3)) * microbatch + spread for rank in range(case.ranks))


def read() -> dict[str, Digests]:
    return {key: Digests(*row) for key, row in json.loads(GOLDEN.read_text()).items()}


def difference(before: Mapping[str, Digests], now: Mapping[str, Digests]) -> str:
    """What differs, in words; empty where nothing does."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    lines = [f"  {key}: {before.get(key)} -> {now.get(key)}" for key in changed[:5]]
    by_family = ", ".join(f"{family} {count}" for family, count in Counter(key.split()[0] for key in changed).items())
    return "\n".join([f"{len(changed)} cases differ: {by_family}", *lines]) if changed else ""


def write() -> str:
    """Write the file anew; what has changed, in words."""
    before, now = read(), {key: digests(case) for key, case in cases().items()}
    rows = ",\n".join(f"{json.dumps(key)}: {json.dumps(found)}" for key, found in now.items())
    GOLDEN.write_text(f"{{\n{rows}\n}}\n")
    return difference(before, now) or f"{len(now)} cases, all as before"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True, help="rewrite golden.json")
    parser.parse_args()
    print(write())
