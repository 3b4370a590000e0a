"""``mpipe plan``: the schedule of a family, the best of all, or one from a file, which it verifies; and how good that is."""

from __future__ import annotations

import argparse

from megatron.pipeline.cli.arguments import (
    Commands,
    Parser,
    add_command,
    boundary_flags,
    cost_flags,
    goal_flags,
    length_flags,
    offload_flags,
    pass_flags,
    report_flags,
    size_flags,
)
from megatron.pipeline.cli.drawn import as_text, check_drawn, draw_flags, say_drawn, shown_of, write_drawn
from megatron.pipeline.cli.progress import Progress
from megatron.pipeline.cli.request import changes, requested
from megatron.pipeline.cli.summary import above_bound, brief, check_output, summary, write
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.planner import Planned, choose, counted, document, every_batch, families, ops, verify_programs

# Flags that say how to make a schedule.
_MAKING = (
    *("schedule", "pp", "microbatches", "chunks", "splits", "group", "lengths", "attention", "order"),
    *("recompute", "fuse", "balance", "vocab_parallel", "overlap_experts"),
)


def add(commands: Commands) -> None:
    family = Parser(add_help=False)
    shortest = "auto: plan all and take the shortest, within 0.1 %% of it the one with the least memory"
    family.add_argument("--schedule", metavar="NAME", help=f"{', '.join(families.FAMILIES)}; or {shortest}")
    bounds = (
        "The lower bound holds for every order of F, B, W or BW on the same placement within the memory of the schedule's "
        "fullest rank. For 1f1b, interleaved, 1f1b-v and seq-1f1b, which fuse every backward, the distance shows what "
        "splitting could gain."
    )
    making = family, size_flags(required=False), length_flags(), goal_flags(), cost_flags(), boundary_flags(), pass_flags()
    parser = add_command(
        commands,
        "plan",
        "make the schedule of a family, or the best of all; or verify one from a file, and time and draw it",
        run,
        "mpipe plan --schedule zb-v --pp 8 --microbatches 32 --cost F=1,B=1.2,W=0.8,comm=0.05",
        "mpipe plan --schedule auto --pp 8 --microbatches 32 --memory-limit 5 -o plan.json",
        "mpipe plan plan.json --cost F=1,B=1.5,W=0.5,comm=0.1 --draw plan.svg --memory",
        "mpipe plan trace/iteration_0000005.json trace/iteration_0000006.json --consecutive",
        epilog=bounds,
        parents=[*making, offload_flags(), report_flags(), draw_flags()],
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="in place of --schedule: what mpipe plan -o wrote, a .csv of torch.distributed.pipelining, or a timeline that a "
        "training has recorded; several are drawn on one time axis",
    )
    parser.add_argument("--chunks", type=positive_int, metavar="V", help="model chunks per rank (default: the family's)")
    parser.add_argument("--splits", type=positive_int, metavar="S", help="slices along the sequence per microbatch, for seq-1f1b")
    parser.add_argument("--group", type=positive_int, metavar="G", help="microbatches a chunk runs in turn, for interleaved, gis")


def run(options: argparse.Namespace) -> None:
    check_output(options, drawn=True)
    check_drawn(options)
    if not options.files:
        _make(options)
        return
    if given := [f"--{name.replace('_', '-')}" for name in _MAKING if getattr(options, name) is not None]:
        raise ValueError(f"{', '.join(given)}: these make a schedule, and a FILE has one: leave them out, or the FILE")
    if len(options.files) == 1 and not options.consecutive and document.is_schedule(options.files[0]):
        _verify(options)
        return
    if options.json or options.output:
        raise ValueError("--json and -o are for the report of one schedule: for several FILEs or a recorded timeline give --draw")
    shown = shown_of(options)
    write_drawn(shown, options)
    if options.text or not (options.draw or options.trace):
        print(as_text(shown))
    say_drawn(options)


def _make(options: argparse.Namespace) -> None:
    """Plan the schedule of a family, or all of them, and say how good it is."""
    request = requested(options)
    with Progress("planning schedules") as progress:
        planned, choice = choose.best(request, progress=progress)
        if options.order == "any":
            planned = every_batch.ordered(request.of(planned.variant))
    data = document.report(planned)
    if options.lengths:
        data |= every_batch.batch_fields(planned, request.of(planned.variant))
    table = ""
    if choice:
        data |= document.choice_fields(choice)
        table = f"{choice.table(request.unit, request.lowest_limit)}\n\n{above_bound(request.objective)}\n\n"
    _put(planned, data, options, table)


def _verify(options: argparse.Namespace) -> None:
    """Tell that a schedule from a file obeys every rule, that its programs cannot deadlock, and how good it is at these costs."""
    (path,) = options.files
    planned = document.read(path, changes(options))
    schedule = planned.schedule
    verify_programs(schedule, planned.programs)
    sends = sum(isinstance(operation, ops.Send) for program in planned.programs for operation in program)
    shape = f"{counted(schedule.ranks, 'rank')}, {counted(schedule.microbatches, 'microbatch')}"
    count = f"{sum(map(len, schedule.passes))} passes and {sends} sends"
    obeys = f"{path}: {schedule.name} ({shape}) obeys every rule; {count}, no deadlock\n\n"
    _put(planned, document.report(planned), options, obeys)


def _put(planned: Planned, data: dict[str, object], options: argparse.Namespace, before: str) -> None:
    """Print the report of a schedule or write it to ``--output``, and write what is to be drawn.

    Args:
        before: text to print above the report.
    """
    shown = {planned.title: (planned.shown, planned)} if options.text or options.draw or options.trace else {}
    write_drawn(shown, options)  # first, for what may be missing, such as a package
    write(data, lambda: as_text(shown) if options.text else before + summary(data, planned.timeline), options, brief(data))
    say_drawn(options)
