"""The pipeline of a training run: which schedule it uses, planned once per number of microbatches, and what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import schedules as schedules_patch

from megatron.pipeline.dist.device import this_device
from megatron.pipeline.health.progress import Situation
from megatron.pipeline.record.recorder import Recorder, Unmeasured
from megatron.pipeline.record.report import PendingReport, RecordFormat, Report, gather_objects, start_gathering
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.iteration import Iteration, Plan, ValidationResult
from megatron.pipeline.runtime.offload.offloading import Offloading, Settings
from megatron.pipeline.runtime.p2p import Channels, Transport
from megatron.pipeline.runtime.vocabulary import Groups
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import EQUAL_SHARDS, Costs, uniform, with_equal_copies
from megatron.pipeline.schedule.core.names import STOCK
from megatron.pipeline.schedule.core.passes import Kind, Offload, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement, interleaved
from megatron.pipeline.schedule.core.problem import ChunksDoNotFit, Objective
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.lower.lower import lower
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.schedule.time.simulate import simulate
from megatron.pipeline.schedule.transforms.offload import offload
from megatron.pipeline.schedule.transforms.vocabulary import postpone, postponed, spread

ROUNDED_UP = 1.15  # host memory is rounded up, and reused for what is smaller, by so much
_FILE = "file:"


class Pipeline:
    """Runs iterations under a schedule, as ``forward_backward``, with the signature of megatron-core's own.

    Args:
        schedule: a family's name, ``file:PATH`` (what ``mpipe plan --json`` writes), or ``stock`` for megatron-core's own.
        ranks: size of the pipeline group.
        chunks: model chunks per rank; None for the family's own number.
        memory_limit: in microbatches of a rank's activations.
        costs: what passes take, in seconds and bytes; equal passes by default. They decide orders and when receives are posted.
        measure: time the passes and count activation memory, for ``report``. On a GPU that starts the allocator's
            statistics of the peak anew in every iteration.
        posting: how sends and receives are started.
        objective: what an iteration takes: its makespan, or where iterations interlock its span.
        vocabulary: how it is spread over all ranks, if it is; a file says that itself, and must not say something else.
        offload: how much of the activations goes to host memory; a file may have its own copies, which then stay as they are.
        settings: how that is done. The host limit is in bytes, as are costs; without costs only the runtime knows what fits.

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
        objective: Objective = Objective.MAKESPAN,
        vocabulary: Vocabulary | None = None,
        offload: Offload | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.name = schedule
        self.notes: list[str] = []  # what planning has to say, for the log
        self.objective = objective
        self._ranks = ranks
        self._chunks = chunks
        self._memory_limit = memory_limit
        self.costs = costs
        self.measures = measure
        self.counts_bytes = False  # exactly, at the end of every pass: see Recorder
        self._posting = posting
        self._channels: dict[tuple[Any, bool], Channels] = {}
        self._groups: dict[Any, Groups] = {}
        self.vocabulary = vocabulary
        self.offload = offload
        self.settings = settings or Settings()
        self._from_file = _read(schedule.removeprefix(_FILE), ranks) if schedule.startswith(_FILE) else None
        self._plans: dict[tuple[int, bool], Plan] = {}
        self._iterations = 0  # that have begun, evaluations included
        self._iteration: Iteration | None = None  # that runs now, or ran last
        self._resolve: Callable[[], ValidationResult] | None = None  # see validating
        # Of the last iteration that trained: what measured it, and its plan; no plan under megatron-core's own schedule.
        self._measured: tuple[Recorder, Plan | None] | None = None
        if self._from_file and self._from_file.vocabulary:
            if vocabulary not in (None, self._from_file.vocabulary):
                raise ValueError(
                    f"{schedule} spreads the vocabulary as {self._from_file.vocabulary}, not as {vocabulary}: give one of the two"
                )
            self.vocabulary = self._from_file.vocabulary
        if vocabulary and self._from_file and self._from_file.has_copies and not self._from_file.vocabulary:
            raise ValueError(
                f"{schedule} has copies to host memory and no passes of a spread vocabulary, which come first: plan it with both "
                f"(mpipe plan --vocab-parallel {vocabulary} --offload ..), or leave --vocab-parallel out"
            )
        if offload and self._from_file and self._from_file.has_copies:
            raise ValueError(f"{schedule} has copies to host memory of its own, which run as they are: leave offloading out")
        if self.is_stock:
            self.placement: Placement = interleaved(ranks, chunks or 1)
        elif self._from_file:
            self.placement = self._from_file.placement
        else:
            self.placement = families.placement(schedule, ranks, chunks)
        if chunks is not None and chunks != self.placement.chunks:
            raise ChunksDoNotFit(f"{schedule} has {self.placement.chunks} chunk(s) per rank, got {chunks}")

    @property
    def splits(self) -> int:
        """How many slices along the sequence every microbatch is cut into."""
        if self.is_stock:
            return 1
        return self._from_file.splits if self._from_file else families.FAMILIES[self.name].splits

    @property
    def has_family(self) -> bool:
        """Whether a family plans it, which can do so again at other costs."""
        return not self.is_stock and self._from_file is None

    @property
    def transport(self) -> Transport | None:
        """What carried the messages of the last iteration; None before the first, and under megatron-core's own schedule."""
        return self._iteration.executor.transport if self._iteration and self._iteration.executor else None

    @cached_property
    def offloading(self) -> Offloading:
        """This rank's copy streams and host memory."""
        return Offloading(self.settings, this_device())

    @property
    def offloads(self) -> bool:
        """Whether any iteration copies activations to host memory."""
        return bool(self.offload or (self._from_file and self._from_file.has_copies))

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

    def check(self, microbatches: int, evaluates: bool = True) -> None:
        """Plan ahead, so that a schedule that cannot be had is refused before any process group or memory is taken."""
        if not self.is_stock:
            self.plan(microbatches)
            if evaluates:
                self.plan(microbatches, forward_only=True)
        elif self.placement.chunks > 1 and microbatches % self._ranks:
            raise ValueError(
                f"megatron-core's own interleaved schedule needs a multiple of {self._ranks} microbatches for {self._ranks} "
                f"pipeline ranks, and an iteration has {microbatches}: change the batch size, or take interleaved"
            )

    def install(self) -> None:
        """Make megatron-core's ``get_forward_backward_func()`` return this pipeline's; stock stays, measured if asked for."""
        if self.is_stock:
            schedules_patch.restore()
            if self.measures:
                schedules_patch.record(self._record)
        else:
            schedules_patch.use(self.forward_backward)

    def forward_backward(self, **keywords: Any) -> list[Any]:
        """One iteration, with the keywords and the result of megatron-core's own schedules (see ``Call``)."""
        call = Call(**keywords)
        plan = self.plan(call.num_microbatches, call.forward_only)
        measured = self.measures and not call.forward_only

        def record() -> Recorder | Unmeasured:
            return self._record(call.chunks, plan) if measured else Unmeasured()

        self._iterations += 1
        self._iteration = Iteration(
            plan,
            self._channels_of(call.pipeline, call.config.variable_seq_lengths),
            record,
            self._posting,
            self._resolve,
            self._groups_of(call.pipeline) if plan.schedule.vocabulary else None,
            self.offloading if plan.schedule.has_copies else None,
        )
        return self._iteration.run(call)

    @contextmanager
    def validating(self, resolve: Callable[[], ValidationResult]) -> Iterator[None]:
        """Iterations in this context begin before the optimizer step before them has been accepted.

        Args:
            resolve: called once, where the program validates: see ``Iteration``.
        """
        self._resolve = resolve
        try:
            yield
        finally:
            self._resolve = None

    @property
    def situation(self) -> Situation:
        """Where this rank is, for a report of a failure. May be called from another thread."""
        return self._iteration.situation(self._iterations) if self._iteration else Situation()

    def report(self) -> Report | None:
        """What the last training iteration did, on all ranks of the pipeline: ``start_report``, and the wait for it."""
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
        return start_gathering(recorder.record(), plan.schedule, _record_formats(plan), group)

    def slowdown(self, report: Report) -> float | None:
        """The measured span of a report over the one that is simulated at this pipeline's costs; None without costs."""
        if self.costs is None:
            return None
        expected = _simulated_span(report.schedule, self.costs)
        return report.timeline.span / expected if expected else None

    @property
    def planned(self) -> dict[int, Schedule]:
        """The schedules of training, by the number of microbatches."""
        plans = list(self._plans.items())  # at once: another thread may be asking
        return {microbatches: plan.schedule for (microbatches, forward_only), plan in plans if not forward_only}

    def plan_again(self, costs: Costs, memory_limit: float | None) -> dict[int, Schedule]:
        """What the family makes of these costs, for every number of microbatches that is planned by now.

        A schedule in use stays where it fits into the limit and what the family makes is not shorter; copies to host memory are
        always planned anew. Nothing changes until ``adopt``; another thread may call this while iterations run.

        Raises:
            ValueError: there is no schedule within the limit.
        """
        return {m: self._better(schedule, costs, memory_limit) for m, schedule in self.planned.items()}

    def adopt(self, costs: Costs, memory_limit: float | None, schedules: Mapping[int, Schedule]) -> None:
        """Run other schedules from the next iteration on, on the same placement; all ranks must do so at the same time.

        Args:
            schedules: by the number of microbatches; those in use stay for the others.

        Raises:
            ValueError: a schedule breaks a rule or exceeds the limit; nothing has changed then.
        """
        plans = {(m, False): _prove(schedule, costs, memory_limit, self._posting) for m, schedule in schedules.items()}
        self._plans |= plans
        self.costs, self._memory_limit = costs, memory_limit

    def _better(self, used: Schedule, costs: Costs, memory_limit: float | None) -> Schedule:
        made = self._plan(used.microbatches, costs, memory_limit)
        if self.offload:
            return made
        try:
            verify(used, costs, memory_limit)
        except ValueError:
            return made
        lengths = [self.objective.length(simulate(schedule, costs)) for schedule in (made, used)]
        return made if lengths[0] < lengths[1] else used

    def _plan(self, microbatches: int, costs: Costs | None, limit: float | None) -> Schedule:
        sizes = self._ranks, microbatches, costs or self.planned_costs, self._chunks
        return families.plan(
            self.name,
            *sizes,
            memory_limit=limit,
            objective=self.objective,
            vocabulary=self.vocabulary,
            offload=self._offload_within(costs),
            host_limit=self._host_limit_in(costs),
        )

    def _make_plan(self, microbatches: int, forward_only: bool) -> Plan:
        trained = self._plans.get((microbatches, False))
        if self._from_file is None and forward_only and trained:
            schedule = trained.schedule
        elif self._from_file is None:
            schedule = self._plan(microbatches, self.costs, self._memory_limit)
        elif forward_only:
            # A file is for one number of microbatches; its placement is all that evaluation needs.
            schedule = self._spread(_forwards_in_order(self._from_file, microbatches))
        elif self._from_file.microbatches == microbatches:
            schedule = self._offloaded(self._spread(self._from_file))
        else:
            raise ValueError(
                f"{self.name} is a schedule of {self._from_file.microbatches} microbatches, but an iteration has "
                f"{microbatches} (global batch size / micro batch size / data-parallel size): plan one for {microbatches}"
            )
        if forward_only:
            schedule = schedule.forward_only()
        if schedule.placement.replicas > 1:
            raise ValueError(f"{self.name} holds the model {schedule.placement.replicas} times, which nothing here can train")
        if schedule.splits > 1 and any(work.kind is Kind.R for row in schedule.passes for work in row):
            raise ValueError(f"{self.name} runs slices of microbatches again (R), which the runtime cannot: plan it without one")
        # Forwards alone keep nothing for a backward: the limit is for iterations that train.
        limit = None if forward_only else self._memory_limit
        return _prove(schedule, self.planned_costs, limit, self._posting, forward_only)

    @property
    def planned_costs(self) -> Costs:
        """What schedules are planned for: measured costs, or equal ones, where copies take as long as passes do (k = 1)."""
        if self.costs:
            return self.costs
        costs = uniform(self.placement, vocabulary=EQUAL_SHARDS if self.vocabulary else None)
        return with_equal_copies(costs) if self.offloads else costs

    def _channels_of(self, group: torch.distributed.ProcessGroup, variable_lengths: bool) -> Channels:
        """Opened when they are first needed, by all ranks of the world together."""
        key = group, variable_lengths
        if key not in self._channels:
            self._channels[key] = Channels.open(group, variable_lengths)
        return self._channels[key]

    def _spread(self, schedule: Schedule) -> Schedule:
        """A file's schedule with the vocabulary's passes, where it is to be spread and the file does not do so."""
        if self.vocabulary is None or schedule.vocabulary:
            return schedule
        roomy = postpone(schedule, postponed(self.vocabulary, schedule.ranks))
        return spread(roomy, self.vocabulary, self.planned_costs)

    def _offloaded(self, schedule: Schedule) -> Schedule:
        """A file's schedule with copies to host memory, where there are to be some."""
        mode = self._offload_within(self.costs)
        if mode is None:
            return schedule
        limits = None if self._memory_limit is None else (self._memory_limit,) * schedule.ranks
        return offload(schedule, self.planned_costs, mode, limits, self._host_limit_in(self.costs))

    def _offload_within(self, costs: Costs | None) -> Offload | None:
        """How much to offload at these costs: nothing where there is a limit of host memory, and bytes are not known yet."""
        return None if costs is None and self.settings.host_limit is not None else self.offload

    def _host_limit_in(self, costs: Costs | None) -> float | None:
        """The limit of host memory in the unit of these costs."""
        if self.settings.host_limit is None or costs is None or not self.offload:
            return None
        return self.settings.host_limit / ROUNDED_UP

    def _groups_of(self, group: torch.distributed.ProcessGroup) -> Groups:
        """Opened when they are first needed, by all ranks of the world together."""
        if group not in self._groups:
            self._groups[group] = Groups.open(group)
        return self._groups[group]

    def _record(self, model: Any, plan: Plan | None = None) -> Recorder:
        chunks = model if isinstance(model, list) else [model]
        recorder = Recorder((parameter for chunk in chunks for parameter in chunk.parameters()), self.counts_bytes)
        self._measured = recorder, plan
        return recorder


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same schedule
def _simulated_span(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs).span


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same plan
def _record_formats(plan: Plan) -> tuple[RecordFormat, ...]:
    """How ranks send each other what they did in an iteration."""
    return tuple(map(RecordFormat, plan.programs))


