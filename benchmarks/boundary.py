"""What planning the boundary of iterations saves: simulated periods, as the tables of docs/boundary.md.

First a pipeline of 8 ranks with 64 replicas, at round costs; then Llama 3 70B and DeepSeek-V3, at costs that ``mpipe costs``
predicts for GPUs.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from common import command_line, markdown

from megatron.pipeline.cli.costs import costs_of
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner.costmodel import device
from megatron.pipeline.planner.planning.compose import solve
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.boundary import turns
from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.time.cycle import Cycle
from megatron.pipeline.planner.schedule.transforms.boundary import NO_OVERLAP, megatron, waits_for_norm, with_boundary

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
            costs = [costs_of(describe(each.args), placement, each.layers, device.named(gpu)) for each in found.values()]
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


if __name__ == "__main__":
    command_line(__doc__).parse_args()
    print(families())
    print(models())
