"""Costs of passes and hops on this machine: from measured iterations to ``Costs``, in seconds and bytes."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from megatron.pipeline import planner
from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import Costs, Kind, MemoryUnit, Pass, StageCosts, VocabularyCosts, cutting

_SHARDS = -1  # in place of a stage: the vocabulary shards of all ranks, which are equal
_REMADE = 1.05  # times what F holds: a B that leaves more makes activations again; up to that the two are taken to be as much
_SLOWEST = 9  # how many times longer than alone: beyond that a braid hides next to nothing
_Kind = TypeVar("_Kind", StageCosts, VocabularyCosts)
_Place = TypeVar("_Place")
_What = TypeVar("_What")


def measured_costs(timed: Sequence[Report], counted: Report) -> Costs:
    """The costs of every stage, for one microbatch: medians over its passes of the least seconds that each took in an iteration,
    since what disturbs a pass lengthens it. Hops and collectives: ``agree``.

    Where every backward is fused, only the sum of B and W is measured: half of it counts as B and half as W, and no memory
    counts as freed before W.

    Args:
        timed: for the seconds.
        counted: for the bytes. All reports are of schedules on one placement, with one number of slices; how many
            microbatches each has does not matter.
    """
    schedule = counted.schedule
    least: dict[tuple[int, int, Pass], float] = {}
    for place, rank, work, taken, _ in itertools.chain.from_iterable(map(_alone, timed)):
        least[place, rank, work] = min(taken, least.get((place, rank, work), taken))
    seconds = _medians((place, work.kind, taken) for (place, _, work), taken in least.items())
    changes = _medians((place, work.kind, change) for place, _, work, _, change in _alone(counted))
    stages = [
        _stage(
            {kind: schedule.splits * value for kind, value in seconds[stage].items()},
            {kind: schedule.splits * value for kind, value in changes[stage].items()},
        )
        for stage in range(schedule.placement.last_stage + 1)
    ]
    stages = _as_movable_as_others(stages)
    if schedule.vocabulary is None:
        return Costs(tuple(stages), unit=MemoryUnit.BYTES)
    shards: dict[str, float] = {str(kind): seconds[_SHARDS][kind] for kind in planner.kinds.VOCABULARY_KINDS}
    kept = max(0.0, changes[_SHARDS][Kind.S])
    vocabulary = VocabularyCosts(**shards, activation=kept, ranks=schedule.ranks)
    return Costs(tuple(stages), vocabulary=vocabulary, unit=MemoryUnit.BYTES)


def beside_communication(timed: Sequence[Report], costs: Costs) -> float:
    """The factor on computation beside communication at which braids take what they did, all together; 1 without any.

    Args:
        costs: measured in these iterations. Parts of layers are those that plans assume.
    """
    taken = [(braid, 0, seconds) for report in timed for braid, seconds in _braids(report)]
    took, costs = {braid: seconds[0] for braid, seconds in _medians(taken).items()}, cutting.with_parts(costs)

    def shorter(factor: float) -> bool:
        slowed = replace(costs, beside_communication=factor)
        return sum(sum(slowed.braid(*braid)) for braid in took) < sum(took.values())

    low, high = 1.0, 1.0 + bool(took) * _SLOWEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if shorter(middle) else (low, middle)
    return low


def _braids(report: Report) -> Iterator[tuple[tuple[int, Kind, int], float]]:
    """The stage, kind and other stage of every braid, as of ``Costs.braid``, and its seconds."""
    for rank, record in enumerate(report.ranks):
        for first, second in pairwise(record.passes):
            if second.work.kind.row.braided:
                ours, theirs = (report.schedule.placement.stage(rank, half.work.chunk) for half in (first, second))
                yield (ours, second.work.kind, theirs), second.end - first.start


def with_sizes(costs: Costs, sizes: Costs) -> Costs:
    """The seconds of costs, with the memory of others of the same stages."""
    held = ("activation", "retained", "checkpoint", "movable")
    stages = (
        replace(stage, **{name: getattr(other, name) for name in held})
        for stage, other in zip(costs.stages, sizes.stages, strict=True)
    )
    vocabulary = replace(costs.vocabulary, activation=sizes.vocabulary.activation)
    return replace(costs, stages=tuple(stages), vocabulary=vocabulary, unit=sizes.unit)


def _alone(report: Report) -> Iterator[tuple[int, int, Pass, float, int]]:
    """The stage and rank of every pass, the pass, its seconds, and how many bytes more are held at its end than before it.

    Not of the halves of braids: what each of them takes is not measured. Every stage has a forward and a backward that run
    alone, the first and the last.
    """
    for rank, record in enumerate(report.ranks):
        braids = ((first.work, second.work) for first, second in pairwise(record.passes) if second.work.kind.row.braided)
        halves = set(itertools.chain.from_iterable(braids))
        for (work, start, end), held, before in zip(record.passes, record.held, (0, *record.held), strict=False):
            if work not in halves:
                place = _SHARDS if work.kind.is_of_vocabulary else report.schedule.placement.stage(rank, work.chunk)
                yield place, rank, work, end - start, held - before


def _medians(samples: Iterable[tuple[_Place, _What, float]]) -> dict[_Place, dict[_What, float]]:
    """By stage and kind, for example."""
    found: dict[_Place, dict[_What, list[float]]] = defaultdict(lambda: defaultdict(list))
    for place, kind, value in samples:
        found[place][kind].append(value)
    return {place: {kind: statistics.median(values) for kind, values in kinds.items()} for place, kinds in found.items()}


def _as_movable_as_others(stages: list[StageCosts]) -> list[StageCosts]:
    """Stages with no offloaded activations get the average movable share of the others."""
    known = [(stage.movable, stage.activation) for stage in stages if stage.movable is not None]
    moved, whole = sum(one for one, _ in known), sum(one for _, one in known)
    if not whole:
        return stages
    return [replace(stage, movable=stage.activation * moved / whole) if stage.movable is None else stage for stage in stages]


def _stage(seconds: dict[Kind, float], changed: dict[Kind, float]) -> StageCosts:
    fused = seconds.get(Kind.BW)
    half = (fused or 0.0) / 2
    kept = max(0.0, changed[Kind.F])
    held = max(kept, kept + changed.get(Kind.R, 0.0))
    after = max(0.0, held + changed.get(Kind.B, 0.0))
    return StageCosts(
        forward=seconds[Kind.F],
        backward=seconds.get(Kind.B, half),
        weight=seconds.get(Kind.W, half),
        activation=held,
        retained=after if after > held * _REMADE else min(held, after),
        movable=min(held, max(0.0, -changed[Kind.D2H])) if Kind.D2H in changed and Kind.R not in changed else None,
        fused=fused,
        recompute=seconds.get(Kind.R, seconds[Kind.F]),
        checkpoint=kept if Kind.R in changed else 0.0,
    )


def agree(costs: Costs, hops: Sequence[float], exchanges: Sequence[float] = ()) -> Costs:
    """One number for every stage, for the hop and for the vocabulary's collective: medians over all ranks that measured it.
    Collective over the world."""
    mine = (costs, hops, exchanges)
    everyone = [mine] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    measured, *samples = zip(*everyone, strict=True)
    stages = zip(*(one.stages for one in measured), strict=True)
    hop, exchange = (statistics.median(found) if (found := [*itertools.chain(*each)]) else None for each in samples)
    shards = replace(_median(one.vocabulary for one in measured), exchange=exchange)
    beside = statistics.median(one.beside_communication for one in measured)
    return Costs(tuple(map(_median, stages)), hop or 0.0, shards, costs.copies, costs.unit, beside)


def _median(costs: Iterable[_Kind]) -> _Kind:
    same = list(costs)
    columns: Any = zip(*map(astuple, same), strict=True)
    values: Any = (None if None in column else statistics.median(column) for column in columns)
    return type(same[0])(*values)
