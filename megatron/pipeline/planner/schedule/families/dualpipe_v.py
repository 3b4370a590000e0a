"""DualPipeV: a pipeline from both ends, whose two directions, the arms of a V, fill each other's gaps.

DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.2.1, and the README of DualPipe, which adds DualPipeV: one arm of a V is
one direction, so that the model is stored once. Here a rank computes one pass at a time: a forward and a backward that
overlap there follow each other here, which is F&B = F + B + W in the README's bubble.

F, B, W are a rank's whole share of a microbatch, p ranks. With equal stages and without hops, the bubble of the span, and of
the makespan, is

    (p-1)(F+B-W)/2    and at most the published (p-1)(F+2B-W)/2, for m >= 2p

The first form where W <= F = B, or more generally W <= B <= F <= B+W; the published bound where W <= B and F <= B+2W. A rank
holds at most 2p+1 half shares of a microbatch: the published memory, one more than 1F1B. Fewer microbatches, down to one, are
planned too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import wave
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families.family import Family


def plan(problem: Problem) -> Order:
    """Every microbatch goes down one arm of the V and up the other."""
    return tuple(tuple(_eight_steps(problem.ranks, rank, problem.microbatches)) for rank in range(problem.ranks))


def _eight_steps(ranks: int, rank: int, microbatches: int) -> Iterator[Pass]:
    """One rank's order, with the direction that starts at its end of the pipeline as chunk 0, the other as chunk 1.

    The steps need 2p microbatches in each direction. If there are fewer, the first ones are left out, which keeps the split
    backwards at the end. Passes need only passes of the same microbatch, so the order stays valid.
    """
    outside, inside = rank + 1, ranks - rank - 1
    whole = max(microbatches, 2 * ranks)
    draining = outside * ["1", "0"]
    steps = (
        2 * inside * ["F0"],
        outside * ["F0", "F1"],
        inside * ["B1", "W", "F1"],
        (whole - 2 * ranks + outside) * ["F0", "BW1", "F1", "BW0"],
        inside * ["BW1", "F1", "BW0"],
        [f"BW{chunk}" for chunk in draining[:outside]] + [f"B{chunk}" for chunk in draining[outside:]],
        inside * ["W", "B0"],
        outside * ["W"],
    )
    done: Counter[str] = Counter()
    due: deque[Pass] = deque()
    for work in (work for step in steps for work in step):
        if work == "W":
            following = due.popleft()
        else:
            kind, chunk = Kind(work[:-1]), int(work[-1])
            direction = f"{work[0]}{chunk}"
            following = Pass(kind, done[direction] - whole + microbatches, chunk)
            done[direction] += 1
            if kind is Kind.B:
                due.append(following._replace(kind=Kind.W))
        if following.microbatch >= 0:
            yield following


FAMILY = Family("dualpipe-v", wave, plan, chunks=2)
