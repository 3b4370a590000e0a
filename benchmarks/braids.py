"""How close do braids of forwards and backwards come to their plan and to the bound, and what do they gain?

Layers of experts sleep on two lanes of each rank's device, one that computes and one of all-to-alls; megatron-core's own plans of
layers run their parts. Compared in one run are megatron-core's interleaved schedule without overlap and with its combined order
(``--overlap-moe-expert-parallel-comm``), DualPipeV's published order as torch.distributed.pipelining has it, and ours:

    torchrun --nproc-per-node 4 benchmarks/braids.py --microbatches 12 --milliseconds 40 40 40 --all-to-all 10

Medians over rounds; every round runs one iteration of each. The bound is that of every order of the same passes on the same
placement within the schedule's own memory, with any braids.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import torch
from common import add_flags, command_line, in_rounds, markdown
from contenders import Contender, Megatron, Ours, Stock, Torch, start
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_model
from sleep_stages import iteration
from sleeping_layers import LayeredStage, TwoLanes

from megatron.pipeline.planning import Planned, Request
from megatron.pipeline.schedule.core.braids import NO_LAYERS, braid_seconds
from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.core.passes import Kind
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import Objective
from megatron.pipeline.schedule.optimum.bound import own_bound

OURS = "interleaved zb-v v-auto@1.125 v-auto@1.5 dualpipe-v".split()
LAYERS = 4  # of a rank


def costs_of(milliseconds: tuple[float, float, float], all_to_all: float, placement: Placement, overlap: bool = True) -> Costs:
    """Of a rank's share of layers: what computes, half of it experts, and four all-to-alls.

    Args:
        overlap: whether layers run as plans: a BW alone then computes weights' gradients behind its all-to-alls.
    """
    forward, backward, weight, dispatch = (value / 1000 for value in (*milliseconds, all_to_all))
    whole = StageCosts(
        forward + 2 * dispatch, backward + 2 * dispatch, weight, dispatch=dispatch, experts=forward / 2, combine=dispatch,
        backward_combine=dispatch, backward_experts=backward / 2, backward_dispatch=dispatch, weight_experts=weight / 2,
        layers=LAYERS,
    )  # fmt: skip
    stage = whole.share(placement.chunks_per_replica)
    stage = replace(stage, fused=braid_seconds(NO_LAYERS, stage.parts(Kind.BW))[1] if overlap else None)
    return Costs((stage,) * (placement.last_stage + 1))


def contenders_of(
    sleeper: TwoLanes, megatron: Megatron, names: list[str], costs: partial[Costs]
) -> list[tuple[Contender, Planned]]:
    """Everything that is compared, with what it was planned as; for the makespan."""
    ranks, microbatches = megatron.ranks, megatron.microbatches
    plain = Request("interleaved", ranks, microbatches, objective=Objective.MAKESPAN)
    found: list[tuple[Contender, Planned]] = []
    for overlap in (False, True):
        planned = replace(plain, costs=partial(costs, overlap=overlap), overlap=overlap).plan()
        found.append((Stock(2, megatron, planned.problem.costs, overlap), planned))
    if microbatches >= 2 * ranks:  # else torch has no DualPipeV
        order = Torch("DualPipeV", megatron.times, microbatches, sleeper).braided()
        published = Ours("dualpipe-v", megatron, costs=costs, overlap=True, schedule=order)
        published.name = "DualPipeV, published"
        found.append((published, published.planned))
    for name in names:
        ours = Ours(name, megatron, costs=costs, overlap=True)
        found.append((ours, ours.planned))
    return found


def makespan_bound(planned: Planned) -> float:
    """The bound of what is measured, from the first pass on any rank to the last."""
    return own_bound(planned.schedule, replace(planned.problem, objective=Objective.MAKESPAN, overlap=True))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ours", nargs="*", default=OURS, metavar="NAME[@MEMORY]", help="see Ours in contenders.py")
    parser.add_argument("--all-to-all", type=float, default=10.0, metavar="MS", help="of a rank's layers and a microbatch")
    add_flags(parser.add_argument, of="that a rank's share computes for a microbatch", rounds=3)
    options = parser.parse_args()

    sleeper = TwoLanes()
    _, megatron = start(options.microbatches, options.milliseconds, sleeper, LayeredStage)
    # megatron-core's combined order asks for these.
    setattr(gpt_model, "GPTModel", LayeredStage)  # noqa: B010 - by name, to mypy
    parallel_state.initialize_model_parallel(1, megatron.ranks, 2)
    costs = partial(costs_of, tuple(options.milliseconds), options.all_to_all)
    contenders = contenders_of(sleeper, megatron, options.ours, costs)
    found = in_rounds({one.name: partial(iteration, one, sleeper) for one, _ in contenders}, options.rounds)
    if torch.distributed.get_rank() == 0:
        print(megatron.title(options, f"each of four all-to-alls {options.all_to_all:g} ms"), end="\n\n")
        columns = ("schedule", "memory", "braids", "measured ms", "/ planned", "/ bound", "exposed", "speed-up")
        first, rows = statistics.median(found[contenders[0][0].name]), []
        for one, planned in contenders:
            measured, span = statistics.median(found[one.name]), planned.timeline.makespan
            exposed, whole = planned.communication
            numbers = [f"{planned.peak:g}", f"{planned.braids}", f"{1000 * measured:.0f}", f"{measured / span:.3f}"]
            numbers += [f"{measured / makespan_bound(planned):.3f}", f"{exposed / whole:.0%}", f"{first / measured:.2f}"]
            rows.append([one.name, *numbers])
        print(markdown(columns, rows))
    torch.distributed.barrier()  # the first rank prints, and its bounds take a while
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
