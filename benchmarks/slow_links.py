"""What does a slow link or a slow rank cost a schedule that was planned without it, and one that was planned for it?

Stages sleep (see ``sleep_stages.py``). Ranks take what those of a published measurement took; messages of ``--links`` are late in
both directions, by each of ``--delays`` in turn, and do not hold up what else ranks do (``--holds``). Run it with as many
processes as pipeline ranks:

    torchrun --nproc-per-node 4 benchmarks/slow_links.py --microbatches 12 --links 0-1 --delays 0 20 60 120

Every round runs one iteration of each schedule with each delay. Reported are medians over the rounds, the slope (milliseconds of
the iteration for each of the delay, from the first delay to the last), that of the simulation, and the microbatches' activations
that the fullest rank holds at most. ``--slower RANK TIMES`` has a rank that takes as many times as long with all delays but the
first. ``--picture FILE`` draws iterations against delays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import Contender, Megatron, iteration, start
from sleeping import SlowLinks

from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.link_costs import read
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate

# F, B and W of 4 ranks in ms, of wutianyuan1/PipeMorph, the artifact of "Attack of the Bubbles" (NSDI 2026).
PUBLISHED = (28, 36, 36, 33), (34, 45, 46, 38), (16, 23, 23, 20)
MEAN = (33.25, 40.75, 20.5)


def passes(milliseconds: list[float], placement: Placement) -> Costs:
    """Ranks that differ as the published ones do, and take so long on average; more than 4 repeat the two in the middle."""
    stages = [StageCosts(0, 0, 0)] * placement.depth
    for rank, mine in enumerate(placement.stages):
        like = 3 if rank == placement.ranks - 1 else 2 - rank % 2 if rank else 0
        rows = zip(PUBLISHED, milliseconds, strict=True)
        forward, backward, weight = (row[like] * mean / 1000 / statistics.mean(row) / len(mine) for row, mean in rows)
        share = StageCosts(forward, backward, weight, activation=1 / len(mine))
        for stage in mine:
            stages[stage] = share
    return Costs(tuple(stages))


def slowed(delay: float, options: Any, costs: Costs, placement: Placement) -> Costs:
    """Costs with messages that are late by milliseconds, and with a slow rank unless it is the first delay."""
    late = [read(name, costs.hop + delay / 1000) for name in options.links]
    stages = list(costs.stages)
    if options.slower and delay != options.delays[0]:
        rank, times = options.slower
        for stage in placement.stages[int(rank)]:
            seconds = {name: getattr(stages[stage], name) * times for name in ("forward", "backward", "weight")}
            stages[stage] = replace(stages[stage], **seconds)
    return replace(costs, stages=tuple(stages), links=tuple(link for both in late for link in both))


def runs_of(options: Any, megatron: Megatron) -> dict[tuple[str, float], Contender]:
    """Every schedule with every delay."""
    runs: dict[tuple[str, float], Contender] = {}
    for contender in (megatron.stock(1), *map(megatron.ours, options.ours)):
        name = contender.name.rstrip(", ")
        runs |= {(name, delay): contender for delay in options.delays}
    for name in options.planned:
        for delay in options.delays:
            aware = copy(megatron)
            aware.expected = partial(slowed, delay, options)
            runs[f"{name}, planned for it", delay] = aware.ours(name)
    return runs


def draw(rows: dict[str, list[float]], delays: list[float], title: str, path: str) -> None:
    """Draw milliseconds of iterations against delays, a line for each schedule."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.fonttype"] = "none"  # half the size
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, times in rows.items():
        axes.plot(delays, times, marker="o", label=name)
    axes.set(xlabel="delay of each message, ms", ylabel="iteration, ms", title=title, ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = command_line(__doc__)
    add: Callable[..., Any] = parser.add_argument
    add("--links", nargs="*", default=["0-1"], metavar="A-B")
    add("--delays", nargs="+", type=float, default=[0, 20, 60, 120], help="milliseconds of each message")
    add("--holds", choices=SlowLinks.HOLDS, default="sender", help="what a message on its way holds: see sleeping.py, SlowLinks")
    add("--slower", nargs=2, type=float, metavar=("RANK", "TIMES"))
    add("--ours", nargs="*", default=["zb-h1", "zb-v"], metavar="NAME[@MEMORY]", help="planned without delays")
    add("--planned", nargs="*", default=["zb-auto", "zb-auto@1.5", "zb-auto@2"], metavar="NAME[@MEMORY]", help="for each delay")
    add_flags(add, milliseconds=MEAN)
    add("--picture", metavar="FILE", help=".png or .svg")
    options = parser.parse_args()
    megatron = start(options)
    megatron.split = partial(passes, options.milliseconds), ""
    pairs = [tuple(map(int, name.split("-"))) for name in options.links]
    links, rank = SlowLinks(pairs, options.holds, megatron.sleeper), torch.distributed.get_rank()
    runs = runs_of(options, megatron)

    def run(contender: Contender, delay: float) -> float:
        links.delay = delay / 1000
        slow = options.slower and rank == options.slower[0] and delay != options.delays[0]
        megatron.sleeper.slower = options.slower[1] if slow else 1.0
        return iteration(contender, megatron.sleeper)

    found = in_rounds({key: partial(run, contender, key[1]) for key, contender in runs.items()}, options.rounds)
    if rank == 0:
        measured: dict[str, list[float]] = {name: [] for name, _ in runs}
        simulated: dict[str, list[float]] = {name: [] for name in measured}
        held = dict.fromkeys(measured, 0.0)
        for (name, delay), contender in runs.items():
            placement = contender.schedule.placement
            costs = slowed(delay, options, megatron.costs(placement), placement)
            measured[name].append(1000 * statistics.median(found[name, delay]))
            simulated[name].append(1000 * simulate(contender.schedule, costs).makespan)
            held[name] = max(held[name], *activation_peaks(contender.schedule, costs))
        rows = []
        for name, times in measured.items():
            slopes = ((each[-1] - each[0]) / (options.delays[-1] - options.delays[0] or 1) for each in (times, simulated[name]))
            over = max(time / plan for time, plan in zip(times, simulated[name], strict=True))
            rows.append(
                [name, *(f"{time:.0f}" for time in times), *(f"{each:.2f}" for each in (*slopes, over)), f"{held[name]:g}"]
            )
        heads = (*(f"{delay:g} ms" for delay in options.delays), "slope", "simulated", "most / simulated", "held")
        slow = f"rank {options.slower[0]:g} {options.slower[1]:g} times slower" if options.slower else "no rank slower"
        title = megatron.title(options, f"links {' '.join(options.links)}", f"holds {options.holds}", slow)
        print_table(title, ("schedule", *heads), rows, width=150)
        if options.picture:
            draw(measured, options.delays, f"{megatron.ranks} ranks, link {', '.join(options.links)}", options.picture)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
