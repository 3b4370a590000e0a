"""``mpipe``: plan, simulate, verify and draw pipeline schedules."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.pipeline.cli_arguments import Numbers, Parser, checked, complain, limit, numbers
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.bound import lower_bound
from megatron.pipeline.schedule.costs import Costs, uniform
from megatron.pipeline.schedule.lower import lower
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.problem import Problem
from megatron.pipeline.schedule.program import Send
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import activation_peaks, activation_profile, simulate
from megatron.pipeline.schedule.timeline import Timeline
from megatron.pipeline.schedule.verify import verify, verify_programs
from megatron.pipeline.view import draw, render

MOST_PASSES = 3_000_000  # what fits into a few GB of memory and a minute


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 2 after one line on stderr that says what is wrong."""
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as ``head``, has seen enough. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return complain(f"{error.strerror}: {error.filename}")
    except RecursionError:
        return complain("not a schedule: the JSON is nested too deeply")
    except ValueError as error:
        return complain(str(error))
    return 0


def plan(options: argparse.Namespace) -> None:
    """``mpipe plan``: the schedule of a family, and how good it is."""
    placement = _placement(options)
    costs = _costs(placement, options.cost or {}, options.activation or {})
    begin = time.perf_counter()
    schedule = families.plan(options.schedule, options.pp, options.microbatches, costs, options.chunks, options.memory_limit)
    seconds = time.perf_counter() - begin
    verify(schedule, costs, options.memory_limit)
    _report(schedule, costs, options, plan_seconds=seconds)


def simulate_file(options: argparse.Namespace) -> None:
    """``mpipe simulate``: how good a schedule from a file is, with the costs it was planned with or with others."""
    schedule, costs = _read_schedule(options.file, options)
    _report(schedule, costs, options)


def verify_file(options: argparse.Namespace) -> None:
    """``mpipe verify``: whether a schedule from a file obeys every rule, and its programs cannot deadlock."""
    schedule, costs = _read_schedule(options.file, options)
    programs = lower(schedule, costs)
    verify_programs(schedule, programs)
    sends = sum(isinstance(operation, Send) for program in programs for operation in program)
    shape = f"{schedule.ranks} ranks, {schedule.microbatches} microbatches"
    count = f"{sum(map(len, schedule.passes))} passes and {sends} sends"
    print(f"{options.file}: {schedule.name} ({shape}) obeys every rule; {count}, no deadlock")


def draw_files(options: argparse.Namespace) -> None:
    """``mpipe draw``: schedules (simulated) and recorded timelines from files, as a picture or as text."""
    timelines: dict[str, Timeline] = {}
    memory = {}
    for path in options.files:
        text = _read(path)
        title = Path(path).stem
        if '"passes"' in text:
            schedule, costs = _read_schedule(path, options)
            title = schedule.name if schedule.name not in timelines else f"{schedule.name} ({path})"
            timelines[title] = simulate(schedule, costs)
            memory[title] = activation_profile(schedule, timelines[title], costs)
        else:
            title = title if title not in timelines else path
            try:
                timelines[title] = Timeline.from_json(text)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
    if options.output:
        draw(timelines, options.output, memory if options.memory else None)
    else:
        print("\n\n".join(f"{title}\n{_drawing(timeline)}" for title, timeline in timelines.items()))


def report(
    schedule: Schedule, costs: Costs, memory_limit: float | None = None, plan_seconds: float | None = None
) -> dict[str, Any]:
    """What ``--json`` prints; ``Schedule.from_json`` reads it. Costs must be equal for all stages (see ``uniform``)."""
    timeline = simulate(schedule, costs)
    limits = None if memory_limit is None else (memory_limit,) * schedule.ranks
    bound = lower_bound(Problem(schedule.placement, schedule.microbatches, costs, limits))
    stage, chunks = costs.stages[0], schedule.placement.chunks
    return {
        "schedule": schedule.name,
        "pp": schedule.ranks,
        "chunks": chunks,
        "microbatches": schedule.microbatches,
        "costs": {
            "F": stage.forward * chunks,
            "B": stage.backward * chunks,
            "W": stage.weight * chunks,
            "comm": costs.hop,
        },
        "activation": {"B": stage.activation * chunks, "W": stage.retained * chunks},
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_rate": timeline.bubble_rate,
        "makespan_bubble_rate": timeline.makespan_bubble_rate,
        "peak_activation": activation_peaks(schedule, costs),
        "lower_bound": bound,
        "gap": timeline.span / bound - 1 if bound else 0.0,
        **({} if plan_seconds is None else {"plan_seconds": plan_seconds}),
        "placement": schedule.placement.stages,
        "passes": [[str(work) for work in passes] for passes in schedule.passes],
    }


