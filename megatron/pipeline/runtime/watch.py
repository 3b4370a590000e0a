"""Slow ranks and links of a training, found from what it records anyway, and planned for while it goes on.

The first rank of each pipeline measures. One small sum over all ranks an iteration has the largest of what pipelines measure:
every rank comes to the same verdict. What an iteration sends is read in the next one, so that no host waits for another's. With
``replan`` the schedules are planned again, beside training, for what is slow, and those of before come back with it. Orders of
microbatches, and so the training's numbers, stay; so do costs and limits.
"""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from megatron.pipeline.monitor import slow
from megatron.pipeline.monitor.cost_profile import measured_costs, with_sizes
from megatron.pipeline.monitor.report import PendingReport, Report
from megatron.pipeline.planner import SLACK, Costs, Planned, Schedule, cutting, simulate
from megatron.pipeline.runtime.background import Coming
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.profiling import TIMED

_TRIES = 2
_UNKNOWN, _MAX = -1.0, torch.distributed.ReduceOp.MAX


class Slow(NamedTuple):
    """A rank or a link that is slow.

    Attributes:
        ranks: of the world: the rank, or both of the link.
        hosts: theirs.
        seconds: of an iteration as usual.
        verdict: how slow it is.
    """

    thing: slow.Thing
    ranks: list[int]
    hosts: list[str]
    seconds: float
    verdict: slow.Verdict

    def fields(self) -> dict[str, Any]:
        """As metrics have it."""
        there, back = self.verdict.excess
        much = {"times": 1 + there} if isinstance(self.thing, int) else {"message_ms": [1e3 * there, 1e3 * back]}
        cost = {"iteration_ms": 1e3 * self.seconds * self.verdict.share, "share": self.verdict.share}
        return {"what": _name(self.thing), "ranks": self.ranks, "hosts": self.hosts} | much | cost

    def __str__(self) -> str:
        there, back = self.verdict.excess
        whose = " and ".join(f"global rank {rank} on {host}" for rank, host in zip(self.ranks, self.hosts, strict=True))
        how = f"a message takes {1e3 * there:.3g} ms more there and {1e3 * back:.3g} ms more back"
        how = f"its passes take {1 + there:.3g} times as long" if isinstance(self.thing, int) else how
        cost = f"{1e3 * self.seconds * self.verdict.share:.3g} ms beside the {1e3 * self.seconds:.4g} of an iteration as usual"
        return f"{_name(self.thing)} is slow ({whose}): {how}, {cost}"


