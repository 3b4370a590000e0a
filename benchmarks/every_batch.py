"""What does a plan for every batch gain where microbatches are of unequal lengths, and does an iteration ever wait for one?

Stages sleep by the lengths of their microbatches (see ``sleep_stages.py``), which are drawn from ``lengths.json``: sequences come
in the order drawn, and as many as fit go into a microbatch, or one that is longer. Run it with a process for every pipeline rank:

    torchrun --nproc-per-node 4 benchmarks/every_batch.py --lengths roll-outs --microbatches 8

Every round is another batch, which all schedules run in turn; its mean microbatch takes F, B and W. Reported are means of rounds,
beside passes simulated with messages that take as long as one between two processes that slept before, and the bound of none.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import Contender, Microbatch, iteration, start
from sleeping import Sleeper

from megatron.pipeline.planner.planning import loads_of
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.optimum.bound import own_bound
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.runtime.every_batch import EveryBatch

LENGTHS = json.loads((Path(__file__).parent / "lengths.json").read_text(encoding="utf-8"))
ATTENTION = 0.1  # see planning.loads_of
LONGEST = 262144  # tokens of a sequence
WARM_UP = 4  # rounds: connections, and the first plans, which start a process


class Measured(NamedTuple):
    """An iteration: its seconds, those simulated, and those of the lower bound."""

    seconds: float
    simulated: float
    bound: float


def batches(name: str, microbatches: int, tokens: int, longest: int, attention: float) -> Iterator[list[Microbatch]]:
    """Batches of sequences that follow a histogram, without end; the same on every rank.

    Args:
        tokens: that fit into a microbatch.
        longest: sequences are cut to as many tokens.
    """
    draw, histogram = random.Random(name), LENGTHS[name]
    bins = list(zip((1, *histogram["up_to"]), histogram["up_to"], strict=False))

    def length() -> int:
        [(low, high)] = draw.choices(bins, histogram["share"])
        return min(longest, round(math.exp(draw.uniform(math.log(low), math.log(high)))))

    following = length()
    while True:
        packed: list[list[int]] = []
        for _ in range(microbatches):
            packed.append([following])
            while sum(packed[-1]) + (following := length()) <= tokens:
                packed[-1].append(following)
        loads = loads_of(packed, attention=attention)
        yield [Microbatch(*both) for both in zip(packed, loads, strict=True)]


def measured(contender: Contender, sleeper: Sleeper, batch: Iterator[Sequence[Microbatch]]) -> Measured:
    """One iteration on the next batch."""
    costs = replace(contender.costs, loads=tuple(microbatch.load for microbatch in next(batch)))
    seconds, ran = iteration(contender, sleeper), contender.pipeline and contender.pipeline._iteration
    schedule = ran.plan.schedule if ran else contender.schedule
    problem = Problem(schedule.placement, schedule.microbatches, replace(costs, hop=0.0), objective=Objective.MAKESPAN)
    return Measured(seconds, simulate(schedule, costs).makespan, own_bound(schedule, problem))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--lengths", choices=LENGTHS, default="roll-outs", help="histogram of lengths.json")
    parser.add_argument("--tokens", type=int, default=8192, help="that fit into a microbatch")
    parser.add_argument("--stock", nargs="*", type=int, default=(1, 2), metavar="CHUNKS", help="of megatron-core's schedules")
    parser.add_argument("--ours", nargs="*", default=("zb-auto", "zb-v"), metavar="NAME", help="planned once, then every batch")
    parser.add_argument("--only-every-batch", action="store_true", help="leave out those that are planned once")
    add_flags(parser.add_argument, milliseconds=(10, 12, 8), rounds=10)
    options = parser.parse_args()

    megatron = start(options)
    count = WARM_UP + options.rounds
    drawn = batches(options.lengths, options.microbatches, options.tokens, LONGEST, ATTENTION)
    given = [next(drawn) for _ in range(count + 2)]  # two are read ahead
    settings = EveryBatch(ATTENTION, lengths_of=lambda microbatch: microbatch.lengths, interval=count)
    contenders = [megatron.stock(chunks, given) for chunks in options.stock]
    contenders += [] if options.only_every_batch else [megatron.ours(name, given) for name in options.ours]
    contenders += [megatron.ours(name, given, settings) for name in options.ours]
    runs = {one.name: partial(measured, one, megatron.sleeper, iter(given)) for one in contenders}
    found = in_rounds(runs, options.rounds, WARM_UP)
    if torch.distributed.get_rank() == 0:
        first, rows = next(iter(found.values())), []
        for contender in contenders:
            rounds = found[contender.name]
            seconds = statistics.mean(one.seconds for one in rounds)
            over = [statistics.mean(one.seconds / getattr(one, what) for one in rounds) for what in ("simulated", "bound")]
            gain = statistics.mean(one.seconds for one in first) / seconds
            counts = dict(plans.counts) if (plans := contender.pipeline and contender.pipeline.batches) else {}
            late = f"{counts.get('late', 0)} of {count}" if counts else ""
            rows.append([contender.name, f"{1000 * seconds:.1f}", *(f"{one:.3f}" for one in (*over, gain)), late])
        columns = ("schedule", "mean ms", "over simulated", "over bound", f"speed-up over {contenders[0].name}", "late plans")
        print_table(megatron.title(options, options.lengths, "means"), columns, rows)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
