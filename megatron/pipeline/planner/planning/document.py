"""The JSON of a schedule: what ``mpipe plan --json`` prints, and what every command, the page and training read."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from megatron.pipeline.planner.planning.choose import Choice
from megatron.pipeline.planner.planning.compose import adapted
from megatron.pipeline.planner.planning.costs import CostFlags, cost_fields, costs_of, taking_time
from megatron.pipeline.planner.planning.planned import Planned, Variant, above
from megatron.pipeline.planner.planning.refusals import COSTS_UNIT, Unit, check_limit, in_unit, unit_of
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.cutting import with_shards
from megatron.pipeline.planner.schedule.core.names import OFF
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload
from megatron.pipeline.planner.schedule.core.problem import GOAL, Objective, Problem, TooLow, per_rank
from megatron.pipeline.planner.schedule.core.reading import NamedErrors, parse_json, printable, read_text
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.lower.torch_csv import from_csv
from megatron.pipeline.planner.schedule.optimum.bound import own_bound, with_own_passes
from megatron.pipeline.planner.schedule.optimum.sustain import smallest_sustaining_limit
from megatron.pipeline.planner.schedule.time.simulate import activation_changes, activation_peaks, activation_profile, simulate
from megatron.pipeline.planner.schedule.transforms.boundary import megatron
from megatron.pipeline.planner.schedule.transforms.offload import host_peaks, moved
from megatron.pipeline.planner.schedule.transforms.transform import without_copies

_Read = TypeVar("_Read")

_OF_EACH = (
    *("schedule", "chunks", "makespan", "span", "bubble_rate", "span_bubble_rate", "makespan_bubble_rate", "peak_activation"),
    *("lower_bound", "gap", "makespan_lower_bound", "makespan_gap", "plan_seconds"),
    *("offload", "overlap", "balance", "period", "period_lower_bound", "period_gap", "period_by_rules"),
    "period_by_rules_of_this_order",
)


def report(planned: Planned) -> dict[str, Any]:
    """Data that ``--json`` prints of a schedule; ``read`` reads it."""
    return _report(planned) | {"message_buffers": planned.message_buffers}


def _report(planned: Planned) -> dict[str, Any]:
    """All of that but what takes lowering the schedule."""
    schedule, problem, timeline = planned.schedule, planned.problem, planned.timeline
    copies = schedule.has_copies or problem.offload is not None
    bounds = {goal: own_bound(schedule, replace(problem, objective=goal)) for goal in Objective}
    return {
        "schedule": schedule.name,
        "pp": schedule.ranks,
        "chunks": schedule.placement.chunks,
        "microbatches": schedule.microbatches,
        **cost_fields(schedule.placement, problem.costs, schedule.vocabulary is not None, copies),
        **({"slow": planned.slow} if planned.slow else {}),
        **_limits(planned),
        **({"fuse": sorted(problem.fused)} if problem.fused else {}),
        "objective": str(problem.objective),
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_rate": timeline.bubble_rate,
        "span_bubble_rate": timeline.span_bubble_rate,
        "makespan_bubble_rate": timeline.bubble_rate,
        "peak_activation": planned.peaks,
        "lower_bound": bounds[Objective.SPAN],
        "gap": above(timeline.span, bounds[Objective.SPAN]),
        "makespan_lower_bound": bounds[Objective.MAKESPAN],
        "makespan_gap": above(timeline.makespan, bounds[Objective.MAKESPAN]),
        **({"offload": gain(planned)} if copies else {}),
        **_overlap(planned),
        **_period(planned),
        **({} if planned.split is None else {"balance": asdict(planned.split)}),
        **({} if planned.seconds is None else {"plan_seconds": planned.seconds}),
        **{name: value for name, value in schedule.fields().items() if name not in ("schedule", "microbatches")},
    }


def row(planned: Planned) -> dict[str, Any]:
    """The fields of one schedule in the JSON of several."""
    fields = _report(planned)
    return {name: fields[name] for name in _OF_EACH if name in fields} | {"label": str(planned.variant), "memory": planned.peak}


def choice_fields(choice: Choice) -> dict[str, Any]:
    """The field ``candidates`` in the JSON of ``auto``: first the schedules that were planned, then those that were refused."""
    rows = [row(plan) | {"why_not": choice.why_not.get(plan.variant)} for plan in choice.planned]
    missing = [{"schedule": each.variant.name, "label": str(each.variant), "why_not": each.reason} for each in choice.refused]
    return {"candidates": rows + missing}


def _overlap(planned: Planned) -> dict[str, Any]:
    """The field ``overlap``, where layers communicate or passes are braided."""
    exposed, whole = planned.communication
    if not (whole or planned.braids):
        return {}
    return {"overlap": {"braids": planned.braids, "communication": whole, "exposed": exposed}}


def _period(planned: Planned) -> dict[str, Any]:
    """The period, its bound, and the period under Megatron-LM's rules, where it is known what ranks do between iterations."""
    if planned.period is None or not planned.problem.costs.has_boundary:
        return {}
    found = {"period": planned.period, "period_lower_bound": planned.period_bound, "period_gap": planned.period_gap}
    if planned.by_rules is not None:
        return found | {"period_by_rules": planned.by_rules}
    return found | {"period_by_rules_of_this_order": megatron(planned.schedule, planned.problem)[1].period}


