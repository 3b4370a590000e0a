"""What does a plan for every batch gain where microbatches are of unequal lengths, and does an iteration ever wait for one?

Stages sleep by the lengths of their microbatches (see ``sleep_stages.py``), which are drawn from ``lengths.json``: sequences come
in the order drawn, and as many as fit go into a microbatch, or one that is longer. Run it with a process for every pipeline rank:

    torchrun --nproc-per-node 4 benchmarks/every_batch.py --lengths roll-outs --microbatches 8

Every round is another batch, which all schedules run in turn, in the same order. The mean microbatch of a batch takes F, B and W.
Reported are means over the rounds. ``--json FILE`` appends them as a line. Simulated are the passes with messages that take as
long as one between two processes that slept before; the bound is that of no message, for the placement.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import EveryBatchOurs, Microbatch, Ours, Stock, start
from sleep_stages import iteration
from sleeping import Sleeper

from megatron.pipeline.planning import loads_of
from megatron.pipeline.runtime.every_batch import EveryBatch
from megatron.pipeline.schedule.core.problem import Objective, Problem
from megatron.pipeline.schedule.optimum.bound import own_bound
from megatron.pipeline.schedule.time.simulate import simulate

LENGTHS = json.loads((Path(__file__).parent / "lengths.json").read_text(encoding="utf-8"))
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


def measured(contender: Stock | Ours | EveryBatchOurs, sleeper: Sleeper, batch: Iterator[Sequence[Microbatch]]) -> Measured:
    """One iteration on the next batch."""
    costs = replace(contender.costs, loads=tuple(microbatch.load for microbatch in next(batch)))
    seconds, schedule = iteration(contender, sleeper), contender.schedule
    problem = Problem(schedule.placement, schedule.microbatches, replace(costs, hop=0.0), objective=Objective.MAKESPAN)
    return Measured(seconds, simulate(schedule, costs).makespan, own_bound(schedule, problem))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--lengths", choices=LENGTHS, default="roll-outs", help="histogram of lengths.json")
    parser.add_argument("--tokens", type=int, default=8192, help="that fit into a microbatch")
    parser.add_argument("--longest", type=int, default=262144, help="sequences are cut to as many tokens")
    parser.add_argument("--attention", type=float, default=0.1, help="see planning.loads_of")
    parser.add_argument("--stock", nargs="*", type=int, default=(1, 2), metavar="CHUNKS", help="of megatron-core's schedules")
    parser.add_argument("--ours", nargs="*", default=("zb-auto", "zb-v"), metavar="NAME", help="planned once, then every batch")
    parser.add_argument("--only-every-batch", action="store_true", help="leave out those that are planned once")
    parser.add_argument("--json", metavar="FILE", help="append the means as a line of JSON")
    add_flags(parser.add_argument, milliseconds=(10, 12, 8), rounds=10)
    options = parser.parse_args()

    sleeper, megatron = start(options.microbatches, options.milliseconds)
    count = WARM_UP + options.rounds
    drawn = batches(options.lengths, options.microbatches, options.tokens, options.longest, options.attention)
    given = [next(drawn) for _ in range(count + 2)]  # two are read ahead
    settings = EveryBatch(options.attention, lengths_of=lambda microbatch: microbatch.lengths, interval=count)
    contenders: list[Stock | Ours | EveryBatchOurs] = [Stock(chunks, megatron) for chunks in options.stock]
    contenders += [] if options.only_every_batch else [Ours(name, megatron) for name in options.ours]
    contenders += [EveryBatchOurs(name, megatron, settings) for name in options.ours]
    runs = {}
    for contender in contenders:
        contender.data = [chain.from_iterable(given) for _ in contender.model]
        runs[contender.name] = partial(measured, contender, sleeper, iter(given))
    found = in_rounds(runs, options.rounds, WARM_UP)
    if torch.distributed.get_rank() == 0:
        first, rows, record = next(iter(found.values())), [], {}
        for contender in contenders:
            rounds = found[contender.name]
            seconds = statistics.mean(one.seconds for one in rounds)
            over = [statistics.mean(one.seconds / getattr(one, what) for one in rounds) for what in ("simulated", "bound")]
            gain = statistics.mean(one.seconds for one in first) / seconds
            counts = dict(contender.pipeline.batches.counts) if isinstance(contender, EveryBatchOurs) else {}  # type: ignore[union-attr]
            late = f"{counts.get('late', 0)} of {count}" if counts else ""
            record[contender.name] = {"ms": 1000 * seconds, "over": over, "gain": gain, "counts": counts}
            rows.append([contender.name, f"{1000 * seconds:.1f}", *(f"{one:.3f}" for one in (*over, gain)), late])
        columns = ("schedule", "mean ms", "over simulated", "over bound", f"speed-up over {contenders[0].name}", "late plans")
        print_table(megatron.title(options, options.lengths, "means"), columns, rows)
        if options.json:
            with open(options.json, "a", encoding="utf-8") as file:
                title = {"p": megatron.ranks, "m": options.microbatches, "lengths": options.lengths, "rounds": options.rounds}
                file.write(json.dumps(title | {"schedules": record}) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