def _prove(schedule: Schedule, costs: Costs, memory_limit: float | None, posting: Posting, forward_only: bool = False) -> Plan:
    """The schedule with its programs, once both have been found right."""
    verify(schedule, costs, memory_limit, forward_only)
    programs = lower(schedule, costs)
    verify_programs(schedule, programs, posting)
    return Plan(schedule, programs)


def _read(path: str, ranks: int) -> Schedule:
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ValueError(f"cannot read the schedule {_FILE}{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read the schedule {_FILE}{path}: {error}") from None
    try:
        schedule = Schedule.from_json(text)
        verify(schedule)
    except RecursionError:
        raise ValueError(f"{path}: not a schedule: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if schedule.ranks != ranks:
        raise ValueError(f"{path} is a schedule for {schedule.ranks} pipeline ranks, not for {ranks}: plan one for {ranks}")
    return schedule


def _forwards_in_order(schedule: Schedule, microbatches: int) -> Schedule:
    """The forwards of the first microbatch (or slice), repeated: right for any placement and number of microbatches."""
    rows = tuple(
        tuple(
            work._replace(microbatch=microbatch)
            for microbatch in range(microbatches * schedule.splits)
            for work in row
            if work.kind == "F" and work.microbatch == 0
        )
        for row in schedule.passes
    )
    return Schedule(schedule.name, schedule.placement, microbatches, rows, schedule.splits)