def _limits(planned: Planned) -> dict[str, Any]:
    """The limit, if there is one, and the least that could run a microbatch per the time it takes the busiest rank."""
    if planned.memory_limit is None:
        return {}
    if planned.schedule.has_copies or planned.problem.costs.loads:  # of unequal microbatches none tells what the next would take
        return {"memory_limit": planned.memory_limit}
    problem = with_own_passes(planned.schedule, planned.problem)
    whole = problem.microbatches * max(map(problem.microbatch_memory, range(problem.ranks)))  # more is of no use
    return {"memory_limit": planned.memory_limit, "sustaining_limit": min(smallest_sustaining_limit(problem), whole)}


def gain(planned: Planned) -> dict[str, Any]:
    """The field ``offload`` of a schedule with copies to host memory; memory is in the costs' unit.

    Returns:
        ``mode`` (None for copies that are a user's own), ``k``, by rank what is ``moved`` in an iteration, the ``moved_share`` of
        what all F allocate, and ``host_peak``; and ``peak_without`` and ``span_without`` of the same passes without copies.
    """
    schedule, problem, costs = planned.schedule, planned.problem, planned.problem.costs
    plain = without_copies(schedule)
    away = moved(schedule, costs)
    allocated = [
        sum(change for work, change in zip(*row, strict=True) if work.kind is Kind.F)
        for row in zip(plain.passes, activation_changes(plain, costs), strict=True)
    ]
    return {
        "mode": problem.offload and str(problem.offload),
        "k": costs.k(problem.recompute),
        "moved": away,
        "moved_share": [part / whole if whole else 0.0 for part, whole in zip(away, allocated, strict=True)],
        "peak_without": activation_peaks(plain, costs),
        "host_peak": host_peaks(schedule, costs),
        **({} if problem.host_limit in (None, math.inf) else {"host_limit": problem.host_limit}),
        "span_without": simulate(plain, costs).span,
    }


def curves(shown: Mapping[str, Planned]) -> dict[str, Any]:
    """Arguments of ``view.draw`` for the memory of schedules: by title what each rank holds over time, and the unit of all."""
    units = {unit_of_fields(cost_fields(planned.schedule.placement, planned.problem.costs)) for planned in shown.values()}
    unit = units.pop() if len(units) == 1 else COSTS_UNIT
    memory = {
        title: [
            [(moment, held / unit.size) for moment, held in steps]
            for steps in activation_profile(planned.schedule, planned.timeline, planned.problem.costs)
        ]
        for title, planned in shown.items()
    }
    return {"memory": memory, "memory_unit": unit.name.strip()}


