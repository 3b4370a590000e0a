"""The pipeline of a training run: which schedule it uses, planned once per number of microbatches, and what it measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import schedules as schedules_patch

from megatron.pipeline.runtime import forward_backward
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.forward_backward import Plan
from megatron.pipeline.runtime.p2p import Channels, Posting
from megatron.pipeline.runtime.recorder import Recorder, Unmeasured
from megatron.pipeline.runtime.situation import Situation
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.costs import Costs, uniform
from megatron.pipeline.schedule.lower import lower
from megatron.pipeline.schedule.placement import Placement, interleaved
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.timeline import Timeline
from megatron.pipeline.schedule.verify import verify, verify_programs

STOCK = "stock"
_FILE = "file:"


@dataclass(frozen=True)
class Report:
    """What the last training iteration did, over the ranks of one pipeline.

    Attributes:
        timeline: every rank's passes, in seconds since the epoch.
        peak_activation_bytes: per rank.
    """

    timeline: Timeline
    peak_activation_bytes: list[int]

    @property
    def bubble_rate(self) -> float:
        """The share of the measured span in which a rank, on average, ran no pass."""
        return self.timeline.bubble_rate


class Pipeline:
    """Runs iterations under a schedule, as ``forward_backward``, with the signature of megatron-core's own.

    Args:
        schedule: a family's name, ``file:PATH`` (what ``mpipe plan --json`` writes), or ``stock`` for megatron-core's own.
        ranks: size of the pipeline group.
        chunks: model chunks per rank; None for the family's own number.
        memory_limit: in microbatches of a rank's activations.
        costs: what passes take; equal passes by default. They decide orders and when receives are posted.
        measure: time the passes and count activation memory, for ``report``. On a GPU that starts the allocator's
            statistics of the peak anew in every iteration.
        posting: how sends and receives are started.

    Raises:
        ValueError: the name is unknown, the file cannot be read or is no valid schedule, or it is for other sizes.
    """

    def __init__(
        self,
        schedule: str,
        ranks: int,
        chunks: int | None = None,
        memory_limit: float | None = None,
        costs: Costs | None = None,
        measure: bool = False,
        posting: Posting = Posting.SINGLE,
    ) -> None:
        self.name = schedule
        self._ranks = ranks
        self._chunks = chunks
        self._memory_limit = memory_limit
        self._costs = costs
        self._measure = measure
        self._posting = posting
        self._channels: dict[tuple[Any, bool], Channels] = {}
        self._from_file = _read(schedule.removeprefix(_FILE), ranks) if schedule.startswith(_FILE) else None
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._iterations = 0  # that have begun, evaluations included
        self._executor: Executor | None = None  # of the iteration that runs now, or ran last
        self._recorder: Recorder | None = None  # of the last iteration that trained
        if self.is_stock:
            self.placement: Placement = interleaved(ranks, chunks or 1)
        elif self._from_file:
            self.placement = self._from_file.placement
        else:
            self.placement = families.placement(schedule, ranks, chunks)
        if chunks is not None and chunks != self.placement.chunks:
            raise ValueError(f"{schedule} has {self.placement.chunks} chunk(s) per rank, but the model is cut into {chunks}")

    @property
    def is_stock(self) -> bool:
        return self.name == STOCK

    def plan(self, microbatches: int, forward_only: bool = False) -> Plan:
        """The verified schedule and programs for a number of microbatches, made when they are first asked for.

        Raises:
            ValueError: the schedule does not exist for that number, breaks a rule, or exceeds the memory limit.
        """
        key = microbatches, forward_only
        if key not in self._plans:
            self._plans[key] = self._make_plan(microbatches, forward_only)
        return self._plans[key]

    def check(self, microbatches: int) -> None:
        """Plan ahead, so that a schedule that cannot be had is refused before any process group or memory is taken."""
        if not self.is_stock:
            self.plan(microbatches)
            self.plan(microbatches, forward_only=True)

    def install(self) -> None:
        """Make megatron-core's ``get_forward_backward_func()`` return this pipeline's; stock stays, measured if asked for."""
        if self.is_stock:
            schedules_patch.restore()
            if self._measure:
                schedules_patch.record(self._record)
        else:
            schedules_patch.use(self.forward_backward)

    def forward_backward(self, **kwargs: Any) -> list[Any]:
        """One iteration, with the keywords and the result of megatron-core's own schedules (see ``forward_backward.run``)."""
        forward_only = bool(kwargs.get("forward_only"))
        plan = self.plan(kwargs["num_microbatches"], forward_only)
        measured = self._measure and not forward_only
        recorder = self._record(kwargs["model"]) if measured else Unmeasured()

        def started(executor: Executor) -> None:
            self._executor = executor
            self._iterations += 1

        return forward_backward.run(plan, recorder, started, self._channels_of, self._posting, **kwargs)

    @property
    def situation(self) -> Situation:
        """Where this rank is, for whoever reports a failure."""
        executor = self._executor
        position = executor.position if executor else None
        progress = self._iterations, executor.begun if executor else 0
        if executor is None or position is None:
            return Situation("the steps around the pipeline", progress)
        group = parallel_state.get_pipeline_model_parallel_group()
        to_world = partial(torch.distributed.get_global_rank, group)
        return Situation.in_program(executor.program, position, executor.begun, progress, to_world)

    def report(self) -> Report | None:
        """Gather what the last training iteration did; a collective over the pipeline group.

        None before the first iteration, and for a pipeline that does not ``measure``.
        """
        mine = (self._recorder.timed(), self._recorder.peak_activation_bytes) if self._recorder else None
        group = parallel_state.get_pipeline_model_parallel_group()
        everyone: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(everyone, mine, group=group)
        if None in everyone:
            return None
        return Report(Timeline(tuple(timed for timed, _ in everyone)), [peak for _, peak in everyone])

    def _make_plan(self, microbatches: int, forward_only: bool) -> Plan:
        if self._from_file is None:
            schedule = families.plan(
                self.name, self._ranks, microbatches, self._costs, self._chunks, memory_limit=self._memory_limit
            )
        elif forward_only:
            # A file is for one number of microbatches; its placement is all that evaluation needs.
            schedule = _forwards_in_order(self._from_file, microbatches)
        elif self._from_file.microbatches == microbatches:
            schedule = self._from_file
        else:
            raise ValueError(
                f"{self.name} is a schedule of {self._from_file.microbatches} microbatches, but an iteration has "
                f"{microbatches} (global batch size / micro batch size / data-parallel size): plan one for {microbatches}"
            )
        if forward_only:
            schedule = schedule.forward_only()
        if schedule.placement.replicas > 1:
            raise ValueError(f"{self.name} holds the model {schedule.placement.replicas} times, which nothing here can train")
        costs = self._costs or uniform(schedule.placement)
        # Forwards alone keep nothing for a backward: the limit is for iterations that train.
        verify(schedule, costs, None if forward_only else self._memory_limit, forward_only)
        programs = lower(schedule, costs)
        verify_programs(schedule, programs)
        return Plan(schedule, programs)

    def _channels_of(self, group: torch.distributed.ProcessGroup, variable_lengths: bool) -> Channels:
        """Opened when they are first needed, by all ranks of the world together."""
        key = group, variable_lengths
        if key not in self._channels:
            self._channels[key] = Channels.open(group, variable_lengths)
        return self._channels[key]

    def _record(self, model: Any) -> Recorder:
        chunks = model if isinstance(model, list) else [model]
        self._recorder = Recorder(parameter for chunk in chunks for parameter in chunk.parameters())
        return self._recorder


def _read(path: str, ranks: int) -> Schedule:
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the schedule {path}: {error}") from None
    try:
        schedule = Schedule.from_json(text)
        verify(schedule)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if schedule.ranks != ranks:
        raise ValueError(f"{path} is a schedule for {schedule.ranks} pipeline ranks, not for {ranks}: plan one for {ranks}")
    return schedule


def _forwards_in_order(schedule: Schedule, microbatches: int) -> Schedule:
    """The forwards of the first microbatch, repeated: right for any placement and number of microbatches."""
    rows = tuple(
        tuple(
            work._replace(microbatch=microbatch)
            for microbatch in range(microbatches)
            for work in row
            if work.kind == "F" and work.microbatch == 0
        )
        for row in schedule.passes
    )
    return Schedule(schedule.name, schedule.placement, microbatches, rows)
