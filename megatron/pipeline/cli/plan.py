"""``mpipe plan``: the schedule of a family, and how good it is."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

from megatron.pipeline.cli.arguments import Commands, Parser, Stages, check_size, cost_flags, report_flags, seconds, size_flags
from megatron.pipeline.cli.case import Case, gap
from megatron.pipeline.cli.costs import costs_of
from megatron.pipeline.cli.summary import put
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.problem import Objective
from megatron.pipeline.schedule.verify import verify


def add(commands: Commands) -> None:
    help = "make the schedule of a family"
    family = Parser(add_help=False)
    family.add_argument("--schedule", required=True, metavar="NAME", help=", ".join(families.FAMILIES))
    parents = [family, size_flags(), cost_flags(), report_flags()]
    parser = commands.add_parser("plan", help=help, description=help, parents=parents)
    parser.add_argument("--chunks", type=int, metavar="V", help="model chunks per rank (default: the family's)")
    parser.add_argument("--splits", type=int, metavar="S", help="slices along the sequence per microbatch, for seq-1f1b")
    parser.add_argument("--group", type=int, metavar="G", help="microbatches that a chunk runs in turn, for gis and gis-h")
    parser.add_argument("--recompute", type=Stages, metavar="STAGES", help="stages that run their forward again: all, or 0,3-5")
    parser.add_argument("--fuse", type=Stages, metavar="STAGES", help="stages that run B and W as one pass: all, or 0,3-5")
    parser.add_argument(
        "--exact",
        nargs="?",
        type=seconds,
        const=60.0,
        metavar="SECONDS",
        help="search for the optimum too, for so long (default 60), and say how far it is; small instances only",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    planned = plan(options, options.schedule, options.chunks)
    case, data = planned.case, planned.case.report(planned.seconds)
    if options.exact is not None:
        from megatron.pipeline.schedule.exact import optimum

        best = optimum(case.problem, seconds=options.exact, hint=case.schedule)
        value = data[str(case.objective)]
        data["exact"] = {"value": best.value, "bound": best.bound, "proven": best.proven, "gap": gap(value, best.bound)}
    put(data, case.timeline(), options)


@dataclass(frozen=True)
class Planned:
    """A schedule that was made and verified, and the seconds it took to make."""

    case: Case
    seconds: float


def plan(options: argparse.Namespace, name: str, chunks: int | None) -> Planned:
    """Plan and verify one schedule as the flags say.

    Args:
        options: of ``size_flags`` and ``cost_flags``, and those of ``mpipe plan`` where there are more.
        name, chunks: of the family; None for its own number of chunks.

    Raises:
        ValueError: the name is unknown, or sizes, costs or the limit do not fit the family.
    """
    if name.startswith("file:"):
        path = name.removeprefix("file:")
        raise ValueError(f"mpipe plan makes the schedules of families; for a file: mpipe simulate {path}, mpipe verify {path}")
    given = vars(options)
    family = families.FAMILIES.get(name)
    splits = given.get("splits")
    check_size(options.pp, options.microbatches, chunks or 1, splits or (family.splits if family else 1))
    placement = families.placement(name, options.pp, chunks)
    check_size(options.pp, options.microbatches, placement.chunks_per_replica, splits or families.FAMILIES[name].splits)
    stages = placement.last_stage + 1
    costs = costs_of(options, placement)
    chosen = {flag: given[flag].of(stages) if given.get(flag) else frozenset() for flag in ("recompute", "fuse")}
    begin = time.perf_counter()
    problem = families.problem(
        name,
        options.pp,
        options.microbatches,
        costs,
        chunks,
        options.memory_limit,
        objective=options.objective,
        recompute=chosen["recompute"],
        fused=chosen["fuse"],
        splits=splits,
        group=given.get("group"),
    )
    schedule = families.solve(name, problem)
    seconds = time.perf_counter() - begin
    verify(schedule, costs, options.memory_limit)
    return Planned(Case(schedule, costs, options.memory_limit, Objective(options.objective), problem.fused), seconds)