def unit_of_fields(report: Mapping[str, Any]) -> Unit:
    """Unit of memory of a report: costs of every stage may count it in any, unless a rank's share of every microbatch is 1."""
    stages = report.get("stage_costs")
    named = stages and "loads" not in stages and math.isclose(report["activation"]["B"], 1.0)
    return unit_of(None if named or not stages else Costs.from_fields(stages))


@dataclass(frozen=True)
class Changes:
    """Changes by a user to a schedule from a file. None: the file's value stays.

    Attributes:
        costs: what passes cost.
        memory_limit: the most activation memory a rank may hold.
        objective: what the schedule is judged by.
        offload: ``OFF`` or a mode of ``Offload``: the file's copies to host memory go, and those of the mode come.
        host_limit: see ``Problem``.
    """

    costs: CostFlags = field(default_factory=CostFlags)
    memory_limit: float | None = None
    objective: str | None = None
    offload: str | None = None
    host_limit: float | None = None


def read(path: str, changes: Changes) -> Planned:
    """A schedule from a JSON or CSV file that obeys every rule, with costs and limit from the user, or else from the file.

    Raises:
        ValueError: the file cannot be read, is malformed, or the schedule breaks a rule; the message names the file.
    """
    return naming(path, lambda text: _planned(path, text, changes))


def read_timeline(path: str, changes: Changes) -> tuple[Timeline, Planned | None]:
    """When everything runs: a schedule's passes, simulated, with the schedule; or a recorded timeline alone.

    Raises:
        ValueError: the file cannot be read, is malformed, or the schedule breaks a rule; the message names the file.
    """
    if not is_schedule(path):
        return naming(path, Timeline.from_json), None
    planned = read(path, changes)
    return planned.shown, planned


def read_recorded_plan(path: str) -> Timeline | None:
    """Plan of an iteration that a training has recorded; None for other files.

    Raises:
        ValueError: the file cannot be read, or its plan is malformed; the message names the file.
    """

    def plan(text: str) -> Timeline | None:
        recorded = parse_json(text, "a recorded iteration")
        beside = recorded.get("planned") if isinstance(recorded, dict) else None
        return None if beside is None else Timeline.from_json(json.dumps(beside))

    return None if is_schedule(path) else naming(path, plan)


def read_costs(path: str, text: str | None = None) -> Costs:
    """The costs of every stage, from a file (``Costs.from_json``).

    Args:
        text: of the file, where it has been read.

    Raises:
        ValueError: the file cannot be read, or has no costs; the message names the file.
    """
    return naming(path, lambda text: taking_time(Costs.from_json(text)), text)


def naming(path: str, read: Callable[[str], _Read], text: str | None = None) -> _Read:
    """Document that ``read`` makes of the text of a file; its complaints name the file.

    Args:
        text: of the file, where it has been read.

    Raises:
        ValueError: the file cannot be read, or what ``read`` raised.
    """
    text = read_text(path) if text is None else text
    with NamedErrors(f"{path}:"):
        return read(text)


def is_csv(path: str) -> bool:
    return Path(path).suffix.lower() == ".csv"


def schedule_of(path: str, text: str) -> tuple[Schedule, dict[str, Any]]:
    """The schedule in the text of a file, and the fields of its JSON; a CSV has none."""
    return (
        (from_csv(text, printable(Path(path).stem)), {})
        if is_csv(path)
        else (Schedule.from_json(text), parse_json(text, "a schedule"))
    )


def is_schedule(path: str) -> bool:
    """Tell whether a file holds passes without times, or what is to be a schedule; not so a recorded timeline."""
    text = "" if is_csv(path) else read_text(path)
    return '"passes"' in text or '"ranks"' not in text


