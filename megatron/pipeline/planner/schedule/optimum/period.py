"""A lower bound on the period: the seconds from one iteration's start to the next one's, with what ranks do between them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum.bound import lifespans, own_bound, rank_seconds, with_own_passes
from megatron.pipeline.planner.schedule.optimum.lines import lines
from megatron.pipeline.planner.schedule.transforms.boundary import BUCKETS, waits_for_norm


def period_bound(schedule: Schedule, problem: Problem) -> float:
    """A period that no order of the schedule's passes beats within the memory of its fullest rank, with any boundary whose chunks
    have one of ``BUCKETS``.

    * A rank computes all of its passes and steps.
    * A rank's lane reduces and gathers all of its buckets.
    * From a stage's first F to its last W there are at least the way of the first microbatch to the last stage and back, and all
      of the stage's backwards behind it; and all passes of the stage with all F and B of the rank's later stages. Then follow the
      stage's RS, OPT and AG, of which those of several buckets overlap, and the next first F. That F overlaps with all AG but
      the first, the last pass with all RS but the last.
    * Where steps wait for the norm, the first stage's OPT and AG follow it, then a makespan (``own_bound``), and then the RS of
      the chunk that is complete last. A rank steps and computes all of its passes in the same time, but for the RS of one chunk.
    """
    norm, costs = waits_for_norm(problem), cutting.shielded(problem.costs, schedule.shielded)
    own = with_own_passes(schedule, replace(problem, costs=costs))
    if own.overlap:
        own = replace(own, costs=cutting.hidden(own.costs), overlap=False)
    vocabulary = math.fsum(costs.each(lambda each: each.vocabulary.total, problem.microbatches)) if problem.vocabulary else 0.0
    work, stages = [seconds + vocabulary for seconds in rank_seconds(own)], costs.stages
    reduced = [stage.value("reduce") + costs.latency for stage in stages]
    fuses = any(work.kind.finishes_weights and work.kind is not Kind.W for row in schedule.passes for work in row)
    last = Kind.BW if fuses else Kind.W
    exposed = [_exposed(problem, stage, last) for stage in range(len(stages))]
    best = 0.0
    for seconds, row in zip(work, problem.placement.stages, strict=True):
        computed = seconds + sum(stages[stage].value("step") for stage in row)
        least = min(exposed[stage] for stage in row)
        best = max(best, computed + costs.norm + least if norm else computed)
        best = max(best, sum(reduced[stage] + stages[stage].value("gather") + costs.latency for stage in row))
    between = [min(_between(problem, stage, buckets, norm, last) for buckets in BUCKETS) for stage in range(len(stages))]
    best = max(best, *(chain + more for chain, more in zip(_chains(own), between, strict=True)))
    if norm:
        best = max(best, own_bound(schedule, replace(problem, objective=Objective.MAKESPAN)) + least_between(problem, last))
    return best


def least_between(problem: Problem, last: Kind = Kind.BW) -> float:
    """Seconds by which every period is longer than the makespan of its passes; 0 where iterations interlock.

    Args:
        last: the longest kind of pass that fills a chunk's buckets.
    """
    if not waits_for_norm(problem):
        return 0.0
    first = min(_stepped(problem, 0, buckets) for buckets in BUCKETS)
    return problem.costs.norm + first + min(_exposed(problem, stage, last) for stage in range(len(problem.costs.stages)))


def _chains(problem: Problem) -> list[float]:
    """For every stage, the least seconds from its first F to the end of its last W."""
    found = [0.0] * problem.placement.depth
    behind, backward = [0.0] * len(found), [0.0] * len(found)
    for line in lines(problem):
        seconds = float(line.between(0, line.count))
        for stage in problem.placement.stages[line.rank]:
            if stage == line.stage or (stage < line.stage and line.kind is not Kind.W):
                found[stage] += seconds
        if line.kind in (Kind.B, Kind.W):
            behind[line.stage] += seconds
        if line.kind is Kind.B:
            backward[line.stage] = _first(line.seconds)
    ways = [_first(span) for span in lifespans(problem)]
    return [max(all_, way - one + rest) for all_, way, one, rest in zip(found, ways, backward, behind, strict=True)]


def _first(each: Any) -> float:
    """Seconds of a stage's first microbatch."""
    return float(each[0]) if hasattr(each, "__len__") else float(each)


def _exposed(problem: Problem, stage: int, last: Kind) -> float:
    """The least seconds from the end of the last pass that adds to a stage's gradients to the end of its RS."""
    return min(_reduced(problem, stage, buckets, last) for buckets in BUCKETS)


def _reduced(problem: Problem, stage: int, buckets: int, last: Kind) -> float:
    reduce = problem.costs.bucket_seconds(Kind.RS, stage, buckets)
    return max(reduce, buckets * reduce - _beside(problem, stage, buckets, last))


def _stepped(problem: Problem, stage: int, buckets: int) -> float:
    """The least seconds of a stage's OPT and AG, without those that its first F takes while it runs."""
    step, gather = (problem.costs.bucket_seconds(kind, stage, buckets) for kind in (Kind.OPT, Kind.AG))
    last = step + gather + (buckets - 1) * max(step, gather) - _beside(problem, stage, buckets, Kind.F)
    return max(step + gather, buckets * step, last)


def _beside(problem: Problem, stage: int, buckets: int, kind: Kind) -> float:
    """The most seconds in which a pass runs beside RS or AG of its own stage; a braid takes no longer than both of its halves."""
    kinds = (Kind.F, Kind.BW) if problem.overlap else (kind,)
    longest = max(problem.costs.each(lambda costs: sum(costs.seconds(each, stage) for each in kinds), problem.microbatches))
    return (buckets - 1) / buckets * longest


def _between(problem: Problem, stage: int, buckets: int, norm: bool, last: Kind) -> float:
    """The least seconds of a stage's RS, OPT and AG in a number of buckets, each stepped and gathered when it can be; the first F
    and the last pass count whole."""
    if norm:
        return _reduced(problem, stage, buckets, last) + problem.costs.norm + _stepped(problem, stage, buckets)
    reduce, step, gather = (problem.costs.bucket_seconds(kind, stage, buckets) for kind in (Kind.RS, Kind.OPT, Kind.AG))
    hidden = sum(_beside(problem, stage, buckets, kind) for kind in (Kind.F, last))
    one, rest = reduce + step + gather, (buckets - 1) * max(reduce, step, gather)
    return max(one, one + rest - hidden, buckets * (reduce + gather) - hidden)
