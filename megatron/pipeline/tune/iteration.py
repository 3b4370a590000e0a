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

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.costmodel.estimate import estimate, layer_seconds, saved_seconds
from megatron.pipeline.planner.costmodel.links import Links, links_of
from megatron.pipeline.planner.costmodel.memory import (
    FixedMemory,
    RankMemory,
    fixed_memory,
    makes_weights_again,
    predict,
    recomputed,
)
from megatron.pipeline.planner.costmodel.replicas import between_seconds, with_replicas
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.optimum.period import least_between
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.braid import combined
from megatron.pipeline.planner.shape import gpt
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.tune.candidate import Candidate, Cluster

_SEARCHED = 150  # thousands of passes: a search's own budget hardly depends on the size, and what it runs is compiled
_OFFLOADED = 3  # times as many, for the copies
_BRAIDED = 20  # more where braids are tried, and families that search do so twice
_BOUND = 1.002  # times the bound without limits of memory: more of it would make a schedule shorter
_ROUNDS = 4  # microbatches a rank that are planned; beyond, time grows by as much with each


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
    """

    candidate: Candidate
    seconds: float
    parts: IterationParts
    ranks: list[RankMemory]
    costs: Costs
    memory_limit: float | None
    memory_bound: bool
    mfu: float
    device: Device

    @property
    def tokens_per_second(self) -> float:
        return self.candidate.tokens / self.seconds

    @property
    def fullest(self) -> RankMemory:
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
    """

    candidate: Candidate
    memory_bound: bool
    planned: bool


@dataclass(frozen=True)
class Failed:
    """A candidate that could not be planned, and why: a fault of this project's, which is not to end a search."""

    candidate: Candidate
    reason: str


Outcome: TypeAlias = Result | Infeasible | Dominated | Failed


def evaluate(cluster: Cluster, candidate: Candidate, beat: float = float("inf")) -> Outcome:
    """The time and the memory of a candidate.

    Args:
        beat: seconds of an iteration; a candidate that takes longer is not planned if that is known before.
    """
    try:
        return _evaluate(cluster, candidate, beat)
    except Exception as error:  # of any kind: thousands of others may do
        return Failed(candidate, str(error) if isinstance(error, ValueError) else repr(error))


def _evaluate(cluster: Cluster, candidate: Candidate, beat: float) -> Outcome:
    args, placement, variant = candidate.args, candidate.placement, candidate.variant
    fixed = fixed_memory(args, placement, candidate.layers, candidate.args.vocabulary.spread, cluster.device)
    left = [cluster.device.memory - each.total for each in fixed]
    if min(left) <= 0:
        return _infeasible(candidate, fixed, 0.0)
    apart = costs_of(cluster, candidate)
    costs, within = _as_trained(candidate, apart)
    family = families.named(variant.name)
    limits: list[float | None] = [max(0.0, min(left) - within) if family.plans_for_limits else None]
    if not family.plans_for_limits and not candidate.args.offloading.mode:
        least = _least_peaks(candidate, apart)
        if any(peak > most for peak, most in zip(least, left, strict=True)):
            return _infeasible(candidate, fixed, max(least))
        if candidate.overlaps and not candidate.is_stock and family.memory is None:
            # Without megatron-core's order of braids, which holds more, where that does not fit.
            limits.append(max(least) - within)
    beat -= least_between(_steady(cluster, candidate, costs, 1))
    for limit in limits:
        try:
            planned = _plan(candidate, costs, limit, beat)
        except LimitTooLow as error:
            return _infeasible(candidate, fixed, error.least + within)
        if isinstance(planned, Dominated):
            return planned
        schedule, memory_bound, alone, pipeline = planned
        ranks = predict(args, schedule, candidate.layers, cluster.device)
        if max(rank.total for rank in ranks) <= cluster.device.memory * (1 + 1e-9):
            break
    else:
        return _infeasible(candidate, fixed, max(rank.activations for rank in ranks))
    between = between_pipelines(cluster, candidate, costs, schedule, alone)
    parts = _parts(cluster, candidate, apart, schedule, pipeline, between)
    shape = Shape.of(args)
    operations = gpt.training_operations(shape) * candidate.microbatches * args.data_parallel_size
    peak = cluster.device.products(shape.quantized.recipe.peak if shape.quantized else "").peak
    mfu = operations / (parts.total * cluster.gpus * peak)
    return Result(candidate, parts.total, parts, ranks, costs, limit, memory_bound, mfu, cluster.device)