def _report(schedule: Schedule, costs: Costs, options: argparse.Namespace, plan_seconds: float | None = None) -> None:
    data = report(schedule, costs, options.memory_limit, plan_seconds)
    text = json.dumps(data) if options.json else _summary(data, simulate(schedule, costs), options.memory_limit)
    if options.output:
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def _summary(data: dict[str, Any], timeline: Timeline, memory_limit: float | None) -> str:
    peaks = data["peak_activation"]
    within = "of any memory" if memory_limit is None else f"within {memory_limit:g} microbatches"
    rows = [
        ("span", f"{data['span']:g}", f"bubble {data['bubble_rate']:.1%}, from a rank's first pass to its last"),
        (
            "makespan",
            f"{data['makespan']:g}",
            f"bubble {data['makespan_bubble_rate']:.1%}, from the first pass of all to the last of all",
        ),
        (
            "lower bound",
            f"{data['lower_bound']:g}",
            f"no schedule {within} has a shorter span; this one is {data['gap']:.1%} above",
        ),
        ("memory", f"{max(peaks):g}", f"microbatches at most; by rank {' '.join(f'{peak:g}' for peak in peaks)}"),
    ]
    wide = max(len(value) for _, value, _ in rows)
    chunks = f" with {data['chunks']} chunks each" if data["chunks"] > 1 else ""
    title = f"{data['schedule']}: {data['pp']} ranks{chunks}, {data['microbatches']} microbatches"
    table = "\n".join(f"  {name:<12}{value:>{wide}}  {meaning}" for name, value, meaning in rows)
    return f"{title}\n{table}\n\n{_drawing(timeline)}"


def _drawing(timeline: Timeline) -> str:
    return render(timeline, shutil.get_terminal_size().columns)


def _placement(options: argparse.Namespace) -> Placement:
    passes = 3 * options.pp * options.microbatches * (options.chunks or 1)
    if min(options.pp, options.microbatches, options.chunks or 1) > 0 and passes > MOST_PASSES:
        raise ValueError(f"{options.pp} ranks with {options.microbatches} microbatches are over {MOST_PASSES} passes; take fewer")
    return families.placement(options.schedule, options.pp, options.chunks)


def _costs(placement: Placement, cost: Numbers, activation: Numbers) -> Costs:
    """Costs per rank for a placement; memory is counted in microbatches, so that what F allocates is 1."""
    held = activation.get("B", 1.0)
    retained = activation.get("W", held)
    if not held > 0 or retained > held:
        raise ValueError(f"activation B={held:g},W={retained:g}: F must allocate more than 0 (B), of which W remains after B")
    forward, backward, weight = (cost.get(name, 1.0) for name in ("F", "B", "W"))
    return uniform(placement, forward, backward, weight, cost.get("comm", 0.0), retained=retained / held)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file; expected JSON as mpipe plan --json writes it") from None


def _read_schedule(path: str, options: argparse.Namespace) -> tuple[Schedule, Costs]:
    """A schedule that obeys every rule, and its costs: from the command line, or else those it was planned with."""
    text = _read(path)
    try:
        schedule = Schedule.from_json(text)
        data = json.loads(text)
        cost = checked(data.get("costs", {}), ("F", "B", "W", "comm")) | (options.cost or {})
        activation = checked(data.get("activation", {}), ("B", "W"))
        costs = _costs(schedule.placement, cost, options.activation or activation)
        verify(schedule, costs, options.memory_limit)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return schedule, costs


def _parser() -> Parser:
    costs = Parser(add_help=False)
    costs.add_argument(
        "--cost",
        type=numbers("F", "B", "W", "comm"),
        metavar="F=..,B=..,W=..,comm=..",
        help="one rank's share of one microbatch and one hop, in any unit of time (default: 1,1,1,0, or the file's)",
    )
    costs.add_argument(
        "--activation",
        type=numbers("B", "W"),
        metavar="B=..,W=..",
        help="what F allocates, and what of it remains after B until W (default: all of it, or the file's)",
    )
    costs.add_argument("--memory-limit", type=limit, metavar="X", help="most activations a rank may hold, in microbatches")
    output = Parser(add_help=False)
    output.add_argument("--json", action="store_true", help="one JSON object, which the other commands read")
    output.add_argument("-o", "--output", metavar="FILE", help="write there instead of to the terminal")

    parser = Parser(prog="mpipe", description="Plan, simulate, verify and draw pipeline schedules.")
    commands: argparse._SubParsersAction[Parser] = parser.add_subparsers(
        metavar="plan|simulate|verify|draw", required=True, parser_class=Parser
    )

    def command(name: str, run: Callable[[argparse.Namespace], None], help: str, *parents: Parser) -> Parser:
        added = commands.add_parser(name, help=help, description=help, parents=list(parents))
        added.set_defaults(run=run)
        return added

    planner = command("plan", plan, "make the schedule of a family", costs, output)
    planner.add_argument("--schedule", required=True, metavar="NAME", help=", ".join(families.FAMILIES))
    planner.add_argument("--pp", required=True, type=int, metavar="P", help="pipeline ranks")
    planner.add_argument("--microbatches", required=True, type=int, metavar="M", help="microbatches of an iteration")
    planner.add_argument("--chunks", type=int, metavar="V", help="model chunks per rank (default: the family's)")
    simulator = command("simulate", simulate_file, "run a schedule from a file against costs", costs, output)
    simulator.add_argument("file", metavar="FILE", help="what mpipe plan --json wrote")
    verifier = command("verify", verify_file, "check a schedule from a file against every rule", costs)
    verifier.add_argument("file", metavar="FILE", help="what mpipe plan --json wrote")
    drawer = command("draw", draw_files, "draw schedules and recorded timelines on one time axis", costs)
    drawer.add_argument("files", nargs="+", metavar="FILE", help="schedules (mpipe plan --json) or recorded timelines")
    drawer.add_argument("--memory", action="store_true", help="draw activation memory under each schedule")
    drawer.add_argument("-o", "--output", metavar="FILE", help="a .png or .svg file instead of text")
    return parser


if __name__ == "__main__":
    sys.exit(main())