class Watch:
    """Finds what is slow in the pipelines of a training. All ranks of the world make and ask it together.

    Args:
        pipeline: one that measures.
        replans: whether schedules are planned again for what is slow.

    Attributes:
        slow: the same on all ranks.
    """

    def __init__(self, pipeline: Pipeline, replans: bool) -> None:
        self._pipeline, self._replans = pipeline, replans
        self._things = slow.things(pipeline.placement.ranks)
        self._measures = parallel_state.get_pipeline_model_parallel_rank() == 0 or torch.distributed.get_rank() == 0
        self._summed: tuple[torch.Tensor, list[float], Any] | None = None  # in the iteration before
        self._ranks: list[int] = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        self._works: list[tuple[int, ...]] = [()] * len(self._ranks)  # ``Pipeline.works`` of the ranks of this pipeline
        self._usual: dict[int, Planned] = {}  # by number of microbatches, while others are in their place
        self._coming: Coming | None = None
        self._start()

    def _start(self) -> None:
        """Nothing is known, as before the first iteration."""
        self._known, self._assumed = self._pipeline.plans.costs, self._pipeline.plans.planned_costs
        self._gauge = slow.Gauge(self._pipeline.placement.ranks, self._works)
        self._verdicts = {thing: slow.Verdict() for thing in self._things}
        self._pending: PendingReport | None = None  # of the iteration before
        self._reports: list[Report] = []  # for costs, where none are known
        # As usual: costs that were measured, in this training or before, may have a slow rank.
        self._costs = self._known and cutting.evened(self._known, self._pipeline.placement, self._works)
        self._asks = False  # whether what is slow is other than what was planned for
        self._tries = 0  # how often planning may still fail for it
        self._numbers: set[int] = set()  # of microbatches, for which that was planned
        self.slow: dict[slow.Thing, Slow] = {}

    def step(self, pending: PendingReport | None) -> list[str]:
        """Take the report of an iteration, and between two of them swap plans; returns lines for the log, on all ranks.

        Args:
            pending: waited for in the next iteration, on the first rank of the pipeline; None counts for nothing.
        """
        if len(works := tuple(self._pipeline.works)) != len(self._works[0]):  # on all ranks
            everyone = [works] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(everyone, works, group=self._pipeline.background.world)
            self._works = [everyone[rank] for rank in self._ranks]
            self._start()
        if self._pipeline.plans.costs is not self._known:  # measured and planned again meanwhile
            self._start()
        last, self._pending = self._pending, pending
        mine = self._measured(last.wait()) if last and self._measures else [_UNKNOWN] * (1 + 3 * len(self._things))
        before, largest = self._summed, torch.tensor(mine, dtype=torch.float64, device="cpu")
        work = torch.distributed.all_reduce(largest, _MAX, group=self._pipeline.background.world, async_op=True)
        self._summed = largest, mine, work
        lines = self._judged(*before) if before else []
        return lines + (self._planned() if self._replans else [])

    def _measured(self, report: Report) -> list[float]:
        """Seconds of an iteration as usual, and of every thing its share of them and ``Excess``."""
        taken = slow.taken(report, self._assumed)
        found = self._gauge.excess(taken, self._excess)
        if self._costs is None and found:
            measured = with_sizes(measured_costs(self._reports, report), self._assumed)
            self._costs = cutting.evened(replace(measured, hop=self._gauge.hop), self._pipeline.placement, self._works)
        elif not found:
            self._reports = [*self._reports, report][-TIMED:]
        seconds, shares = slow.added(self._costs, self._schedule(report), found) if self._costs and found else (_UNKNOWN, {})
        self._gauge.learn(taken, self._excess, {thing for thing, share in shares.items() if share > slow.LEAVE})
        numbers = [(shares[thing], *found[thing]) if thing in shares else [_UNKNOWN] * 3 for thing in self._things]
        return [seconds, *(each for row in numbers for each in row)]

    def _schedule(self, report: Report) -> Schedule:
        """The schedule that an iteration would have run as usual."""
        count = report.schedule.microbatches
        return self._usual[count].schedule if count in self._usual else self._pipeline.plans.planned.get(count, report.schedule)

    def _judged(self, largest: torch.Tensor, mine: list[float], work: Any) -> list[str]:
        """Changes, in words."""
        work.wait()
        seconds, *numbers = largest.tolist()
        rows = enumerate(zip(self._things, numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        changed = [
            place
            for place, (thing, share, *excess) in rows
            if share != _UNKNOWN and self._verdicts[thing].take(share, slow.Excess(*excess))
        ]
        if not changed:
            return []
        self._asks, self._tries, own = True, _TRIES, (socket.gethostname(), self._ranks, mine[1:])
        everyone = [own] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, own, group=self._pipeline.background.world)
        return [self._line(place, everyone, seconds) for place in changed]

    def _line(self, place: int, everyone: list[Any], seconds: float) -> str:
        thing = self._things[place]
        if not self._verdicts[thing].share:
            del self.slow[thing]
            return f" {_name(thing)} is as usual again"
        pipeline = max(everyone, key=lambda one: one[2][3 * place])[1]  # where it costs most
        ranks = [pipeline[rank] for rank in ([thing] if isinstance(thing, int) else thing)]
        self.slow[thing] = Slow(thing, ranks, [everyone[rank][0] for rank in ranks], seconds, self._verdicts[thing])
        return f" WARNING: {self.slow[thing]}"

    def _planned(self) -> list[str]:
        """Ask for plans, or adopt those that are there; the same on all ranks."""
        found = self._coming.take() if self._coming else None
        if found is not None:
            self._coming = None
            lines = [] if self._asks else self._adopted(found)  # if something else is slow by now, they are not for that
            if isinstance(found, Exception) and self._tries:
                self._asks, self._tries = True, self._tries - 1
            return lines
        numbers = set(self._pipeline.plans.planned)
        if self._coming or not (self._asks or (self.slow and numbers - self._numbers)):  # another number of microbatches has come
            return []
        self._asks, self._numbers = False, numbers
        self._pipeline.plans.costs_now = self._slow_costs() if self.slow else None
        if self.slow:
            self._coming = self._pipeline.background.again(self._slow_costs(), self._pipeline.plans.memory_limit)
            return []
        usual, self._usual = self._usual, {}
        self._pipeline.plans.adopt(usual)
        return [f" {self._pipeline.name} runs in its usual order again"] if usual else []

    def _slow_costs(self) -> Costs:
        """With what is slow. Those of rank 0 of the world count, which plans."""
        [schedule, *_] = self._pipeline.plans.planned.values()
        return slow.slowed(self._costs or self._assumed, schedule, self._excess)

    @property
    def _excess(self) -> dict[slow.Thing, slow.Excess]:
        return {thing: one.verdict.excess for thing, one in self.slow.items()}

    def _adopted(self, found: dict[int, Planned] | Exception) -> list[str]:
        plans, name = self._pipeline.plans, self._pipeline.name
        try:
            if isinstance(found, Exception):
                raise found
            before = {number: plans.planned[number] for number in found}
            length = plans.objective.length
            now = {number: length(simulate(before[number], plan.problem.costs)) for number, plan in found.items()}
            shorter = {number: plan for number, plan in found.items() if length(plan.timeline) < now[number] * (1 - SLACK)}
            if not shorter:
                return [f" {name} keeps its plans: no order that it found is shorter for what is slow"]
            usual = {number: plan for (number, forward_only), plan in plans.made.items() if not forward_only}
            plans.adopt(shorter)
        except Exception as wrong:  # the training goes on, and says so
            return [f" WARNING: {name} keeps its plans: {wrong}"]
        self._pipeline.agree()
        self._usual = {number: usual[number] for number in shorter} | self._usual
        return [
            f" {name} planned for what is slow in {plan.seconds or 0:.2g} s for {number} microbatches: "
            f"{1e3 * now[number]:.4g} -> {1e3 * length(plan.timeline):.4g} ms"
            for number, plan in shorter.items()
        ]


def _name(thing: slow.Thing) -> str:
    return f"rank {thing}" if isinstance(thing, int) else f"link {thing[0]}-{thing[1]}"


def watching(pipeline: Pipeline, mode: str | None) -> Watch | None:
    """A watch, if there is something to watch.

    Args:
        mode: None for ``report`` where the pipeline measures anyway: what it reads then costs nothing more.
    """
    watches = pipeline.measures if mode is None else mode != "off"
    return Watch(pipeline, mode == "replan") if watches and not pipeline.is_stock and pipeline.placement.ranks > 1 else None
