"""The time of one iteration of a training and its parts, predicted from flags, a schedule's family and a cluster.

``evaluate`` plans the schedule for the memory that is left on a GPU and simulates it at the costs of ``estimate``: one iteration,
and iterations one after another, with the sums of gradients over data-parallel ranks, the optimizer's steps, and new weights on
all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import TypeAlias

from megatron.pipeline.planner import (
    SLACK,
    Costs,
    Device,
    Kind,
    LimitTooLow,
    Links,
    Problem,
    Schedule,
    activation_peaks,
    bounds,
    combined,
    cutting,
    estimate,
    least_between,
    rank_memory,
    solve,
)
from megatron.pipeline.tune.candidate import Candidate, Cluster
from megatron.pipeline.tune.costs import CandidateCosts

_SEARCHED = 150  # thousands of passes: a search's own budget hardly depends on the size, and what it runs is compiled
_OFFLOADED = 3  # times as many, for the copies
_BRAIDED = 20  # more where braids are tried, and families that search do so twice
_BOUND = 1.002  # times the bound without limits of memory: more of it would make a schedule shorter


@dataclass(frozen=True)
class IterationParts:
    """The parts of an iteration's seconds, as means over all ranks.

    Attributes:
        kernels: what computes, on the ranks that share a layer at the same time.
        messages: waiting for the ranks that share a layer, but for what runs behind another microbatch.
        recomputation: forwards that run again.
        imbalance: until the rank with most to do has done as much.
        bubble: the rest of the pipeline's time, idle.
        between: two pipelines: by how much a period is longer than an iteration alone, with gradients, steps and weights.
    """

    kernels: float
    messages: float
    recomputation: float
    imbalance: float
    bubble: float
    between: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def limit(self) -> str:
        """The name of the largest part other than ``kernels``."""
        return max((field.name for field in fields(self)[1:]), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True)
class Result:
    """A candidate that fits.

    Attributes:
        seconds: of an iteration.
        parts: what they go into.
        ranks: memory of every pipeline rank.
        costs: what the schedule was planned for, in seconds and bytes.
        memory_limit: bytes of activations that it was planned within; None where the family has no choice.
        memory_bound: whether more memory would make it faster.
        mfu: operations of the model over what all GPUs could do, without recomputation.
        device: the GPU.
        bound: seconds that no order of these passes in that memory is below.
    """

    candidate: Candidate
    seconds: float
    parts: IterationParts
    ranks: list[rank_memory.RankMemory]
    costs: Costs
    memory_limit: float | None
    memory_bound: bool
    mfu: float
    device: Device
    bound: float

    @property
    def tokens_per_second(self) -> float:
        return self.candidate.tokens / self.seconds

    @property
    def fullest(self) -> rank_memory.RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)


@dataclass(frozen=True)
class Infeasible:
    """A candidate that does not fit into memory, with the fewest bytes that its fullest rank needs.

    Attributes:
        state: how many of these are weights, gradients and optimizer state.
        state_too_large: whether no activations at all would fit.
    """

    candidate: Candidate
    needs: float
    state: float
    state_too_large: bool


@dataclass(frozen=True)
class Dominated:
    """A candidate that is known, mostly without planning, to take longer than another one.

    Attributes:
        memory_bound: whether it might not, had it more memory.
        planned: whether that took planning.
        bound: seconds that it is not below.
    """

    candidate: Candidate
    memory_bound: bool
    planned: bool
    bound: float


@dataclass(frozen=True)
class Failed:
    """A candidate that could not be planned, and why: a fault of this project's, which is not to end a search."""

    candidate: Candidate
    reason: str


Outcome: TypeAlias = Result | Infeasible | Dominated | Failed


def evaluate(cluster: Cluster, candidate: Candidate, beat: float = float("inf")) -> Outcome:
    """The outcome of a candidate on a cluster: see ``outcome_of``."""
    return outcome_of(CandidateCosts(cluster, candidate), beat)


def outcome_of(one: CandidateCosts, beat: float) -> Outcome:
    """The time and the memory of a candidate.

    Args:
        beat: seconds of an iteration; a candidate that takes longer is not planned if that is known before.
    """
    try:
        fixed = one.fixed
        if max(each.total for each in fixed) >= one.cluster.device.memory:
            return _infeasible(one.candidate, fixed, 0.0)
        return _evaluate(one, fixed, beat)
    except Exception as error:  # of any kind: thousands of others may do
        return Failed(one.candidate, str(error) if isinstance(error, ValueError) else repr(error))


