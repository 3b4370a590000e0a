"""What planning the boundary of iterations saves: simulated periods, as the tables and the picture of docs/boundary.md.

    python benchmarks/boundary.py [--picture docs/images/boundary.png]

First a pipeline of 8 ranks with 64 replicas, at round costs; then Llama 3 70B and DeepSeek-V3, at costs that ``mpipe costs``
predicts for GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import replace
from functools import partial

from common import markdown

from megatron.pipeline.cli.costs import costs_of
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.costmodel import device
from megatron.pipeline.planning.compose import solve
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.planning.request import Request
from megatron.pipeline.schedule.core.boundary import Turn, turns
from megatron.pipeline.schedule.core.costs import Costs, uniform
from megatron.pipeline.schedule.core.passes import Kind
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import Objective
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.time.cycle import Cycle
from megatron.pipeline.schedule.transforms.boundary import NO_OVERLAP, megatron, waits_for_norm, with_boundary
from megatron.pipeline.view import draw

FAMILIES = (("zb-v", None), ("v-half", None), ("interleaved", 4), ("1f1b", None))
RANKS, REPLICAS, SPEED = 8, 64, 45.0  # GB/s
GRADIENTS = 4.4  # GB of float32 on a rank: 70 billion parameters over 8 stages and 8 tensor-parallel ranks
PASSES = (0.031, 0.034, 0.029)  # seconds of F, B and W of a rank
STEP, NORM, LATENCY = 0.001, 0.001, 0.0005

MODELS = {
    "Llama 3 70B": ("configs/llama3/70B.yaml", ["--use-distributed-optimizer", "--vocab-parallel", "off"]),
    "DeepSeek-V3": ("configs/deepseek_v3/671B.yaml", []),
}
DEVICES = ("H100-80GB", "GB200")
REPLICAS_OF_MODELS = (8, 16, 64, 256, 1024)


def round_costs(placement: Placement) -> Costs:
    ring = (REPLICAS - 1) / REPLICAS / SPEED
    parts = placement.chunks_per_replica
    costs = uniform(placement, *PASSES)
    between = {"reduce": GRADIENTS * ring / parts, "step": STEP / parts, "gather": GRADIENTS / 2 * ring / parts}
    return replace(costs, stages=tuple(replace(stage, **between) for stage in costs.stages), norm=NORM, latency=LATENCY)


def both(name: str, chunks: int | None, ranks: int, microbatches: int, costs: object) -> tuple[float, Planned, Planned]:
    """The period without any overlap, and plans whose steps wait for the norm, and whose do not."""
    norm, ahead = (
        Request(name, ranks, microbatches, costs, chunks, objective=goal).plan()  # type: ignore[arg-type]
        for goal in (Objective.MAKESPAN, Objective.SPAN)
    )
    return megatron(norm.schedule, norm.problem, [NO_OVERLAP])[1].period, norm, ahead


def row(none: float, norm: Planned, ahead: Planned) -> list[str]:
    def saved(plan: Planned) -> str:
        assert plan.period and plan.by_rules
        return f"{1 - plan.period / plan.by_rules:z.1%}"

    assert norm.period and norm.by_rules and ahead.period
    above = f"{norm.period / norm.period_bound - 1:z.1%}"
    return [
        *(f"{1e3 * each:.0f}" for each in (norm.value, none, norm.by_rules, norm.period)),
        *(saved(norm), above, f"{1e3 * ahead.period:.0f}", f"{1 - ahead.period / norm.by_rules:z.1%}"),
    ]


HEADS = ["makespan", "no overlap", "rules", "planned", "saved", "above bound", "post-validation", "saved"]


def families() -> str:
    rows = [
        [f"{name}{f', {chunks} chunks' if chunks else ''}", str(count), *row(*both(name, chunks, RANKS, count, round_costs))]
        for name, chunks in FAMILIES
        for count in (8, 16, 32)
    ]
    return markdown(["schedule", "m", *HEADS], rows)


def models() -> str:
    """By the number of replicas, periods by rules and planned: the number of microbatches is that of ranks, and twice that."""
    rows = []
    for model, (path, more) in MODELS.items():
        flags = ["--config", path, *more, "--overlap-grad-reduce", "--overlap-param-gather", "--pipeline-schedule", "zb-h1"]
        # One microbatch: how many there are changes no cost.
        numbers = [number for number in REPLICAS_OF_MODELS if number > 8 or model != "DeepSeek-V3"]  # its experts are on 16 ranks
        found = {number: predicted([*flags, "--global-batch-size", str(number)], number) for number in numbers}
        placement = found[64].schedule.placement
        for gpu in DEVICES:
            costs = [costs_of(each.args, placement, each.layers, device.named(gpu)) for each in found.values()]
            for name, rounds in itertools.product(("zb-v", "1f1b"), (1, 2)):
                cells = by_rules_and_planned(name, placement.ranks, rounds * placement.ranks, costs)
                none = [""] * (len(REPLICAS_OF_MODELS) - len(cells))
                rows.append([f"{model}, {gpu}", name, str(rounds * placement.ranks), *none, *cells])
    return markdown(["model", "schedule", "m", *(f"{number} replicas" for number in REPLICAS_OF_MODELS)], rows)


def by_rules_and_planned(name: str, ranks: int, microbatches: int, costs: list[Costs]) -> list[str]:
    """Of one order of passes, which takes as long at all costs, as ``mpipe tune`` plans: without the search for an order of W."""
    cells, schedule = [], None
    for each in costs:
        problem = Request(name, ranks, microbatches, lambda place: each.of_depth(place.depth)).problem()  # noqa: B023
        problem = replace(problem, objective=Objective.MAKESPAN)
        schedule = schedule or solve(name, problem)
        made, rules = with_boundary(schedule, replace(problem, quick=True))
        steady = Cycle(made, problem.costs, waits_for_norm(problem)).steady(turns(made))
        assert steady
        cells.append(f"{1e3 * rules:.0f}, {1e3 * steady.period:.0f} ({1 - steady.period / rules:z.1%})")
    return cells


def early_steps() -> str:
    """With post-validation: the best period of plans whose first complete chunk steps and gathers before a rank's last passes."""
    rows = []
    for name, share in itertools.product(("zb-v", "v-half"), (STEP, 10 * STEP)):
        costs = partial(_with_step, step=share)
        plan = Request(name, RANKS, RANKS, costs, objective=Objective.SPAN).plan()
        made, found = turns(plan.schedule), []
        for before in range(9):
            moved = [_stepping_before(own, before) for own in made]
            found.append(steady.period if (steady := plan.cycle.steady(moved)) else math.inf)
        rows.append([name, f"{1e3 * share:.0f}", f"{1e3 * found[0]:.1f}", f"{1e3 * min(found[1:]):.1f}"])
    return markdown(["schedule", "OPT of a rank", "behind all passes", "before its last 1 to 8"], rows)


