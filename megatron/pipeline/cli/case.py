"""A schedule with what it is measured against: what a file holds, and what ``--json`` prints."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from megatron.pipeline.cli.arguments import GOAL, read_text
from megatron.pipeline.cli.costs import cost_fields, costs_of, with_shards
from megatron.pipeline.cli.offload import gain, wanted
from megatron.pipeline.schedule.core.passes import Kind, Offload
from megatron.pipeline.schedule.core.problem import Objective, Problem
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.schedule.optimum.bound import own_bound, with_own_passes
from megatron.pipeline.schedule.optimum.sustain import smallest_sustaining_limit
from megatron.pipeline.schedule.rules.verify import verify
from megatron.pipeline.schedule.time.jitter import expected
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.schedule.transforms.offload import offload
from megatron.pipeline.schedule.transforms.transform import without_copies
from megatron.pipeline.view import Iteration

_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Case:
    """A schedule that obeys every rule, and the problem that it is an answer to."""

    schedule: Schedule
    problem: Problem

    @property
    def title(self) -> str:
        """What it is called above a drawing."""
        return f"{self.schedule.name}, offloaded" if self.schedule.has_copies else self.schedule.name

    @property
    def limit(self) -> float | None:
        """The most activation memory that a rank may hold, in the costs' unit; None for any amount."""
        most = math.inf if self.problem.limits is None else max(self.problem.limits)
        return None if most == math.inf else most

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.problem.costs)

    @property
    def gap(self) -> float:
        """How far this schedule is above the lower bound within the memory that it holds itself, as a share of the bound."""
        return gap(self.problem.value(self.timeline), own_bound(self.schedule, self.problem))

    def report(self, plan_seconds: float | None = None) -> dict[str, Any]:
        """What ``--json`` prints; ``read_case`` reads it.

        Args:
            plan_seconds: how long planning took, where it was planned just now.
        """
        schedule, problem, timeline = self.schedule, self.problem, self.timeline
        copies = schedule.has_copies or problem.offload is not None
        bounds = {goal: own_bound(schedule, replace(problem, objective=goal)) for goal in Objective}
        return {
            "schedule": schedule.name,
            "pp": schedule.ranks,
            "chunks": schedule.placement.chunks,
            "microbatches": schedule.microbatches,
            **cost_fields(schedule.placement, problem.costs, schedule.vocabulary is not None, copies),
            **self._limits(),
            **({"fuse": sorted(problem.fused)} if problem.fused else {}),
            "objective": str(problem.objective),
            "makespan": timeline.makespan,
            "span": timeline.span,
            "bubble_rate": timeline.bubble_rate,
            "makespan_bubble_rate": timeline.makespan_bubble_rate,
            "peak_activation": activation_peaks(schedule, problem.costs),
            "lower_bound": bounds[Objective.SPAN],
            "gap": gap(timeline.span, bounds[Objective.SPAN]),
            "makespan_lower_bound": bounds[Objective.MAKESPAN],
            "makespan_gap": gap(timeline.makespan, bounds[Objective.MAKESPAN]),
            **self._expected(),
            **({"offload": gain(schedule, problem)} if copies else {}),
            **({} if plan_seconds is None else {"plan_seconds": plan_seconds}),
            **{name: value for name, value in schedule.fields().items() if name not in ("schedule", "microbatches")},
        }

    def _limits(self) -> dict[str, float]:
        """The limit, if there is one, and the least that could run a microbatch per the time it takes the busiest rank."""
        if self.limit is None:
            return {}
        if self.schedule.has_copies:
            return {"memory_limit": self.limit}
        least = smallest_sustaining_limit(with_own_passes(self.schedule, self.problem))
        return {"memory_limit": self.limit, "sustaining_limit": least}

    def _expected(self) -> dict[str, float]:
        """What an iteration takes on average where pass times vary, if they do."""
        if not self.problem.jitter:
            return {}
        found = expected(self.schedule, self.problem.costs, self.problem.jitter)
        return {"jitter": self.problem.jitter, "expected_span": found.span, "expected_makespan": found.makespan}


def gap(value: float, bound: float) -> float:
    """How far a value is above a bound, as a share of the bound."""
    return value / bound - 1 if bound else 0.0


def read_case(path: str, options: argparse.Namespace) -> Case:
    """A schedule from a JSON or CSV file that obeys every rule, with costs and limit from the flags, or else from the file.

    Raises:
        ValueError: the file cannot be read, is malformed, or the schedule breaks a rule; the message names the file.
    """
    return _naming(path, lambda text: _case(path, text, options))