def _evaluate(one: CandidateCosts, fixed: list[rank_memory.FixedMemory], beat: float) -> Outcome:
    candidate, device, family, within = one.candidate, one.cluster.device, one.family, one.within
    left = [device.memory - each.total for each in fixed]
    limits: list[float | None] = [max(0.0, min(left) - within) if family.plans_for_limits else None]
    between = least_between(one.steady(1))
    more = one.beyond(one.planned_microbatches) + between
    free = one.request(one.trained, one.planned_microbatches).on(one.placement, family.splits)
    if not one.offload and (not family.searches or (candidate.overlaps and family.memory is None)):
        least = _least_peaks(one)
        if any(peak > most for peak, most in zip(least, left, strict=True)):
            return _infeasible(candidate, fixed, max(least))
        if candidate.overlaps and not candidate.is_stock and family.memory is None:
            # Without megatron-core's order of braids, which holds more, where that does not fit.
            limits.append(max(least) - within)
    # What takes longer in any memory takes longer still with what saves some.
    for bounded, problem in (bounds.memory_bound, replace(free, limits=tuple(left))), (bounds.lower_bound, free):
        if (bound := bounded(problem) + more) > beat:
            return Dominated(candidate, memory_bound=bounded is bounds.memory_bound, planned=False, bound=bound)
    for limit in limits:
        try:
            planned = _plan(one, limit, beat - between)
        except LimitTooLow as error:
            return _infeasible(candidate, fixed, error.least + within)
        planned = replace(planned, bound=planned.bound + between)
        if isinstance(planned, Dominated):
            return planned
        ranks = rank_memory.predict(one.model, planned.schedule, candidate.layers, device)
        if max(rank.total for rank in ranks) <= device.memory * (1 + SLACK):
            return _result(one, planned, ranks, limit)
    return _infeasible(candidate, fixed, max(rank.activations for rank in ranks))


def _result(one: CandidateCosts, planned: _PlannedIteration, ranks: list[rank_memory.RankMemory], limit: float | None) -> Result:
    """The outcome of a candidate that fits."""
    candidate, device, quantized = one.candidate, one.cluster.device, one.shape.quantized
    parts = _parts(one, planned)
    operations = one.shape.training_operations() * candidate.microbatches * one.model.data_parallel_size
    peak = device.products(quantized.recipe.peak if quantized else "").peak
    mfu = operations / (parts.total * one.cluster.gpus * peak)
    bound = min(planned.bound, parts.total)
    return Result(candidate, parts.total, parts, ranks, one.trained, limit, planned.memory_bound, mfu, device, bound)


def seconds_of(cluster: Cluster, candidate: Candidate, schedule: Schedule) -> float:
    """Seconds of an iteration under a schedule, which may be of fewer microbatches than the iteration has."""
    one = CandidateCosts(cluster, candidate)
    alone = one.length(schedule)
    return alone + one.beyond(schedule.microbatches) + one.between(schedule, alone)


def least_seconds(one: CandidateCosts) -> float:
    """A lower bound on the seconds of any schedule of this candidate, from the work of its busiest rank: known at once.

    0 where its costs cannot be known, as ``evaluate`` then says.
    """
    try:
        costs = cutting.hidden(one.costs) if one.candidate.overlaps else one.costs
    except Exception:
        return 0.0
    return max(one.work(costs)) + one.candidate.microbatches * costs.vocabulary.total


def work(one: CandidateCosts) -> float:
    """The cost of planning it in thousands of placed passes: the same on every machine, and roughly proportional to time."""
    passes = 3 * (one.placement.last_stage + 1) * one.planned_microbatches / 1000
    searched = _SEARCHED if one.family.plans_for_limits else 0
    if one.candidate.overlaps and not one.candidate.is_stock:
        searched = 2 * searched + _BRAIDED
    return passes * (_OFFLOADED if one.offload else 1) + searched


@dataclass(frozen=True)
class _PlannedIteration:
    """A schedule for ``planned_microbatches``.

    Attributes:
        memory_bound: whether more memory might shorten it.
        alone: its seconds.
        pipeline: those of a pipeline of all microbatches.
        bound: seconds that such a pipeline is not below.
    """

    schedule: Schedule
    memory_bound: bool
    alone: float
    pipeline: float
    bound: float