def costs_of(cluster: Cluster, candidate: Candidate) -> Costs:
    """Seconds and bytes of its passes."""
    args, shape = candidate.args, Shape.of(candidate.args)
    overlaps = candidate.variant.name == "interleaved" and getattr(args, "overlap_p2p_comm", True)
    waits = candidate.is_stock and args.pipeline_model_parallel_size > 1 and not overlaps
    family = families.named(candidate.variant.name)
    exposed = family.exposed_hops if waits else 0.0
    split, links = not (family.fused or makes_weights_again(args)), links_of(cluster.device, cluster.per_node, args)
    costs = estimate(
        shape, candidate.placement, candidate.layers, cluster.device, candidate.args.vocabulary.spread, split, links, exposed
    )
    # A plan joins B and W where BW hides sums over tensor-parallel ranks, not to save a pass's start alone.
    return costs if _fuses(candidate) else cutting.without_fused(costs)


def between_pipelines(cluster: Cluster, candidate: Candidate, costs: Costs, schedule: Schedule, alone: float) -> float:
    """Seconds by which a period is longer than an iteration alone: see ``between_seconds``."""
    links = links_of(cluster.device, cluster.per_node, candidate.args)
    problem = _steady(cluster, candidate, costs, schedule.microbatches)
    return between_seconds(candidate.args, links, schedule, problem, alone, plans=not candidate.is_stock)


def _steady(cluster: Cluster, candidate: Candidate, costs: Costs, microbatches: int) -> Problem:
    """The problem with what ranks do between two iterations."""
    args, links = candidate.args, links_of(cluster.device, cluster.per_node, candidate.args)
    whole = with_replicas(args, costs, candidate.placement, candidate.layers, links, cluster.device)
    spread = args.vocabulary.spread
    return Problem(candidate.placement, microbatches, whole, objective=candidate.objective, vocabulary=spread)


def least_seconds(cluster: Cluster, candidate: Candidate) -> float:
    """A lower bound on the seconds of any schedule of this candidate, from the work of its busiest rank: known at once.

    0 where its costs cannot be known, as ``evaluate`` then says.
    """
    try:
        costs = _fastest(candidate, costs_of(cluster, candidate))
    except Exception:
        return 0.0
    return max(_work(candidate, costs)) + candidate.microbatches * costs.vocabulary.total


def planned_microbatches(candidate: Candidate) -> int:
    """Microbatches to plan for, of which the time of all of them follows."""
    whole, ranks = candidate.microbatches, candidate.placement.ranks
    fewer = max(_ROUNDS * ranks, 2 * ranks + whole % ranks)
    fewer += (whole - fewer) % ranks  # interleaved wants multiples of the ranks
    return min(whole, fewer)


def work(candidate: Candidate) -> float:
    """The cost of planning it in thousands of placed passes: the same on every machine, and roughly proportional to time."""
    passes = 3 * (candidate.placement.last_stage + 1) * planned_microbatches(candidate) / 1000
    searched = _SEARCHED if families.named(candidate.variant.name).plans_for_limits else 0
    if candidate.overlaps and not candidate.is_stock:
        searched = 2 * searched + _BRAIDED
    return passes * (_OFFLOADED if candidate.args.offloading.mode else 1) + searched


def _plan(
    candidate: Candidate, costs: Costs, limit: float | None, beat: float
) -> tuple[Schedule, bool, float, float] | Dominated:
    """Plan for ``planned_microbatches`` and extrapolate.

    Returns:
        The schedule, whether more memory might shorten it, its seconds, and those of a pipeline of all microbatches.
    """
    whole, count = candidate.microbatches, planned_microbatches(candidate)
    problem = _problem(candidate, costs, count, limit)
    more = (whole - count) * (max(_work(candidate, _fastest(candidate, costs))) / whole + costs.vocabulary.total)
    free = lower_bound(replace(problem, limits=None))
    least = free if candidate.args.offloading.mode else lower_bound(problem)  # what is in host memory is beyond the limits
    if least + more > beat:
        return Dominated(candidate, free + more <= beat, planned=False)
    memory_bound = limit is not None and lower_bound(problem) > _BOUND * free
    schedule = _solve(candidate, problem)
    seconds = _length(candidate, costs, schedule)
    if count < whole:
        if seconds + more > beat:
            return Dominated(candidate, memory_bound, planned=True)  # not worth planning again
        step = min(candidate.placement.ranks, count - 1)
        shorter = _solve(candidate, _problem(candidate, costs, count - step, limit))
        more = max(more, (whole - count) * (seconds - _length(candidate, costs, shorter)) / step)
    return schedule, memory_bound, seconds, seconds + more * (count < whole)


def _solve(candidate: Candidate, problem: Problem) -> Schedule:
    """The schedule that training would run: stock has one order with braids, which holds a chunk's activations more."""
    name = candidate.variant.name
    if not (candidate.overlaps and candidate.is_stock):
        return planning.solve(name, problem)
    order = planning.solve(name, replace(problem, overlap=False))
    return combined(order) or order