def _planned(path: str, text: str, changes: Changes) -> Planned:
    schedule, file = schedule_of(path, text)
    asked, (mode, host_limit) = None, _offload(file)
    if changes.offload:
        asked = None if changes.offload == OFF else Offload(changes.offload)
        schedule, mode, host_limit = without_copies(schedule), asked, changes.host_limit
    costs = costs_of(changes.costs, schedule.placement, file, copies=bool(mode) or schedule.has_copies)
    unit = unit_of(costs)
    limit: float | list[float] | None = changes.memory_limit
    check_limit(changes.memory_limit, unit)
    check_limit(changes.host_limit, unit, "--host-memory-limit")
    if limit is None and not asked:  # offloading is to lower the memory, so the file's own limit does not count
        limit = _memory_limit(file, schedule.ranks)
    objective = changes.objective or file.get("objective", GOAL)
    if objective not in list(Objective):
        raise ValueError(f"objective must be one of {', '.join(Objective)}, got {objective!r}")
    fused = file.get("fuse", [])
    if not isinstance(fused, list) or not all(type(stage) is int for stage in fused):
        raise ValueError(f"fuse must be a list of stages, got {fused!r}")
    problem = Problem(
        schedule.placement,
        schedule.microbatches,
        with_shards(costs, schedule.vocabulary, schedule.ranks),
        None if limit is None else tuple(per_rank(limit, schedule.ranks)),
        Objective(objective),
        splits=schedule.splits,
        vocabulary=schedule.vocabulary,
        offload=mode,
        host_limit=host_limit,
    )
    try:
        schedule = adapted(schedule, problem, asked)
    except TooLow as error:
        lowest = min(limit) if isinstance(limit, list) else limit
        raise in_unit(error, unit, schedule.name, lowest, host_limit) from None
    stages = {kind: _all_run(schedule, kind) for kind in (Kind.R, Kind.BW)}
    problem = replace(problem, recompute=stages[Kind.R], fused=frozenset(fused) & stages[Kind.BW])
    # A file says what the family's own order takes, which its plan may have changed.
    by_rules = _number(file, "period_by_rules") if changes == Changes() else None
    if problem.costs.has_boundary and not schedule.boundary:
        schedule, steady = megatron(schedule, problem)
        by_rules = steady.period
    return Planned(schedule, problem, Variant(schedule.name), by_rules=by_rules)


def _offload(file: Mapping[str, Any]) -> tuple[Offload | None, float | None]:
    """The mode of offloading and the limit of host memory that the file was planned with."""
    about = file.get("offload", {})
    if not isinstance(about, dict):
        raise ValueError(f"offload must be an object with the mode, got {repr(about)[:40]}")
    mode = about.get("mode")
    if mode is not None and mode not in list(Offload):
        raise ValueError(f"the mode of offload must be one of {', '.join(Offload)}, got {mode!r}")
    return Offload(mode) if mode else None, _number(about, "host_limit")


def _memory_limit(file: Mapping[str, Any], ranks: int) -> float | list[float] | None:
    """One number, or one for each rank."""
    given = file.get("memory_limit")
    if not isinstance(given, list):
        return _number(file, "memory_limit")
    if len(given) != ranks:
        raise ValueError(f"memory_limit has {len(given)} numbers for {ranks} ranks: give one, or one for each rank")
    return [float(limit or 0) for limit in (_number({"memory_limit": each}, "memory_limit") for each in given)]


def _number(file: Mapping[str, Any], name: str) -> float | None:
    value = file.get(name)
    if value is None or (type(value) in (int, float) and (0 <= value <= 1e100 or value == math.inf)):
        return value
    raise ValueError(f"{name} must be a number between 0 and 1e100, got {repr(value)[:40]}")


def _all_run(schedule: Schedule, kind: Kind) -> frozenset[int]:
    """The stages that run a kind of pass for every microbatch."""
    runs = Counter(
        schedule.placement.stage(rank, work.chunk)
        for rank, passes in enumerate(schedule.passes)
        for work in passes
        if work.kind is kind
    )
    return frozenset(stage for stage, count in runs.items() if count == schedule.slices)
