"""Lower bound of a schedule, below which no order of the passes can bring the span, or the makespan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np

from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.kinds import BRAIDED, Flow
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.optimum.earliest import Earliest, usable
from megatron.pipeline.planner.schedule.optimum.lines import Line, Times, backwards_in_time, lines
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.transform import without_copies

ORIGINS = 4  # from how many ranks' points of view at least a span is looked at, where there are many ranks
SMALL = 512  # where there are fewer microbatches times stages, all are looked at, and more often


@lru_cache(maxsize=256)  # a search asks for what its report tells, and searches within other limits ask again
def lower_bound(problem: Problem) -> float:
    """A span (or makespan, if that is the objective) that no schedule can beat.

    It holds for every order of the passes that keeps the dependencies, the order of microbatches on each chunk and the
    limits, with any mixture of BW and of B and W on the stages that the problem does not fuse.

    The span is at least that of every rank, so take one rank, counted from its first pass, with W seconds of work.

    * Head: before the moment T after its first pass, the rank can have done only U(T) < T seconds of work: the first
      gradient is still on its way, what came before fills the memory, and on other ranks too microbatches wait for memory
      (``Earliest``). The rank idles for at least T - U(T) then, and if U(T) < W, all of it lies within its span.
    * Tail: the same, backwards in time, from the end of the rank's last pass, with T' and U'.
    * Both: if U(T) + U'(T') <= W, head and tail cannot overlap: together they would hold all the work. The same is true
      if the span is known to be at least T + T'. Then T - U(T) and T' - U'(T') both count.
    * The last pass of any kind on the rank ends no earlier than ``Earliest`` says.
    * Memory: what microbatches allocate they hold for at least their way to the last stage and back. Size times seconds,
      over all microbatches, has to fit into limit times span.
    * Links: where messages stand in line, all follow the first pass that sends one, and the last pass that needs one follows.
    * Rounds: only a whole number of microbatches fit between F and B of one stage, so that they go there in rounds.

    For the makespan, time is counted from the first pass of all ranks, and to the last of all; the rest is the same.

    At equal costs this is the span of ZB-H1 and ZB-V, and with their memory that of V-Half and, unless p = 2 modulo 3, of
    V-Min (Qi et al., "Zero Bubble Pipeline Parallelism" and "Pipeline Parallelism with Controllable Memory"): these are
    optimal. It is loose where the limits hardly sustain the rate (``sustain``). It is of the order of the microbatches that the
    problem has.

    With a spread vocabulary it is the larger of the bound without and of the work of the busiest rank. With braids it is that of
    every order with any braids: each pass computes on one lane of its rank, and communicates on another.

    Returns:
        Seconds (the unit of the costs); infinite if not even one microbatch fits into the limits.
    """
    if problem.overlap:
        return _bound_of_braids(problem)
    if problem.vocabulary:
        # Without them it is a schedule of the stages' passes; with them every rank has this much to do.
        stages = replace(problem, vocabulary=None)
        shards = math.fsum(problem.costs.each(lambda costs: costs.vocabulary.total, problem.microbatches))
        paces = (problem.costs.stages[first].pace for first, *_ in problem.placement.stages)
        return max(lower_bound(stages), *(work + pace * shards for work, pace in zip(rank_seconds(stages), paces, strict=True)))
    limits = [usable(problem, rank) for rank in range(problem.ranks)]
    if any(least_limit(problem, rank) > limit * (1 + SLACK) for rank, limit in enumerate(limits)):
        return math.inf
    forward = lines(problem)
    count = problem.microbatches * problem.splits
    small = count * len(problem.costs.stages) <= SMALL
    first, last, sweeps = (count, 0, 8) if small else (problem.ranks + 8, 4, 2)
    numbers = sorted({*range(min(first, count)), *range(max(0, count - last), count)})
    work = rank_seconds(problem)
    origins = _origins(work, len(numbers)) if problem.objective is Objective.SPAN else [None]
    head = Earliest(problem, forward, origins, numbers)
    tail = Earliest(problem, backwards_in_time(forward), origins, numbers)
    for _ in range(sweeps):
        head.sweep()
        tail.sweep()
    areas: list[float] = [area / limit for area, limit in zip(memory_time(problem), limits, strict=True) if limit > 0]
    spans = lifespans(problem)
    rounds: list[float] = [_rounds(problem, rank, limit, spans) for rank, limit in enumerate(limits)]
    best: float = max([*work, *areas, *rounds])
    for at, origin in enumerate(origins):
        best = max(best, _of_links(forward, head.first_ends(at), tail.first_ends(at)[::-1]))
        for rank in range(problem.ranks) if origin is None else [origin]:
            ends = max(head.last_end(at, rank), tail.last_end(at, rank))
            best = max(best, ends, _with_idle_time(work[rank], head.windows(at, rank), tail.windows(at, rank), ends))
    return best


def memory_bound(problem: Problem) -> float:
    """A span that no schedule within the limits can beat, from memory-time alone (``lower_bound``), and with copies to the host
    where the problem has these; known in a moment."""
    costs = cutting.hidden(problem.costs) if problem.overlap else problem.costs
    problem = replace(problem, costs=costs, overlap=False, vocabulary=None)
    areas = enumerate(memory_time(problem, problem.offload is not None))
    return max(area / limit if (limit := usable(problem, rank)) else math.inf for rank, area in areas)


def own_bound(schedule: Schedule, problem: Problem) -> float:
    """The lower bound that a schedule is compared with, for the problem's objective and costs.

    It is that of every order of its passes on its placement that holds no more memory on a rank than this schedule does on its
    fullest one, host memory included. So schedules that were planned for different limits can be compared. The stages whose B
    has work behind its collectives are the schedule's.
    """
    problem = replace(problem, costs=cutting.shielded(problem.costs, schedule.shielded))
    most = max(activation_peaks(without_copies(schedule), problem.costs))
    return lower_bound(replace(with_own_passes(schedule, problem), limits=(most,) * problem.ranks))


def _bound_of_braids(problem: Problem) -> float:
    """The largest of three: the bound as if nothing were communicated, each rank's lane of communication, and what follows from
    the moment before which a rank has no backward and can only run forwards alone (``_with_forwards_alone``).

    For the makespan, a rank's begin when its first forward has arrived, and the last gradient that leaves it has its way to go.
    """
    placement, costs = problem.placement, problem.costs
    bounds = [lower_bound(replace(problem, costs=cutting.hidden(costs), overlap=False))]
    plain = problem.splits == 1 and not problem.recompute and not costs.loads
    for rank, stages in enumerate(placement.stages):
        there, back = _ways(problem, min(stages)) if plain and problem.objective is Objective.MAKESPAN else (0.0, 0.0)
        communicating = min(costs.each(lambda each: sum(each.communicating[stage] for stage in stages), problem.microbatches))  # noqa: B023
        bounds.append(there + problem.microbatches * communicating + back)
        if plain:
            seconds, later = _with_forwards_alone(problem, rank)
            bounds.append(there + max(seconds, seconds - later + back))
    return max(bounds)


def _ways(problem: Problem, stage: int) -> tuple[float, float]:
    """The least seconds from the start of the first forward to its arrival at a stage, and from the end of the stage's last
    backward to that of the first stage. Nothing runs beside either: no backward is there yet, or no forward is left."""
    costs = problem.costs
    before = range(stage)
    hops, returns = (sum(messages[:stage]) for messages in _messages(problem))
    back = [min(costs.seconds(kind, one) for kind in BRAIDED if one not in problem.fused or kind is Kind.BW) for one in before]
    if back:
        back[0] = _backward_seconds(problem, 0)
    return sum(costs.seconds(Kind.F, one) for one in before) + hops, sum(back) + returns


def _messages(problem: Problem) -> tuple[list[float], list[float]]:
    """Seconds of the message from each stage to the next, and of that back."""
    homes = [problem.placement.home(stage)[0] for stage in range(problem.placement.depth)]
    message = problem.costs.message
    return [message(one, other) for one, other in pairwise(homes)], [message(other, one) for one, other in pairwise(homes)]


def _backward_seconds(problem: Problem, stage: int) -> float:
    """Seconds of a backward that is not in a braid, with its weights' gradients."""
    fused, *parts = (problem.costs.seconds(kind, stage) for kind in (Kind.BW, Kind.B, Kind.W))
    return fused if stage in problem.fused else min(fused, sum(parts))