def _plan(one: CandidateCosts, limit: float | None, beat: float) -> _PlannedIteration | Dominated:
    """Plan for ``planned_microbatches`` and extrapolate."""
    candidate, costs = one.candidate, one.trained
    whole, count = candidate.microbatches, one.planned_microbatches
    problem = one.problem(costs, count, limit)
    more = one.beyond(one.planned_microbatches)
    free = bounds.lower_bound(replace(problem, limits=None))
    least = free if one.offload else bounds.lower_bound(problem)  # what is in host memory is beyond the limits
    if least + more > beat:
        return Dominated(candidate, memory_bound=True, planned=False, bound=least + more)
    memory_bound = limit is not None and bounds.lower_bound(problem) > _BOUND * free
    schedule, bound = _solve(one, problem), least + more
    seconds = one.length(schedule)
    if count < whole:
        if seconds + more > beat:
            return Dominated(candidate, memory_bound, planned=True, bound=bound)  # not worth planning again
        step = min(one.placement.ranks, count - 1)
        shorter = _solve(one, one.problem(costs, count - step, limit))
        more = max(more, (whole - count) * (seconds - one.length(shorter)) / step)
    return _PlannedIteration(schedule, memory_bound, seconds, seconds + more * (count < whole), bound)


def _solve(one: CandidateCosts, problem: Problem) -> Schedule:
    """The schedule that training would run: stock has one order with braids, which holds a chunk's activations more."""
    name = one.candidate.variant.name
    if not (one.candidate.overlaps and one.candidate.is_stock):
        return solve(name, problem)
    order = solve(name, replace(problem, overlap=False))
    return combined(order) or order


def _least_peaks(one: CandidateCosts) -> Sequence[float]:
    """A lower bound on every rank's memory under a family with one order: of few microbatches, without vocabulary and braids,
    and where W has a choice as if each followed its B at once."""
    count = min(one.candidate.microbatches, 2 * one.placement.ranks)
    name = "1f1b" if one.family.keeps else one.candidate.variant.name
    schedule = solve(name, one.request(one.costs, count, bare=True).on(one.placement, one.family.splits))
    return activation_peaks(rank_memory.recomputed(one.model, one.shape, schedule), one.costs)


def _parts(one: CandidateCosts, planned: _PlannedIteration) -> IterationParts:
    shape, costs, schedule, count = one.shape, one.costs, planned.schedule, one.candidate.microbatches
    device, links = one.cluster.device, one.links
    behind = [seconds * count / schedule.microbatches for seconds in _overlapped(costs, schedule)]
    vocabulary = count * costs.vocabulary.total
    alone = estimate.layer_seconds(shape, device, Links.within(device.with_links(1e30)))
    layers = sum(one.candidate.layers) / one.placement.ranks
    hides = count * layers * estimate.saved_seconds(shape, device, links)
    backwards = Counter(work.kind for row in schedule.passes for work in row if work.kind in (Kind.B, Kind.BW))
    split = backwards[Kind.B] / (backwards.total() or 1)  # of the backwards, which hide nothing
    shared = estimate.layer_seconds(shape, device, links).total
    messages = count * layers * (shared - alone.total) - (1 - split) * hides - fmean(behind)
    work = [seconds + vocabulary + split * hides - less for seconds, less in zip(one.work(costs), behind, strict=True)]
    again = 0.0
    if shape.policy.recomputes:
        again = count * fmean(sum(costs.stages[stage].recompute for stage in row) for row in one.placement.stages)
    mean, most = fmean(work), max(work)
    between = one.between(schedule, planned.alone)
    return IterationParts(mean - messages - again, messages, again, most - mean, max(0.0, planned.pipeline - most), between)


def _overlapped(costs: Costs, schedule: Schedule) -> list[float]:
    """The seconds by which the braids of every rank are shorter than their halves."""
    found = []
    for stages, row in zip(schedule.placement.stages, schedule.rows, strict=True):
        less = 0.0
        for forward, backward in row.braids():
            ours, theirs = stages[forward.chunk], stages[backward.chunk]
            alone = costs.seconds(forward.kind, ours) + costs.seconds(backward.kind, theirs)
            less += alone - sum(costs.braid(ours, backward.kind, theirs))
        found.append(less)
    return found


def _infeasible(candidate: Candidate, fixed: list[rank_memory.FixedMemory], activations: float) -> Infeasible:
    fullest = max(fixed, key=lambda each: each.total)
    return Infeasible(candidate, fullest.total + activations, fullest.state, state_too_large=not activations)
