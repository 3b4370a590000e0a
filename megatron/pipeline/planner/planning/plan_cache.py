"""Plans of a training: a schedule with its programs for each number of microbatches, planned at first use.

The schedule comes from a family, which plans any number of microbatches and can plan again at other costs; from a file, which
is for one number; or it is megatron-core's own, which is not planned here at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from megatron.pipeline.planner.combinations.needs import FILES
from megatron.pipeline.planner.combinations.table import Facts
from megatron.pipeline.planner.planning.compose import adapted, with_vocabulary
from megatron.pipeline.planner.planning.document import naming
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.planning.refusals import ROUNDED_UP
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.boundary import buckets
from megatron.pipeline.planner.schedule.core.costs import EQUAL_PASSES, Costs, MemoryUnit
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.names import FILE, STOCK, counted
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved
from megatron.pipeline.planner.schedule.core.problem import ChunksDoNotFit, Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Posting
from megatron.pipeline.planner.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.planner.schedule.transforms.boundary import waits_for_norm


class PlanCache:
    """The plans of a training, by the number of microbatches and whether they are forwards alone.

    Args:
        request: ``schedule`` is a family's name, ``file:PATH`` (what ``mpipe plan --json`` writes) or ``stock``. ``costs`` are in
            seconds and bytes, and decide orders and when receives are posted; without them passes are equal, and memory is
            counted in microbatches; those of another number of stages are cut again (``cutting.of_depth``). Its number of
            microbatches does not matter.
        posting: how sends and receives are started.
        host_bytes: the most host memory that a rank may take. It counts as soon as costs are in bytes.

    Raises:
        ValueError: the name is unknown, the file cannot be read or is no valid schedule, or it is for other sizes.
    """

    def __init__(self, request: Request, posting: Posting = Posting.SINGLE, host_bytes: float | None = None) -> None:
        self.name, self.vocabulary = request.schedule, request.vocabulary
        self.objective, self.offload = Objective(request.objective), request.offload
        self.notes: list[str] = []  # remarks of planning, for the log
        self.costs_now: Costs | None = None  # of single batches, while something is slow
        self._request = request
        self.posting = posting
        self._host_bytes = host_bytes
        self._made: dict[tuple[int, bool], Planned] = {}
        self._file = _read(self.name.removeprefix(FILE), request.ranks) if self.name.startswith(FILE) else None
        if self._file:
            self._check_file(self._file)
            self.vocabulary = self._file.vocabulary or self.vocabulary
        self.placement: Placement = self._placement()
        self.costs: Costs | None = request.costs and cutting.of_depth(request.costs_on(self.placement), self.placement.depth)
        if request.chunks not in (None, self.placement.chunks):
            raise ChunksDoNotFit(f"{self.name} has {counted(self.placement.chunks, 'chunk')} per rank, got {request.chunks}")

    @property
    def is_stock(self) -> bool:
        return self.name == STOCK

    @property
    def has_family(self) -> bool:
        """Tell whether a family plans the schedule, and can do so again at other costs."""
        return not self.is_stock and self._file is None

    @property
    def splits(self) -> int:
        if self._file:
            return self._file.splits
        return 1 if self.is_stock else families.named(self.name).splits

    @property
    def offloads(self) -> bool:
        """Tell whether any iteration copies activations to host memory."""
        return bool(self.offload or (self._file and self._file.has_copies))

    @property
    def planned_costs(self) -> Costs:
        """Costs that schedules are planned for: measured costs, or equal ones, where copies take as long as passes do (k = 1)."""
        if self.costs:
            return self.costs
        costs = replace(self._request, vocabulary=self.vocabulary).equal_costs(self.placement)
        return cutting.with_equal_copies(costs) if self.offloads else costs

    @property
    def frozen(self) -> int:
        """The first stages in which no model trains anything: see ``Schedule``."""
        return self._request.frozen

    @property
    def made(self) -> dict[tuple[int, bool], Planned]:
        """Those that exist by now, by the number of microbatches and whether they are forwards alone."""
        return dict(self._made)

    @property
    def memory_limit(self) -> float | Sequence[float] | None:
        """The most activation memory that a rank may hold, in the unit of ``planned_costs``; None for what the family keeps."""
        return self._request.memory_limit

    @property
    def planned(self) -> dict[int, Schedule]:
        return {microbatches: plan.schedule for (microbatches, forward_only), plan in self._made.items() if not forward_only}

    def plan(self, microbatches: int, forward_only: bool = False) -> Planned:
        """The verified schedule and programs for a number of microbatches, made at first use.

        Raises:
            ValueError: the schedule does not exist for that number, breaks a rule, or exceeds the memory limit.
        """
        key = microbatches, forward_only
        if key not in self._made:
            self._made[key] = self._make(microbatches, forward_only)
        return self._made[key]

    def boundary(self, microbatches: int) -> tuple[tuple[Pass, ...], ...]:
        """Passes between iterations, as in ``Schedule.boundary``; a file's are of its own number of microbatches."""
        if self._file:
            return self._file.boundary
        return self.plan(microbatches).schedule.boundary if self.costs and self.costs.has_boundary else ()

    def buckets(self, microbatches: int) -> int | None:
        """Buckets of a chunk's parameters as planned; None where nothing says what ranks do between iterations."""
        return max((count for row in self.boundary(microbatches) for count in buckets(row).values()), default=None)

    def of_batch(self, microbatches: int, loads: Sequence[Load] = ()) -> Request:
        """The request for microbatches, with these loads or equal ones, which another process can read; to be planned quickly."""
        request = self._without_functions(self._at(microbatches, self.costs, self._request.memory_limit))
        costs = (self.costs_now if loads else None) or self.planned_costs
        return replace(request, costs=replace(costs, loads=tuple(loads)), quick=True)

    def again(self, costs: Costs, memory_limit: float | Sequence[float] | None) -> dict[int, Request]:
        """Requests at other costs, which another process can read, for every number of microbatches that is planned by now."""
        requests = {microbatches: self._at(microbatches, costs, memory_limit) for microbatches in self.planned}
        return {
            microbatches: replace(self._without_functions(request), quick=False, keep=False)
            for microbatches, request in requests.items()
        }

    def _without_functions(self, request: Request) -> Request:
        """The request on this placement."""
        placement = self.placement
        recompute, fused = (
            tuple(stages(placement) if callable(stages) else stages) for stages in (request.recompute, request.fused)
        )
        beside = request.beside(placement, self.vocabulary) if callable(request.beside) else request.beside
        return replace(request, recompute=recompute, fused=fused, beside=beside, equal=EQUAL_PASSES)

    def check(self, microbatches: int, evaluates: bool = True) -> None:
        """Plan ahead, so that a schedule that does not exist is refused before any process group or memory is taken."""
        ranks = self.placement.ranks
        if not self.is_stock:
            self.plan(microbatches)
            if evaluates:
                self.plan(microbatches, forward_only=True)
        elif self.placement.chunks > 1:
            group = self._request.group or ranks
            last = microbatches % group or group
            if not ranks <= group <= microbatches or last < ranks:
                wanted = f"groups of {group}, at least {ranks} in the last one,"
                if self._request.group in (None, ranks):
                    wanted = f"a multiple of {ranks} microbatches"
                flag = "--microbatch-group-size-per-virtual-pipeline-stage"
                own = f"give {flag} {microbatches}, " if microbatches >= ranks else ""
                raise ValueError(
                    f"megatron-core's own interleaved schedule needs {wanted} for {ranks} pipeline ranks, and an iteration has "
                    f"{microbatches}: change the batch size, {own}or take --pipeline-schedule interleaved"
                )

    def train(self, shares: Sequence[float | None]) -> None:
        """Plan for what a model trains, from its first iteration on; all ranks must do so at the same time.

        The first model says what W takes. B leaves out the first stages in which no model so far trains anything; with passes
        other than F, B and W it runs there, too.

        Args:
            shares: of the weights of each stage that W has to do with; None where nothing trains.
        """
        request, stages = self._request, range(len(shares))
        plain = self.has_family and self.splits == 1 and not (request.vocabulary or request.offload or request.overlap)
        first = next((stage for stage in stages if shares[stage] is not None), 0) if plain and not request.recompute else 0
        before = request.trained or [(1.0, share or 0.0) for share in shares]
        first = min(first, request.frozen) if request.trained else first
        trained = tuple((float(stage >= first), before[stage][1]) for stage in stages)
        if trained != (request.trained or ((1.0, 1.0),) * len(shares)):
            self._made.clear()
        self._request = replace(request, trained=trained)

    def adopt(
        self, plans: Mapping[int, Planned], costs: Costs | None = None, memory_limit: float | Sequence[float] | None = None
    ) -> None:
        """Run other plans from the next iteration on, on the same placement; all ranks must do so at the same time.

        Args:
            plans: proved, by the number of microbatches; those in use stay for the others.
            costs, memory_limit: that count from now on; without costs both stay.

        Raises:
            ValueError: a schedule breaks a rule or exceeds the limit; nothing has changed then.
        """
        if costs is None:
            costs, memory_limit = self.costs, self._request.memory_limit
        for microbatches, plan in plans.items():
            problem = self._problem(microbatches, costs, memory_limit)
            verify(plan.schedule, problem.costs, problem.limits, waits_for_norm=waits_for_norm(problem))
        # Another model that has come meanwhile may train more.
        self._made |= {(each, False): plan for each, plan in plans.items() if plan.schedule.frozen <= self.frozen}
        self.costs, self._request = costs, replace(self._request, memory_limit=memory_limit)

    def _placement(self) -> Placement:
        ranks, chunks = self._request.ranks, self._request.chunks
        if self._file:
            return self._file.placement
        return interleaved(ranks, chunks or 1) if self.is_stock else families.placement(self.name, ranks, chunks)

    def _check_file(self, file: Schedule) -> None:
        """Refuse a file's schedule that does not go with what is asked for on top of it."""
        asked = {"vocab_parallel": self._request.vocabulary, "offload": self.offload}
        has = {"file_vocabulary": file.vocabulary, "copies": file.has_copies}
        Facts(asked | has, pipeline_schedule=self.name).refuse(FILES)

    def _make(self, microbatches: int, forward_only: bool) -> Planned:
        if self._file:
            planned = self._of_file(self._file, microbatches, forward_only)
        else:
            made = self._made.get((microbatches, False))
            planned = made or self._at(microbatches, self.costs, self._request.memory_limit).plan()
        if forward_only:  # it keeps nothing for a backward: the limit is for iterations that train
            planned = replace(planned, schedule=planned.schedule.forward_only())
            verify(planned.schedule, forward_only=True)
        return self._proved(planned)

    def _of_file(self, file: Schedule, microbatches: int, forward_only: bool) -> Planned:
        problem = self._problem(microbatches, self.costs, self._request.memory_limit)
        if forward_only:  # a file is for one number of microbatches; its placement is all that evaluation needs
            schedule = with_vocabulary(_forwards_in_order(file, microbatches), problem)
        elif file.microbatches == microbatches:
            schedule = adapted(file, problem, problem.offload)
        else:
            raise ValueError(
                f"{self.name} is a schedule of {file.microbatches} microbatches, but an iteration has {microbatches} (global "
                f"batch size / micro batch size / data-parallel size): plan one for {microbatches}"
            )
        return Planned(schedule, problem, Variant(self.name))

    def _at(self, microbatches: int, costs: Costs | None, limit: float | Sequence[float] | None) -> Request:
        """The request for a number of microbatches, at other costs and another limit."""
        mode, host_limit, beside = self.offload, None, self._request.beside
        in_bytes = costs and (self.costs or costs.unit is MemoryUnit.BYTES)
        if self._host_bytes is not None and mode:  # a limit in bytes cannot be kept before costs are in bytes
            mode, host_limit = (mode, self._host_bytes / ROUNDED_UP) if costs else (None, None)
        return replace(
            self._request,
            microbatches=microbatches,
            costs=costs or self.planned_costs,
            memory_limit=limit,
            vocabulary=self.vocabulary,
            offload=mode,
            host_limit=host_limit,
            beside=partial(beside, in_bytes=True) if in_bytes and callable(beside) else beside,
        )

    def _problem(self, microbatches: int, costs: Costs | None, limit: float | Sequence[float] | None) -> Problem:
        """Problem that a schedule for that request answers, within the limits that its family keeps."""
        request = self._at(microbatches, costs, limit)
        return request.problem() if self.has_family else request.on(self.placement, self.splits)

    def _proved(self, planned: Planned) -> Planned:
        """The plan, once its programs are known to be right, and to contain only what the runtime can run."""
        schedule = planned.schedule
        if schedule.splits > 1 and schedule.reruns:
            raise ValueError(f"{self.name} runs slices of microbatches again (R), which the runtime cannot: plan it without one")
        verify_programs(schedule, planned.programs, self.posting)
        return planned


def _read(path: str, ranks: int) -> Schedule:
    def verified(text: str) -> Schedule:
        schedule = Schedule.from_json(text)
        verify(schedule)
        return schedule

    schedule = naming(path, verified)
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
            if work.kind is Kind.F and work.microbatch == 0
        )
        for row in schedule.passes
    )
    return Schedule(schedule.name, schedule.placement, microbatches, rows, schedule.splits)