def _fastest(candidate: Candidate, costs: Costs) -> Costs:
    """Costs at which no schedule of the candidate takes longer than it does."""
    return cutting.hidden(costs) if candidate.overlaps else costs


def _least_peaks(candidate: Candidate, costs: Costs) -> Sequence[float]:
    """A lower bound on every rank's memory under a family with one order: of few microbatches, without vocabulary and braids."""
    ranks = candidate.placement.ranks
    count = min(candidate.microbatches, 2 * ranks)
    bare = replace(candidate, args=candidate.args | {"vocab_parallel": None, "overlap_moe_expert_parallel_comm": False})
    schedule = planning.solve(candidate.variant.name, _problem(bare, costs, count, None))
    return activation_peaks(recomputed(candidate.args, Shape.of(candidate.args), schedule), costs)


def _problem(candidate: Candidate, costs: Costs, microbatches: int, limit: float | None) -> Problem:
    return Request(
        candidate.variant.name,
        candidate.placement.ranks,
        microbatches,
        costs,
        candidate.variant.chunks,
        limit,
        objective=candidate.objective,
        group=candidate.variant.group,
        vocabulary=candidate.args.vocabulary.spread,
        offload=candidate.args.offloading.mode,
        overlap=candidate.overlaps,
        beside=candidate.beside,
    ).problem()


def _fuses(candidate: Candidate) -> bool:
    """Tell whether B and W run as one pass, always or where the plan likes."""
    args = candidate.args
    return families.named(candidate.variant.name).fused or makes_weights_again(args) or args.tensor_model_parallel_size > 1


def _length(candidate: Candidate, costs: Costs, schedule: Schedule) -> float:
    return candidate.objective.length(simulate(schedule, costs))


def _as_trained(candidate: Candidate, costs: Costs) -> tuple[Costs, float]:
    """The costs where backwards make activations again, if they do, and the most that one of them holds while it runs, beyond
    what is held before and after."""
    if not Shape.of(candidate.args).policy.recomputes:
        return costs, 0.0
    whole = makes_weights_again(candidate.args)
    trained = cutting.with_recomputation(costs, whole)
    leanest = _fuses(candidate) or any(stage.backward_allocates for stage in trained.stages)  # some backwards may be BW
    ends = (stage.checkpoint if leanest else max(stage.checkpoint, stage.retained) for stage in costs.stages)
    return trained, max(stage.activation - end for stage, end in zip(costs.stages, ends, strict=True))


def _work(candidate: Candidate, costs: Costs) -> list[float]:
    """Seconds that every rank computes in an iteration, without the vocabulary's passes."""
    again = Shape.of(candidate.args).policy.recomputes
    seconds = [stage.forward + stage.value("fused") + stage.recompute * again for stage in costs.stages]
    return [candidate.microbatches * sum(seconds[stage] for stage in row) for row in candidate.placement.stages]


def _parts(
    cluster: Cluster, candidate: Candidate, costs: Costs, schedule: Schedule, pipeline: float, between: float
) -> IterationParts:
    shape, count = Shape.of(candidate.args), candidate.microbatches
    behind = [seconds * count / schedule.microbatches for seconds in _overlapped(costs, schedule)]
    vocabulary = count * costs.vocabulary.total
    alone = layer_seconds(shape, cluster.device, Links.within(cluster.device.with_links(1e30)))
    links = links_of(cluster.device, cluster.per_node, candidate.args)
    shared = layer_seconds(shape, cluster.device, links).total
    layers = sum(candidate.layers) / candidate.placement.ranks
    hides = count * layers * saved_seconds(shape, cluster.device, links)
    backwards = Counter(work.kind for row in schedule.passes for work in row if work.kind in (Kind.B, Kind.BW))
    split = backwards[Kind.B] / (backwards.total() or 1)  # of the backwards, which hide nothing
    messages = count * layers * (shared - alone.total) - (1 - split) * hides - fmean(behind)
    work = [seconds + vocabulary + split * hides - less for seconds, less in zip(_work(candidate, costs), behind, strict=True)]
    again = 0.0
    if shape.policy.recomputes:
        again = count * fmean(sum(costs.stages[stage].recompute for stage in row) for row in candidate.placement.stages)
    mean, most = fmean(work), max(work)
    return IterationParts(mean - messages - again, messages, again, most - mean, max(0.0, pipeline - most), between)


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


def _infeasible(candidate: Candidate, fixed: list[FixedMemory], activations: float) -> Infeasible:
    fullest = max(fixed, key=lambda each: each.total)
    return Infeasible(candidate, fullest.total + activations, fullest.state, state_too_large=not activations)