def _with_forwards_alone(problem: Problem, rank: int) -> tuple[float, float]:
    """The least span of a rank: as many forwards as fit run alone before its first backward can start, all others in braids, and
    as many backwards as those run alone. And the most seconds of that which W can take after the last backward."""
    placement, costs = problem.placement, problem.costs
    stages, last, limit = placement.stages[rank], placement.last_stage, usable(problem, rank)
    first, deepest = min(stages), max(stages)
    hops, returns = _messages(problem)
    until_backward = sum(costs.seconds(Kind.F, stage) for stage in range(first, last + 1))
    until_backward += sum(min(costs.seconds(kind, stage) for kind in BRAIDED) for stage in range(deepest + 1, last + 1))
    until_backward += sum(hops[first:]) + sum(returns[deepest:])
    forwards = [costs.seconds(Kind.F, stage) for stage in stages]
    backwards = [_backward_seconds(problem, stage) for stage in stages]
    together = min(forwards) + min(backwards)
    for one, other in product(stages, stages):
        whole, without = (sum(costs.braid(one, kind, other)) for kind in (Kind.FBW, Kind.FB))
        together = min(together, whole)
        if other not in problem.fused:
            together = min(together, without + costs.seconds(Kind.W, other))
    count = problem.microbatches * len(stages)
    alone = min(count, until_backward / min(forwards)) if min(forwards) else count
    if least := min(costs.stages[stage].activation for stage in stages):
        alone = min(alone, limit / least * (1 + SLACK))  # what runs before the first backward is held
    split = [costs.stages[stage] for stage in stages if stage not in problem.fused]
    later = problem.microbatches * sum(cost.weight for cost in split)
    if limit < math.inf and split and all(cost.retained for cost in split):
        later = min(later, limit * (1 + SLACK) * max(cost.weight / cost.retained for cost in split))
    return until_backward + (count - alone) * together + alone * min(backwards), later