def read_timeline(path: str, options: argparse.Namespace) -> tuple[Timeline, Case | None]:
    """When everything runs: a schedule's passes, simulated, with the schedule; or a recorded timeline alone.

    Raises:
        ValueError: the file cannot be read, is malformed, or the schedule breaks a rule; the message names the file.
    """
    if _is_schedule(path):
        case = read_case(path, options)
        return case.timeline, case
    return _naming(path, Timeline.from_json), None


def read_iteration(path: str) -> Iteration:
    """What a training run recorded about one iteration.

    Raises:
        ValueError: the file cannot be read, is malformed, or a schedule; the message names the file.
    """
    if _is_schedule(path):
        raise ValueError(
            f"{path} is a schedule, and only iterations that ran are joined: name the iteration_*.json of --pipeline-trace"
        )
    return _naming(path, Iteration.from_json)


def _naming(path: str, read: Callable[[str], _Read]) -> _Read:
    """What ``read`` makes of the text of a file; what it complains about names the file.

    Raises:
        ValueError: the file cannot be read, or what ``read`` raised.
    """
    text = read_text(path)
    try:
        return read(text)
    except RecursionError:
        raise ValueError(f"{path}: not a schedule: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _is_schedule(path: str) -> bool:
    """Whether a file holds passes without times."""
    return _is_table(path) or '"passes"' in read_text(path)


def _is_table(path: str) -> bool:
    """Whether a file holds passes as CSV."""
    return Path(path).suffix.lower() == ".csv"


def _case(path: str, text: str, options: argparse.Namespace) -> Case:
    if _is_table(path):
        from megatron.pipeline.schedule.lower.torch_csv import from_csv

        schedule, told = from_csv(text, Path(path).stem), {}
    else:
        schedule, told = Schedule.from_json(text), json.loads(text)
    asked, (mode, host_limit) = wanted(options), _offload(told)
    if vars(options).get("offload"):
        schedule, mode, host_limit = without_copies(schedule), asked, options.host_memory_limit
    costs = costs_of(options, schedule.placement, told, copies=bool(mode) or schedule.has_copies)
    costs = with_shards(costs, schedule.vocabulary)
    limit = options.memory_limit
    if limit is None and not asked:  # offloaded, it is to hold less than what it was planned for
        limit = _number(told, "memory_limit")
    objective = vars(options).get("objective") or told.get("objective", GOAL)
    if objective not in list(Objective):
        raise ValueError(f"objective must be one of {', '.join(Objective)}, got {objective!r}")
    jitter = vars(options).get("jitter")
    fused = told.get("fuse", [])
    if not isinstance(fused, list) or not all(type(stage) is int for stage in fused):
        raise ValueError(f"fuse must be a list of stages, got {fused!r}")
    if asked:
        verify(schedule, costs)
        limits = None if limit is None else (limit,) * schedule.ranks
        schedule = offload(schedule, costs, asked, limits, host_limit)
    verify(schedule, costs, limit)
    problem = Problem(
        schedule.placement,
        schedule.microbatches,
        costs,
        None if limit is None else (limit,) * schedule.ranks,
        Objective(objective),
        _all_run(schedule, Kind.R),
        frozenset(fused) & _all_run(schedule, Kind.BW),
        schedule.splits,
        jitter=_number(told, "jitter") or 0.0 if jitter is None else jitter,
        vocabulary=schedule.vocabulary,
        offload=mode,
        host_limit=host_limit,
    )
    return Case(schedule, problem)


def _offload(told: Mapping[str, Any]) -> tuple[Offload | None, float | None]:
    """With which mode, and which limit on host memory, the file says that it was planned."""
    about = told.get("offload", {})
    if not isinstance(about, dict):
        raise ValueError(f"offload must be an object with the mode, got {repr(about)[:40]}")
    mode = about.get("mode")
    if mode is not None and mode not in list(Offload):
        raise ValueError(f"the mode of offload must be one of {', '.join(Offload)}, got {mode!r}")
    return Offload(mode) if mode else None, _number(about, "host_limit")


def _number(told: Mapping[str, Any], field: str) -> float | None:
    value = told.get(field)
    if value is None or (type(value) in (int, float) and (0 <= value <= 1e100 or value == math.inf)):
        return value
    raise ValueError(f"{field} must be a number between 0 and 1e100, got {repr(value)[:40]}")


def _all_run(schedule: Schedule, kind: Kind) -> frozenset[int]:
    """The stages that run a kind of pass for every microbatch."""
    homes = schedule.placement.home
    return frozenset(stage for stage, count in _runs(schedule, kind).items() if count == len(schedule.numbers(*homes(stage))))


def _runs(schedule: Schedule, kind: Kind) -> Counter[int]:
    """How often every stage that does runs a kind of pass."""
    return Counter(
        schedule.placement.stage(rank, work.chunk)
        for rank, passes in enumerate(schedule.passes)
        for work in passes
        if work.kind is kind
    )