def _with_step(placement: Placement, step: float) -> Costs:
    costs = round_costs(placement)
    return replace(costs, stages=tuple(replace(stage, step=step / placement.chunks) for stage in costs.stages))


def _stepping_before(own: Turn, count: int) -> Turn:
    """A turn with OPT and AG of the chunk whose RS come first before the last passes, as far as these RS are before them."""
    passes = list(own.passes)
    chunk = next(work.chunk for work in passes if work.kind is Kind.RS)
    steps = [work for work in passes if work.kind in (Kind.OPT, Kind.AG) and work.chunk == chunk]
    rest = [work for work in passes if work not in steps]
    reduced = max(slot for slot, work in enumerate(rest) if work.kind is Kind.RS and work.chunk == chunk) + 1
    computed = [slot for slot, work in enumerate(rest) if not work.kind.row.bucket]
    at = max(reduced, computed[-count]) if count else len(rest)
    return own if not count else Turn((*rest[:at], *steps, *rest[at:]))


def picture(path: str) -> None:
    """ZB-V by Megatron-LM's rules and planned, with the norm and with post-validation."""
    _, norm, ahead = both("zb-v", None, 4, 4, lambda place: _large(round_costs(place)))
    original: Schedule = replace(norm.schedule, boundary=())
    rules = replace(norm, schedule=megatron(original, norm.problem)[0])
    shown = {"by Megatron-LM's rules": rules, "planned": norm, "planned, with post-validation": ahead}
    draw(
        {f"{title}: {1e3 * (plan.period or 0):.0f} ms an iteration": plan.shown for title, plan in shown.items()}, path, unit="s"
    )


def _large(costs: Costs) -> Costs:
    return replace(costs, stages=tuple(replace(stage, step=0.01) for stage in costs.stages))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", metavar="FILE", help="draw the picture there, instead of printing the tables")
    options = parser.parse_args()
    if options.picture:
        picture(options.picture)
    else:
        print(families())
        print(models())
        print(early_steps())
