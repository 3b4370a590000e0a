"""Layers of every stage of a model: how many there can be of each, and which these are.

All that planning counts of layers is here: splits under which the heaviest rank is as light as possible, of layers that are alike
or not; the layers' numbers, from the counts of a split; and how many of them a rank has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from heapq import nsmallest
from itertools import accumulate, pairwise
from typing import TypeAlias

from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.slack import SLACK

_NEAR = 12  # layers by which a stage's end may be apart from where layers that are alike would have it
_KEPT = 60  # splits of the first stages that go on

# Of a split of the first stages: its end, and what every rank with further stages has to do; that of the heaviest other rank, how
# far these are from what is due, and the ends of its stages.
_Place: TypeAlias = tuple[int, tuple[float, ...]]
_Found: TypeAlias = tuple[float, float, tuple[int, ...]]


def numbers_of_layers(counts: Sequence[int]) -> list[range]:
    """Numbers of the layers of every stage, from 0 in the model's order.

    Args:
        counts: layers of every stage.
    """
    return [range(first, end) for first, end in pairwise(accumulate(counts, initial=0))]


def layers_of_ranks(counts: Sequence[int], placement: Placement) -> list[int]:
    """Layers of every rank, with those of every stage as ``numbers_of_layers`` takes them."""
    return [sum(counts[stage] for stage in stages) for stages in placement.stages]


def balanced_layers(layers: int, placement: Placement, extra: Mapping[int, float]) -> list[int]:
    """Layers of every stage, in the model's order.

    Every stage between the first and the last needs one. The others go, one by one, each to the lightest rank, and there to its
    lightest stage. Layers are alike, so no other way to share these out has a lighter heaviest rank: each rank
    that got one was the lightest then. Of equally light ranks the last gets it: under 1F1B it holds the fewest microbatches.

    Args:
        extra: what else a stage has to do, in layers: the output layer, and what hangs on it.

    Raises:
        ValueError: there are fewer layers than stages that need one; the caller's words of these layers go before its own.
    """
    middle = range(1, placement.last_stage)
    if layers < len(middle):
        raise ValueError(
            f"cannot be split over {placement.ranks} pipeline ranks with {placement.last_stage + 1} "
            f"stages: only the first and the last can do without any, so give at least {len(middle)} layers, "
            "or lower --pipeline-model-parallel-size"
        )
    counts = [int(stage in middle) for stage in range(placement.last_stage + 1)]
    loads = [count + extra.get(stage, 0.0) for stage, count in enumerate(counts)]
    for _ in range(layers - len(middle)):
        row = min(reversed(placement.stages), key=lambda row: sum(loads[stage] for stage in row))
        stage = min(sorted(row, reverse=True), key=loads.__getitem__)
        loads[stage] += 1
        counts[stage] += 1
    return counts


def balanced_by_weight(
    weights: Sequence[float], placement: Placement, extra: Mapping[int, float], least: Sequence[int] | None = None
) -> list[int]:
    """Layers of every stage, in the model's order, where layers differ: the heaviest rank is as light as was found.

    Layers that are alike are shared out by ``balanced_layers``. Otherwise stages end near where they would if all layers were as
    heavy as their mean, and ``_lightest`` looks for the best of these splits. It is never heavier than the even one.

    Args:
        weights: work of each layer.
        extra: what else a stage has to do.
        least: layers that a stage needs; by default as in ``balanced_layers``.

    Raises:
        ValueError: there are fewer layers than stages that need one.
    """
    count, mean = len(weights), sum(weights) / max(1, len(weights))
    shares = balanced_layers(count, placement, {stage: more / mean for stage, more in extra.items()} if mean else {})
    least = least or [int(0 < stage < placement.last_stage) for stage in range(placement.depth)]
    if not mean or max(weights) - min(weights) <= SLACK * mean:
        return raised(shares, least)
    even = raised(balanced_layers(count, placement, {}), least)
    before, ends = list(accumulate(weights, initial=0.0)), []
    for stage, share in enumerate(accumulate(shares)):
        first, last = sum(least[: stage + 1]), count - sum(least[stage + 1 :])
        middle = bisect_left(before, mean * share * (1 - SLACK))
        ends.append(range(max(first, min(middle - _NEAR, last)), max(first, min(middle + _NEAR, last)) + 1))
    ends[-1] = range(count, count + 1)
    due = [mean * share + extra.get(stage, 0.0) for stage, share in enumerate(shares)]
    cuts = _lightest(before, placement, extra, least, ends, due, heaviest(even, placement, extra, weights))
    return [end - start for start, end in pairwise((0, *cuts))] if cuts else even


def raised(counts: Sequence[int], least: Sequence[int]) -> list[int]:
    """The same number of layers, with at least what every stage needs."""
    found = [max(count, needed) for count, needed in zip(counts, least, strict=True)]
    for _ in range(sum(found) - sum(counts)):
        richest = max(range(len(found)), key=lambda stage: found[stage] - least[stage])
        found[richest] -= 1
    return found


def _lightest(
    before: Sequence[float],
    placement: Placement,
    extra: Mapping[int, float],
    least: Sequence[int],
    ends: Sequence[range],
    due: Sequence[float],
    most: float,
) -> tuple[int, ...]:
    """Ends of the stages under which the heaviest rank is lightest; none where it has more than ``most`` to do under all.

    Splits grow stage by stage. Of those that end at the same layer, and leave the same to ranks that get further stages, one goes
    on; and of all that do, the ``_KEPT`` under which ranks may end lightest, then those that are nearest to what is due. So it
    leaves none out where a rank has one stage, or where splits are few.

    Args:
        before: work of all layers before each.
        due: work that every stage should have.
    """
    whole, limit = before[-1] + sum(extra.values()), most * (1 + SLACK)
    closing = {max(row) for row in placement.stages}
    loads_due, opened, past = [0.0] * placement.ranks, placement.ranks, 0.0
    found: dict[_Place, _Found] = {(0, (0.0,) * placement.ranks): (0.0, 0.0, ())}
    for stage, choices in enumerate(ends):
        rank, closes, more = placement.home(stage)[0], stage in closing, extra.get(stage, 0.0)
        loads_due[rank] += due[stage]
        opened, past = opened - closes, past + more
        further: dict[_Place, _Found] = {}
        for (start, loads), (heavy, apart, cuts) in found.items():
            for end in choices:
                load = loads[rank] + before[end] - before[start] + more
                if end < start + least[stage]:
                    continue
                if load > limit:
                    break
                others = (*loads[:rank], 0.0 if closes else load, *loads[rank + 1 :])
                off = apart + (load - loads_due[rank]) ** 2 * closes
                one = max(heavy, load * closes), off, (*cuts, end)
                further[end, others] = min(one, further.get((end, others), one))
        loads_due[rank] *= not closes
        promise = partial(_promise, before, whole - past, opened, loads_due)
        found = dict(nsmallest(_KEPT, further.items(), key=promise))
    return min(found.values(), default=(0.0, 0.0, ()))[2]


def _promise(
    before: Sequence[float], whole: float, opened: int, due: Sequence[float], split: tuple[_Place, _Found]
) -> tuple[float, float]:
    """Least that the heaviest rank may have to do in the end, and how far all are from what is due."""
    (end, loads), (heavy, apart, _) = split
    left = (whole - before[end] + sum(loads)) / opened if opened else 0.0
    return max(heavy, left, *loads), apart + sum((load - one) ** 2 for load, one in zip(loads, due, strict=True))


def heaviest(
    counts: Sequence[int], placement: Placement, extra: Mapping[int, float], weights: Sequence[float] | None = None
) -> float:
    """Work of the heaviest rank, in layers, or by the ``weights`` of these."""
    work = [len(own) if weights is None else sum(weights[own.start : own.stop]) for own in numbers_of_layers(counts)]
    return max(sum(work[stage] + extra.get(stage, 0.0) for stage in row) for row in placement.stages)
