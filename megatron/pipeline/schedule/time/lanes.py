"""Copies to host memory and back as rows of their own: what a rank's two copy lanes do beside its passes.

A copy to the host starts once its F has ended and the ones before it have, a copy to the device once its place in the rank's row
has been reached and the ones before it have ended. Where copies disturb each other (the directions of one rank, the ranks behind
one switch), all that are on the way go on at the speeds that ``CopyCosts`` says, which change whenever one starts or ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.schedule.core.costs import CopyCosts


def on_the_way(queues: Sequence[Sequence[tuple[float, float]]], costs: CopyCosts) -> list[list[tuple[float, float]]]:
    """When copies start and end that disturb each other.

    Args:
        queues: two for every rank, to the host and to the device; in each, (from when it may start, seconds alone on the way).

    Returns:
        For each of them (start, end).
    """
    found: list[list[tuple[float, float]]] = [[] for _ in queues]
    for first in range(0, len(queues), 2 * costs.switch):
        _behind_one_switch(queues[first : first + 2 * costs.switch], costs, found[first : first + 2 * costs.switch])
    return found


def _behind_one_switch(
    queues: Sequence[Sequence[tuple[float, float]]], costs: CopyCosts, found: Sequence[list[tuple[float, float]]]
) -> None:
    now = 0.0
    under_way: dict[int, tuple[float, float]] = {}  # by queue: start, seconds left of it alone on the way
    while True:
        waiting = []
        for lane, queue in enumerate(queues):
            if lane not in under_way and len(found[lane]) < len(queue):
                ready, seconds = queue[len(found[lane])]
                if ready <= now:
                    under_way[lane] = now, seconds
                else:
                    waiting.append(ready)
        if not under_way and not waiting:
            return
        busy = [sum(lane % 2 == direction for lane in under_way) for direction in (0, 1)]
        speeds = {
            lane: min(1.0, costs.shared * costs.switch / busy[lane % 2]) * (costs.both if lane ^ 1 in under_way else 1.0)
            for lane in under_way
        }
        ends = {lane: now + left / speeds[lane] for lane, (_, left) in under_way.items()}
        later = min((*ends.values(), *waiting))
        for lane, (start, left) in list(under_way.items()):
            if ends[lane] <= later:
                found[lane].append((start, later))
                del under_way[lane]
            else:
                under_way[lane] = start, left - (later - now) * speeds[lane]
        now = later
