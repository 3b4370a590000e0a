"""The pipeline of a training run: its plans, installed into megatron-core, run on this rank, and measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import cache, cached_property, lru_cache, partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import schedules as schedules_patch

from megatron.pipeline import patches
from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.model.split_linear import work_of
from megatron.pipeline.monitor.clock import Clock
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.recorder import NullRecorder, Recorder
from megatron.pipeline.monitor.report import PendingReport, RecordFormat, Report, gather_objects, start_gathering
from megatron.pipeline.planner import Costs, PlanCache, Planned, Request, Schedule, ops, simulate, topics
from megatron.pipeline.runtime.agreement import agree, check_chunks
from megatron.pipeline.runtime.background import BackgroundPlanner
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.every_batch import BatchPlans, EveryBatch, in_places
from megatron.pipeline.runtime.iteration import Iteration
from megatron.pipeline.runtime.offload.offloading import CopySettings, Offloading
from megatron.pipeline.runtime.p2p import Channels, Transport
from megatron.pipeline.runtime.vocabulary import Groups

__all__ = ["Pipeline"]


class Turns(Protocol):
    """Turns of ranks that share a device, with clocks for a ``Recorder``."""

    clock: Clock

    def host(self) -> float: ...

    def recorder(self, recorder: NullRecorder) -> NullRecorder:
        """A recorder that has every pass in a turn."""
        ...

    def optimizer_steps(self) -> AbstractContextManager[dict[int, list[float]]]:
        """Steps of optimizers take turns too; yields their seconds."""
        ...


class Pipeline:
    """Runs iterations under a schedule, as ``forward_backward``, with the signature of megatron-core's own.

    Args:
        request, posting: see ``PlanCache``. Where it is ``quick``, searched plans come later.
        measure: time the passes and count activation memory, for ``report``. On a GPU that starts the allocator's
            statistics of the peak anew in every iteration.
        settings: how activations go to host memory.
        max_ctas: the most thread blocks of NCCL's kernels for messages and the vocabulary; None as ``groups.few_ctas``.
        turns: of ranks that share a device; made at first use, by all ranks of the world together.
        every_batch: how every batch is planned for the lengths of its microbatches; None for one plan for all.

    Attributes:
        plans: what it runs.
        background: plans while it runs.
        batches: plans of every batch; None without them.
        name, placement, is_stock: those of the plans, which stay.
        works: of every model that it has trained, ``work_of`` its chunks here.

    Raises:
        ValueError: see ``PlanCache``; or the request has what no plan for a batch has yet.
    """

    def __init__(
        self,
        request: Request,
        posting: ops.Posting = ops.Posting.SINGLE,
        measure: bool = False,
        settings: CopySettings | None = None,
        max_ctas: int | None = None,
        turns: Callable[[], Turns] | None = None,
        every_batch: EveryBatch | None = None,
    ) -> None:
        if every_batch:
            request.facts.refuse(topics.EVERY_BATCH)
        self.settings = settings or CopySettings()
        self.plans = PlanCache(request, posting, self.settings.host_limit)
        self.name, self.placement, self.is_stock = self.plans.name, self.plans.placement, self.plans.is_stock
        self.background = BackgroundPlanner(self.plans)
        self.batches = BatchPlans(every_batch, self.plans, self.background) if every_batch else None
        self._searches = request.quick
        self._posting = posting
        self.measures = measure
        self.counts_bytes = False  # exactly, at the end of every pass: see Recorder
        # Opened when they are first needed, by all ranks of the world together.
        self._channels_of = cache(partial(Channels.open, max_ctas=max_ctas))
        self._groups_of = cache(partial(Groups.open, max_ctas=max_ctas))
        self.turns = turns
        self._agreed: WeakSet[Planned] = WeakSet()  # all ranks have these
        # The first chunks of models that are built for this placement, and of those that have trained.
        self._built: WeakSet[torch.nn.Module] = WeakSet()
        self._trained: WeakSet[torch.nn.Module] = WeakSet()
        self.works: list[int] = []
        self._iterations = 0  # that have begun, evaluations included
        self._iteration: Iteration | None = None  # that runs now, or ran last
        self._begun: tuple[Iteration, Call] | None = None  # see begin
        # Of the last iteration that trained: what measured it, and its plan; no plan under megatron-core's own schedule.
        self._measured: tuple[Recorder, Planned | None] | None = None

    @property
    def transport(self) -> Transport | None:
        """Transport of the last iteration's messages; None before the first, and under megatron-core's own schedule."""
        return self._iteration.executor.transport if self._iteration and self._iteration.executor else None

    @property
    def vocabulary_groups(self) -> Groups | None:
        """Those of the last iteration's collectives of a spread vocabulary; None without them."""
        return self._iteration.groups if self._iteration else None

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the last iteration; 1 before the first, and under megatron-core's own schedule."""
        return self._iteration.plan.schedule.microbatches if self._iteration else 1

    @cached_property
    def offloading(self) -> Offloading:
        """This rank's copy streams and host memory."""
        return Offloading(self.settings, this_device())

    def install(self) -> None:
        """Make megatron-core's ``get_forward_backward_func()`` return this pipeline's, in place of any that was installed before;
        stock stays, measured if asked for."""
        patches.install_loop(None)
        if not self.is_stock:
            schedules_patch.use(self.forward_backward)
        elif self.measures:
            schedules_patch.record(lambda model: self._in_turns(self._record(model)))

    def agree(self) -> None:
        """Compare everything that is planned by now, and all versions, with the other ranks. Collective over the world.

        A plan that is made later is compared before its first iteration.

        Raises:
            RanksDiffer: on every rank; names the ranks that differ, and what differs.
        """
        agree({_title(*key): plan for key, plan in self.plans.made.items()})
        self._agreed.update(self.plans.made.values())

    def forward_backward(self, **keywords: Any) -> list[Any]:
        """One iteration, with the keywords and the result of megatron-core's own schedules (see ``Call``); after ``begin`` the
        rest of the one that has begun.

        Raises:
            RanksDiffer: the first time that a plan runs; see ``agree``.
            ValueError: the model is built for another placement (``check_chunks``), or its numbers are quantized in a way that
                this pipeline does not support; or an iteration has begun, with other keywords.
        """
        return self.run(Call(**keywords))

    def run(self, call: Call) -> list[Any]:
        """``forward_backward``, of keywords that are a ``Call`` already."""
        if self._begun is None or call.forward_only:
            call, plan = self.batches.begin(call) if self.batches else (call, None)
            iteration = self._make(call, of_batch=plan)
        else:
            (iteration, begun), self._begun = self._begun, None
            for name in (one.name for one in fields(Call)):
                if getattr(call, name) != getattr(begun, name):
                    raise ValueError(f"an iteration has begun with another {name}: give it the same keywords")
        order = iteration.plan.order
        reported = iteration.run(in_places(call, order) if order else call)
        if iteration.first:
            self._trained.add(call.chunks[0])
            self.works.append(work_of(call.chunks))
        return [reported[order.index(number)] for number in range(len(reported))] if order else reported

    def begin(self, **keywords: Any) -> None:
        """Run the forwards of an iteration that come before its first backward, while the optimizer step before it has yet to be
        accepted. Gradients stay as they are. ``forward_backward``, with the same keywords, runs the rest.

        Raises:
            RanksDiffer, ValueError: see ``forward_backward``; or every batch is planned.
        """
        if self.batches:
            raise ValueError("an iteration cannot begin before the step behind which its batch is planned: leave every_batch out")
        call = Call(**keywords)
        self._begun = self._make(call), call
        self._begun[0].begin(call)

    def start_anew(self) -> None:
        """The step before the iteration that has begun was rolled back, or something else comes first: take back what has begun.
        ``forward_backward`` then starts it anew, with the same data and random states."""
        assert self._begun is not None, "an iteration has begun"
        self._begun[0].start_anew()

    def meet(self, call: Call) -> None:
        """Look at a model before its first iteration, and plan for what it trains, if it does; again where it trains from now on
        in a stage without B. Collective over the pipeline.

        Raises:
            ValueError: see ``check_chunks``.
        """
        met = self._built if call.forward_only else self._trained
        if call.chunks[0] in met and (call.forward_only or not self.plans.frozen or not self._trains_before(call)):
            return
        shares = check_chunks(call.pipeline, self.placement, self.name, call.chunks)
        self._built.add(call.chunks[0])
        if shares and not call.forward_only:
            self.plans.train(shares)

    def _trains_before(self, call: Call) -> bool:
        """Tell whether any rank trains something in a stage without B."""
        own = zip(call.chunks, self.placement.stages[call.pipeline.rank()], strict=True)
        still = [chunk for chunk, stage in own if stage < self.plans.frozen]
        trains = any(weight.requires_grad for chunk in still for weight in chunk.parameters())
        found = torch.tensor(trains, dtype=torch.int32, device=call.device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=call.pipeline)
        return bool(found)

    def _make(self, call: Call, of_batch: Planned | None = None) -> Iteration:
        """Args: of_batch: a plan that all ranks have, in place of the one for equal microbatches."""
        self.meet(call)
        searches = self._searches and not call.forward_only  # replicas may evaluate more or less often than others
        if searches:
            self.background.adopt_searched()
        plan = self.plans.plan(call.num_microbatches, call.forward_only)
        if plan not in self._agreed:
            agree({_title(call.num_microbatches, call.forward_only): plan})
            self._agreed.add(plan)
        if searches:
            self.background.search(call.num_microbatches)
        if of_batch and of_batch.schedule.frozen <= self.plans.frozen:
            plan = of_batch
        measured = self.measures and not call.forward_only

        def record() -> NullRecorder:
            return self._in_turns(self._record(call.chunks, plan) if measured else NullRecorder())

        channels = self._channels_of(call.pipeline, call.config.variable_seq_lengths)
        channels.connect(_messages(plan), self._posting)
        self._iterations += 1
        self._iteration = Iteration(
            plan,
            channels,
            record,
            self._posting,
            self._groups_of(call.pipeline) if plan.schedule.vocabulary else None,
            self.offloading if plan.schedule.has_copies else None,
            first=not call.forward_only and call.chunks[0] not in self._trained,
        )
        return self._iteration

    @property
    def situation(self) -> Situation:
        """Position of this rank, for a report of a failure. May be called from another thread."""
        return self._iteration.situation(self._iterations) if self._iteration else Situation()

    def report(self) -> Report | None:
        """Report of the last training iteration, on all ranks of the pipeline: ``start_report``, and the wait for it."""
        pending = self.start_report()
        return pending.wait() if pending else None

    def start_report(self) -> PendingReport | None:
        """Start gathering what the last training iteration did; a collective over the pipeline group.

        Another iteration, of another plan too, may run before the report is waited for. No rank waits for another here, except
        under megatron-core's own schedule. On a GPU the host waits for the end of its own passes: what is to run behind them
        is better launched before.

        None before the first iteration, and for a pipeline that does not ``measure``.
        """
        if self._measured is None:
            return None
        (recorder, plan), group = self._measured, parallel_state.get_pipeline_model_parallel_group()
        if plan is None:
            return gather_objects(recorder.record(), self.name, self.placement, group)
        return start_gathering(recorder.record(), plan, _record_formats(plan), group)

    def slowdown(self, report: Report) -> float | None:
        """The measured span of a report over the one that is simulated at this pipeline's costs; None without costs."""
        if self.plans.costs is None:
            return None
        expected = _simulated_span(report.schedule, self.plans.costs)
        return report.timeline.span / expected if expected else None

    def _in_turns(self, recorder: NullRecorder) -> NullRecorder:
        return self.turns().recorder(recorder) if self.turns else recorder

    def _record(self, model: Any, plan: Planned | None = None) -> Recorder:
        chunks = model if isinstance(model, list) else [model]
        clocks = (self.turns().clock, self.turns().host) if self.turns else ()
        recorder = Recorder((parameter for chunk in chunks for parameter in chunk.parameters()), self.counts_bytes, *clocks)
        self._measured = recorder, plan
        return recorder


def _title(microbatches: int, forward_only: bool) -> str:
    """Name of a plan in an error."""
    return f"plan of {microbatches} microbatches{', forwards alone' if forward_only else ''}"


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same schedule
def _simulated_span(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs).span


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same plan
def _messages(plan: Planned) -> frozenset[tuple[int, int]]:
    """Sender and receiver of all messages, as ranks of the pipeline."""
    return frozenset(
        (rank, one.peer) for rank, program in enumerate(plan.programs) for one in program if isinstance(one, ops.Send)
    )


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same plan
def _record_formats(plan: Planned) -> tuple[RecordFormat, ...]:
    """Formats of the records that ranks send each other after an iteration."""
    return tuple(map(RecordFormat, plan.programs))
