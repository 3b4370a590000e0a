"""Plans made in rounds: in every round each rank runs at most one F and one B (of each chunk), and W where it would wait.

Qi et al. construct ZB ("Zero Bubble Pipeline Parallelism", section 3.1) and ZB-V that way. A rank that waits for its next F or B
first runs every W that fits into that time. One more W would delay the pass; it runs only if the idle time it saves is more
than the rank can afford: than what it was idle less than the rank that was idle most, since only that one decides the span.

One construction takes as long as a single simulation, hence the search tries each choice either way (``RoundChoices``).
Rounds need one stage on every rank, or two on a V, and no R.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.search.engine import Arrays
from megatron.pipeline.planner.schedule.search.instance import Instance, Plan
from megatron.pipeline.planner.schedule.search.rounds_engine import RoundChoices, State, line_in_rounds, v_in_rounds
from megatron.pipeline.planner.schedule.time.orders import MID, Array

_NEAR = 1.01  # a plan up to this many times as long as the best may be shorter than that once it is compacted
_REPEATS = 8  # how often a construction on a V is repeated with what ranks were idle in the one before


def rounds(instance: Instance, limits: Array, longest: float = np.inf, few: bool = False) -> Iterator[Plan]:
    """Plans within the limits, one for each combination of choices that finds one.

    Args:
        longest: plans with a longer span than that are of no use.
        few: whether to leave out the choices that are seldom best.
    """
    if not can_be_in_rounds(instance):
        return
    line, stages = len(instance.home) == len(limits), len(instance.home)
    constructions = [(instance.seconds, True)]
    if not line and (np.ptp(instance.seconds, axis=1) > SLACK * instance.seconds.max(axis=1)).any():
        # The rounds of a V wait for each other less where all stages are taken to be equal.
        constructions.append((np.repeat(np.median(instance.seconds, axis=1, keepdims=True), stages, axis=1), False))
    every = itertools.product((1.0,) if few else (1.0, 0.0), (True, False), (True, False), (True, False) if line else (False,))
    for (seconds, real), (afford, eager, behind, dense) in itertools.product(constructions, every):
        arrays = instance.arrays._replace(seconds=seconds)
        spare = longest * (1 + SLACK) - instance.work if real else np.full(len(limits), np.inf)
        plan = _construct(instance, arrays, limits, RoundChoices(eager, behind, dense, afford), spare)
        if plan is not None:
            longest = min(longest, plan.span * _NEAR)
            yield plan


def can_be_in_rounds(instance: Instance) -> bool:
    """Tell whether there are rounds for a problem."""
    placed = instance.is_v or instance.problem.placement == linear(len(instance.lengths))
    return placed and not instance.backwards and bool((instance.before[MID] == -2).all())


def _construct(instance: Instance, arrays: Arrays, limits: Array, choices: RoundChoices, spare: Array) -> Plan | None:
    """On a V repeated with what each rank was idle, as long as that makes the longest idle time shorter."""
    best, before = None, np.zeros(len(limits) + 1)
    in_rounds, repeats = (line_in_rounds, 1) if len(instance.home) == len(limits) else (v_in_rounds, _REPEATS)
    for _ in range(repeats):
        state = State.of(instance, spare, limits, before, choices)
        if not in_rounds(arrays, state) or (best is not None and state.most[0] >= before[-1]):
            break
        best, before = state.order, np.append(state.idle, state.most)
        spare = np.minimum(spare, before[-1])
    return None if best is None else instance.replay(best)
