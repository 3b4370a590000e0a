"""Costs of one candidate on a cluster: its flags are asked once, and all that predicts its iteration reads this."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from megatron.pipeline.model.description import describe
from megatron.pipeline.planner import (
    Costs,
    Links,
    ModelDescription,
    Offload,
    Placement,
    Problem,
    Request,
    Schedule,
    Shape,
    between_seconds,
    cutting,
    estimate,
    families,
    rank_memory,
    simulate,
    with_replicas,
)
from megatron.pipeline.tune.candidate import Candidate, Cluster


@dataclass(frozen=True)
class CandidateCosts:
    """A candidate on a cluster; each part is made when it is first asked for."""

    cluster: Cluster
    candidate: Candidate

    @cached_property
    def model(self) -> ModelDescription:
        """Description of its training."""
        return describe(self.candidate.args)

    @cached_property
    def shape(self) -> Shape:
        """Shape of its model and of its microbatches."""
        return Shape.of(self.model)

    @cached_property
    def links(self) -> Links:
        """Links between its ranks."""
        return Links.of(self.cluster.device, self.cluster.per_node, self.model.ranks)

    @property  # not kept: its functions are not sent to another process
    def family(self) -> families.Family:
        """Family of its schedule."""
        return families.named(self.candidate.variant.name)

    @cached_property
    def placement(self) -> Placement:
        """Placement of its stages."""
        return self.candidate.placement

    @cached_property
    def planned_microbatches(self) -> int:
        """Microbatches to plan for, of which the time of all of them follows."""
        return rank_memory.enough_microbatches(self.candidate.microbatches, self.placement.ranks)

    @property
    def offload(self) -> Offload | None:
        """The copies to host memory that it makes."""
        return self.candidate.args.offloading.mode

    @cached_property
    def costs(self) -> Costs:
        """Seconds and bytes of its passes, without what backwards make again."""
        layers, device = self.candidate.layers, self.cluster.device
        return estimate.costs_of_training(self.model, self.placement, layers, device, self.links, self.family)

    @cached_property
    def trained(self) -> Costs:
        """The costs where backwards make activations again, if they do."""
        return estimate.remade(self.model, self.costs)

    @property
    def within(self) -> float:
        """The most that a backward that makes activations again holds while it runs, beyond what is held before and after."""
        if not self.shape.policy.recomputes:
            return 0.0
        some = any(stage.backward_allocates for stage in self.trained.stages)
        leanest = some or estimate.fuses(self.model, self.family)  # some backwards may be BW
        ends = (stage.checkpoint if leanest else max(stage.checkpoint, stage.retained) for stage in self.costs.stages)
        return max(stage.activation - end for stage, end in zip(self.costs.stages, ends, strict=True))

    @property
    def fastest(self) -> Costs:
        """Costs at which no schedule takes longer than it does."""
        return cutting.hidden(self.trained) if self.candidate.overlaps else self.trained

    def work(self, costs: Costs) -> list[float]:
        """Seconds that every rank computes in an iteration, without the vocabulary's passes."""
        again = self.shape.policy.recomputes
        seconds = [stage.forward + stage.value("fused") + stage.recompute * again for stage in costs.stages]
        return [self.candidate.microbatches * sum(seconds[stage] for stage in row) for row in self.placement.stages]

    @cached_property
    def fixed(self) -> list[rank_memory.FixedMemory]:
        """Memory of every rank in addition to activations."""
        return rank_memory.fixed_memory(self.model, self.placement, self.candidate.layers, self.model.spread, self.cluster.device)

    def least_in_layout(self) -> float:
        """Seconds that no schedule in its layout is below, if it is a plain one, infinite where none fits: from means over all
        ranks, which are the same wherever layers are, and least where nothing waits for messages, and B and W are one pass.
        """
        device, model = self.cluster.device, self.model
        if fmean(each.state for each in self.fixed) > device.memory - rank_memory.OVERHEAD:
            return float("inf")
        family, gpu = replace(self.family, exposed_hops=0.0, fused=True), replace(device, latency=0.0)
        costs = estimate.costs_of_training(model, self.placement, self.candidate.layers, gpu, self.links, family)
        return fmean(self.work(cutting.hidden(costs) if model.expert_model_parallel_size > 1 else costs))

    def beyond(self, planned: int) -> float:
        """Least seconds of an iteration's microbatches in addition to as many as are planned."""
        further, whole = self.candidate.microbatches - planned, self.candidate.microbatches
        return further * (max(self.work(self.fastest)) / whole + self.trained.vocabulary.total)

    def request(self, costs: Costs, microbatches: int, limit: float | None = None, bare: bool = False) -> Request:
        """The request for its plan.

        Args:
            limit: bytes of activations; None without.
            bare: without vocabulary and braids.
        """
        return Request(
            self.candidate.variant.name,
            self.placement.ranks,
            microbatches,
            costs,
            self.candidate.variant.chunks,
            limit,
            objective=self.candidate.objective,
            group=self.candidate.variant.group,
            vocabulary=None if bare else self.model.spread,
            offload=self.offload,
            overlap=self.candidate.overlaps and not bare,
            beside=self.candidate.beside,
        )

    def problem(self, costs: Costs, microbatches: int, limit: float | None, bare: bool = False) -> Problem:
        """The problem of its plan; arguments as of ``request``."""
        return self.request(costs, microbatches, limit, bare).problem()

    @cached_property
    def whole(self) -> Costs:
        """The costs with what ranks do between two iterations."""
        return with_replicas(self.model, self.trained, self.placement, self.candidate.layers, self.links, self.cluster.device)

    def steady(self, microbatches: int) -> Problem:
        """The problem with what ranks do between two iterations."""
        objective = self.candidate.objective
        return Problem(self.placement, microbatches, self.whole, objective=objective, vocabulary=self.model.spread)

    def between(self, schedule: Schedule, alone: float) -> float:
        """Seconds by which a period is longer than an iteration alone: see ``between_seconds``."""
        problem = self.steady(schedule.microbatches)
        return between_seconds(self.model, self.links, schedule, problem, alone, plans=not self.model.is_stock)

    def length(self, schedule: Schedule) -> float:
        """Seconds of an iteration alone."""
        return self.candidate.objective.length(simulate(schedule, self.trained))
