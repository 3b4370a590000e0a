"""DualPipe and DualPipeV: a pipeline from both ends, whose two directions fill each other's gaps.

DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.2.1, and the README of DualPipe, which adds DualPipeV: one arm of a V is
one direction, so that the model is stored once. Here a rank computes one pass at a time: a forward and a backward that
overlap there follow each other here, which is F&B = F + B + W in the README's bubble.

F, B, W are a rank's whole share of a microbatch, p ranks. With equal stages and without hops, the bubble of the span, and of
the makespan, is

    dualpipe-v   (p-1)(F+B-W)/2    and at most the published (p-1)(F+2B-W)/2, for m >= 2p
    dualpipe     (p-2)(F+B-W)/2    and at most the published (p-2)(F+2B-W)/2, for even m >= 2p

The first form where W <= F = B, or more generally W <= B <= F <= B+W; the published bound where W <= B and F <= B+2W. An odd m
costs ``dualpipe`` more, since one direction idles while the other runs its last microbatch. A rank holds at most 2p+1 half
shares of a microbatch in ``dualpipe-v``, and p+1 whole ones in ``dualpipe``: the published memory, one more than 1F1B.
Fewer microbatches, down to one, are planned too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from megatron.pipeline.planner.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.planner.schedule.core.placement import bidirectional, wave
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.families.family import Family


def plan_v(problem: Problem) -> Order:
    """DualPipeV: the two directions are the arms of a V; every microbatch goes down one and up the other."""
    ranks, microbatches = problem.ranks, problem.microbatches
    return tuple(tuple(_eight_steps(ranks, rank, (microbatches, microbatches))) for rank in range(ranks))


def plan(problem: Problem) -> Order:
    """DualPipe: the model is stored twice, and every other microbatch goes through it from the other end."""
    ranks, counts = problem.ranks, ((problem.microbatches + 1) // 2, problem.microbatches // 2)
    rows = []
    for rank in range(ranks):
        near = int(rank >= ranks // 2)  # the chunk, and the direction, that starts at the nearer end
        row = _eight_steps(ranks // 2, ranks - 1 - rank if near else rank, (counts[near], counts[1 - near]))
        rows.append(tuple(Pass(kind, 2 * number + (chunk ^ near), chunk ^ near) for kind, number, chunk in row))
    return tuple(rows)


def _eight_steps(ranks: int, rank: int, counts: tuple[int, int]) -> Iterator[Pass]:
    """One rank's order, with the direction that starts at its end of the pipeline as chunk 0, the other as chunk 1.

    The steps need 2p microbatches in each direction. If there are fewer, the first ones are left out, which keeps the split
    backwards at the end. Passes need only passes of the same microbatch, so the order stays valid.

    Args:
        ranks: p, from one end of the pipeline to its middle.
        rank: counted from that end.
        counts: of the microbatches that go through each chunk.
    """
    outside, inside = rank + 1, ranks - rank - 1
    whole = max(*counts, 2 * ranks)
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
            following = Pass(kind, done[direction] - whole + counts[chunk], chunk)
            done[direction] += 1
            if kind is Kind.B:
                due.append(following._replace(kind=Kind.W))
        if following.microbatch >= 0:
            yield following


FAMILY_V = Family("dualpipe-v", wave, plan_v, chunks=2)
FAMILY = Family("dualpipe", lambda ranks, chunks: bidirectional(ranks), plan, chunks=2, least_ranks=2, even_ranks=True)