def with_own_passes(schedule: Schedule, problem: Problem) -> Problem:
    """The problem, in which others may run what the schedule does: braids, if it has any; and R on its stages that run R for some
    microbatches, for all of them, at no cost in time."""
    if any(row.is_braided for row in schedule.rows):
        problem = replace(problem, overlap=True)
    runs = {
        schedule.placement.stage(rank, work.chunk)
        for rank, passes in enumerate(schedule.passes)
        for work in passes
        if work.kind is Kind.R
    }
    some = runs - problem.recompute
    if not some:
        return problem
    stages = tuple(replace(cost, recompute=0) if at in some else cost for at, cost in enumerate(problem.costs.stages))
    return replace(problem, costs=replace(problem.costs, stages=stages), recompute=problem.recompute | some)


def rank_seconds(problem: Problem) -> list[float]:
    """Seconds that every rank computes, in its stages' passes."""
    work: list[float] = [0.0] * problem.ranks
    for line in lines(problem):
        work[line.rank] += float(line.between(0, line.count))
    return work


def least_limit(problem: Problem, rank: int) -> float:
    """The memory without which a rank cannot run even one microbatch, in the costs' unit.

    When a stage runs its first backward, the microbatch (all its slices) occupies that stage and, of those of the rank, the
    stages before it. Where R follows, these hold no more than what is kept for it.
    """
    least = 0.0
    for stage, held in nested(problem, rank):
        cost = _largest(problem).stages[stage]
        again = cost.activation - cost.checkpoint if stage in problem.recompute else 0
        least = max(least, held * problem.splits + float(again) / problem.splits)
    return least


def _largest(problem: Problem) -> Costs:
    """The costs of the microbatch that holds most."""
    costs = problem.costs
    return costs.of(max(range(problem.microbatches), key=lambda number: costs.loads[number].memory)) if costs.loads else costs


