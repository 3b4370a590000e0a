"""The plans that the search starts from: building blocks, repeated once per microbatch.

A building block says when the passes of one microbatch should run, as offsets along its way through the stages and back
(Qi et al., "Pipeline Parallelism with Controllable Memory", section 3): the longer a stage waits between its F and its B,
the more microbatches it holds. Here the offsets come from the real costs, and serve as targets of list scheduling, which
resolves the collisions; the lifespans become quotas, how many microbatches a stage may hold.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from megatron.pipeline.planner.schedule.search.engine import Preferences
from megatron.pipeline.planner.schedule.search.instance import Instance, Plan
from megatron.pipeline.planner.schedule.time.orders import DOWN, MID, POST, UP, Array

# How far apart a pass and the same pass of the next stage are, in passes: forward on the first and second half of the
# stages, backward on the second and first half. (1, 1, 1, 1) is V-Min's block, (2, 1, 2, 1) V-Half's, (4, 2, 4, 2) ZB-V's.
_STEPS = ((1, 1, 1, 1), (2, 1, 2, 1), (1, 1, 2, 2), (3, 3, 3, 3), (1, 1.5, 2, 1.5), (4, 2, 4, 2), (1, 2, 1, 2))
_PAUSES = (0, 1, 2, 3)  # passes between the last F and the first B
_LAGS = (100.0, 0.5)  # microbatches between B and W: as late as memory allows, or soon
_ROUND = (0.8, 0.5, 0.2)  # what is added to a lifespan, in microbatches, before it is rounded up to a quota


def starts(instance: Instance, limits: Array, most: int, longest: Callable[[], float] = lambda: np.inf) -> Iterator[Plan]:
    """Plans within the limits to begin with: one or two that are always tried, then up to ``most`` others, best guesses first.

    Args:
        longest: above which value the next plan is of no use; it then is infinite.
    """
    simple = instance.construct(Preferences(greedy(instance)), limits, longest())
    if simple is not None:
        yield simple
    if instance.is_v:
        plan = instance.sorted(_packed(instance))
        if plan is not None and instance.within(plan, limits):
            yield plan
    for policy in itertools.islice(_seeds(instance, limits), most):
        plan = instance.construct(policy, limits, longest())
        if plan is not None:
            yield plan


def greedy(instance: Instance) -> Array:
    """Targets of plain list scheduling: B before F before W, the oldest microbatch first."""
    targets = np.zeros(instance.shape)
    many = instance.shape[2]
    for turn, kind in enumerate((UP, MID, DOWN, POST)):
        targets[kind] = turn * many + np.arange(many)
    return targets


def _seeds(instance: Instance, limits: Array) -> Iterator[Preferences]:
    """Parameters of list scheduling for one building block after another."""
    period, unit = period_and_unit(instance)
    one_home = len(set(instance.home.tolist())) == len(instance.home)
    for lag, pause, steps in itertools.product(_LAGS, _PAUSES, _STEPS[:1] if one_home else _STEPS):
        offsets = block(instance, steps, pause * unit, lag * period, unit)
        targets = offsets[:, :, None] + instance.begins * period
        held = offsets[UP] + instance.mean_seconds[UP] - offsets[DOWN] + instance.mean_seconds[POST]
        if one_home:
            yield from _linear(instance, limits, targets, unit)
        else:
            yield Preferences(targets, in_order=True)
            for rounding in _ROUND:
                yield Preferences(targets, None, np.clip(np.ceil(held / period + rounding), 1, 2.0**31).astype(np.int64))
            yield Preferences(targets, None, _shares(instance, held, limits))


def period_and_unit(instance: Instance) -> tuple[float, float]:
    """Seconds of one microbatch on the busiest rank, and the average seconds of one of its passes."""
    work = np.zeros(len(instance.lengths))
    np.add.at(work, instance.home, instance.mean_seconds.sum(axis=0))
    period = float(work.max()) or 1.0
    return period, period / max(1.0, float((instance.before != -2).sum()) / len(work))


def block(instance: Instance, steps: tuple[float, ...], pause: float, lag: float, unit: float) -> Array:
    """Offsets of the passes of one microbatch, float[5, S]."""
    stages = len(instance.home)
    offsets = np.zeros((5, stages))
    now = 0.0
    for stage in range(stages):
        if instance.mean_hops[DOWN, stage] < 0:
            now = 0.0
        offsets[DOWN, stage] = now
        step = instance.mean_seconds[DOWN, stage] + max(0.0, instance.mean_hops[DOWN, (stage + 1) % stages])
        turn = stage + 1 == stages or instance.home[stage + 1] == instance.home[stage]
        now += step if turn else max(step, steps[0 if 2 * stage < stages else 1] * unit)
    for stage in reversed(range(stages)):
        if instance.mean_hops[UP, stage] < 0:
            now = offsets[DOWN, stage] + instance.mean_seconds[DOWN, stage] + pause
        now += instance.mean_seconds[MID, stage]
        offsets[UP, stage] = now
        offsets[MID, stage] = now - instance.mean_seconds[MID, stage]
        offsets[POST, stage] = now + instance.mean_seconds[UP, stage] + lag
        step = instance.mean_seconds[UP, stage] + max(0.0, instance.mean_hops[UP, stage - 1])
        turn = stage == 0 or instance.home[stage - 1] == instance.home[stage]
        now += step if turn else max(step, steps[2 if 2 * stage >= stages else 3] * unit)
    return offsets


def _packed(instance: Instance) -> Array:
    """Targets of the building block on a V with the shortest way through all stages, where F takes 1 of 6 slots and BW 2.

    On every rank the four passes of a microbatch occupy slots of a period of 6 without a collision; which slots, is the
    rank's state. How long each pass waits from one rank to the next depends on the states of these two ranks only, so the
    shortest path over the ranks is the building block. If B and W are split, W has the slot directly after its B.
    """
    ranks, slots = len(instance.lengths), 6
    cells = itertools.product(range(slots), repeat=4)
    states = np.array([s for s in cells if len({s[0], s[1], s[2], (s[2] + 1) % 6, s[3], (s[3] + 1) % 6}) == slots]).T

    def ahead(later: Array, earlier: Array, least: int) -> Array:
        return least + (later - earlier - least) % slots

    f0, f1, b1, b0 = states
    hops = [  # slots from a rank (row) to the next (column); F of chunk 1 and B of chunk 0 travel the other way
        ahead(f0[None], f0[:, None], 1),
        ahead(f1[:, None], f1[None], 1),
        ahead(b1[None], b1[:, None], 2),
        ahead(b0[:, None], b0[None], 2),
    ]
    middle = ahead(b1, f1, 1)
    turns = ahead(f1, f0, 1), ahead(b0, b1, 2)
    length, choices = middle.astype(float), []
    for _ in range(ranks - 1):
        ways = length[:, None] + sum(hops)
        choices.append(ways.argmin(axis=0))
        length = ways.min(axis=0)
    path = [int((length + turns[0] + turns[1]).argmin())]
    for choice in reversed(choices):
        path.insert(0, int(choice[path[0]]))
    moves = [[int(hop[here, there]) for here, there in itertools.pairwise(path)] for hop in hops]
    forward = [*moves[0], int(turns[0][path[-1]]), *reversed(moves[1])]
    back = [*moves[2], int(turns[1][path[-1]]), *reversed(moves[3])]
    offsets = np.zeros(instance.shape[:2])
    offsets[DOWN] = np.cumsum([0, *forward])
    offsets[UP] = (offsets[DOWN, -1] + middle[path[0]] + np.cumsum([0, *back]))[::-1]
    offsets[MID], offsets[POST] = offsets[UP] - 0.5, offsets[UP] + 1
    return offsets[:, :, None] + slots * instance.begins


def _linear(instance: Instance, limits: Array, targets: Array, unit: float) -> Iterator[Preferences]:
    """One stage per rank: caps by how many microbatches more than the next rank each rank may run forward."""
    ranks = len(limits)
    behind = np.arange(len(instance.home))[::-1]
    sizes = instance.mean_allocated[DOWN]
    room = [limits[rank] / size for rank, size in zip(instance.home, sizes, strict=True) if size > 0]
    for depth in (1.0, 2.0, 1.5, *({min(room) / ranks} if room else ()), 3.0):
        yield Preferences(targets, np.maximum(1, np.floor(1 + depth * behind)).astype(np.int64), None)
    yield Preferences(targets)
    yield Preferences(targets, window=unit / 2)


def _shares(instance: Instance, held: Array, limits: Array) -> Array:
    """Quotas that divide a rank's memory among its stages in proportion to their lifespans; at least one microbatch each."""
    size = np.maximum(instance.mean_allocated[DOWN], 1e-300)
    wanted = np.zeros(len(limits))
    np.add.at(wanted, instance.home, held * size)
    scale = limits / np.maximum(wanted, 1e-300)
    return np.maximum(1, np.minimum(2.0**31, np.round(held * scale[instance.home]))).astype(np.int64)