def _origins(work: list[float], followed: int) -> Sequence[int | None]:
    """The ranks whose span is bounded: all, or the first, the last and those with the most work, to keep it fast."""
    by_work = sorted(range(len(work)), key=lambda rank: -work[rank])
    ordered = dict.fromkeys([by_work[0], 0, len(work) - 1, *by_work])
    return sorted(list(ordered)[: max(ORIGINS, 200 // followed)])


def nested(problem: Problem, rank: int) -> Iterator[tuple[int, float]]:
    """For every stage of a rank, what the largest microbatch (slice) holds there while it is between F and B of that stage.

    It occupies the stages before on the same rank as well: their B are still to come.
    """
    held, costs = 0.0, _largest(problem)
    for stage in sorted(problem.placement.stages[rank]):
        cost = costs.stages[stage]
        held += float(cost.checkpoint if stage in problem.recompute else cost.activation) / problem.splits
        yield stage, held


def _rounds(problem: Problem, rank: int, limit: float, spans: Sequence[float]) -> float:
    """The span from which on microbatches can be between F and B of every stage, as many at once as the limit allows."""
    if limit == math.inf or problem.costs.loads:
        return 0.0
    best, count = 0.0, problem.microbatches * problem.splits
    first = spans[min(problem.placement.stages[rank])]
    for stage, held in nested(problem, rank):
        way = first - spans[stage]  # of the first to this stage, and of the last from it
        if held > 0:
            at_once = max(1, math.floor(limit / held * (1 + SLACK)))
            best = max(best, -(-count // at_once) * spans[stage] + way)
    return best


def _of_links(forward: Sequence[Line], first: list[float], last: list[float]) -> float:
    """Seconds of all messages that stand in one line, with what is before the first and behind the last of them.

    Args:
        first, last: by line, the least seconds until the end of its first pass, and from the start of its last one.
    """
    ways: dict[tuple[int, int], tuple[float, float, float]] = {}
    for index, (other, hop, way, busy) in ((index, each) for index, line in enumerate(forward) for each in line.before):
        if np.any(busy):
            seconds, there, back = ways.get(way, (0.0, math.inf, math.inf))
            seconds += float(np.sum(busy * np.ones(forward[index].count)))
            ways[way] = seconds, min(there, first[other]), min(back, last[index] + float(np.min(hop - busy)))
    return max((sum(each) for each in ways.values()), default=0.0)


def _with_idle_time(work: float, head: tuple[Times, Times], tail: tuple[Times, Times], known: float) -> float:
    """The rank's work, and the most idle time of a head, of a tail, or of both where they cannot overlap.

    ``known`` is a bound of this rank's span.
    """
    (heads, head_idle, head_work), (tails, tail_idle, tail_work) = _idle(work, *head), _idle(work, *tail)
    best = work + float(max(head_idle[-1], tail_idle[-1]))
    for limits, lengths in ((work - tail_work, head_work), (max(known, best) - tails, heads)):
        at = np.searchsorted(lengths, limits * (1 - SLACK), side="right") - 1
        both = np.where(at >= 0, head_idle[at] + tail_idle, 0)
        best = max(best, work + float(both.max()))
    return best


def _idle(work: float, moments: Times, most: Times) -> tuple[Times, Times, Times]:
    """Moments, the idle time known to lie before each, and the work that allows; from none at moment 0."""
    within = most < work * (1 - SLACK)
    moments, most = (np.concatenate([[0.0], values[within]]) for values in (moments, most))
    return moments, np.maximum.accumulate(np.maximum(moments - most, 0)), np.maximum.accumulate(most)


def memory_time(problem: Problem, offloads: bool = False) -> list[float]:
    """Least memory-time of all microbatches of an iteration on every rank, size times seconds, in the costs' units.

    A stage holds what F allocates for a lifespan (``lifespans``), what R allocates from R until B ends, and what is
    retained until W ends.

    Args:
        offloads: for a lifespan, or for F, B and a copy to the host and back between them, whichever is shorter.
    """
    spans, held, copies = lifespans(problem), [0.0] * problem.ranks, problem.costs.copies
    smallest = min((load.memory for load in problem.costs.loads), default=1.0)
    seconds = {(line.stage, line.kind): line.seconds for line in lines(problem)} if offloads else {}
    level, way = [0.0] * len(spans), [0.0] * len(spans)  # what a microbatch holds by then, and what of that for its lifespan
    for line in lines(problem):
        stage = line.stage
        level[stage] += max(line.change, 0.0)
        if line.kind.row.sends is Flow.ACTIVATION:
            way[stage], span = level[stage], spans[stage]
            if offloads:
                away = (copies.to_host + copies.to_device) * way[stage] * smallest
                span = np.minimum(span, seconds[stage, Kind.F] + seconds[stage, Kind.B] + away)
            held[line.rank] += float(np.sum(line.memory * way[stage] * span))
        held[line.rank] += float(np.sum(line.memory * (level[stage] - way[stage]) * line.seconds))
        level[stage] += min(line.change, 0.0)
        if line.kind.row.sends is Flow.GRADIENT:
            way[stage] = 0.0
    return held


def lifespans(problem: Problem) -> list[Any]:
    """For every stage, the least seconds from the start of F to the end of B: to the last stage and back. For every microbatch
    (slice) of the stage, where these are unequal.

    The word is that of Qi et al., "Pipeline Parallelism with Controllable Memory", section 3.
    """
    placement, every = problem.placement, lines(problem)
    seconds = {(line.stage, line.kind): line.seconds for line in every}
    hops = {(every[other].stage, line.stage): hop for line in every for other, hop, *_ in line.before}
    spans: list[Any] = []
    for stage in reversed(range(placement.depth)):
        after = stage + 1
        last = placement.is_last(stage)
        inner = seconds.get((stage, Kind.R), 0.0) if last else hops[stage, after] + spans[-1] + hops[after, stage]
        spans.append(seconds[stage, Kind.F] + inner + seconds[stage, Kind.B])
    return spans[::-1]
