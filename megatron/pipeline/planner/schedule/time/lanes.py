"""Copies that slow each other down: the two directions of a rank, and the ranks behind one switch.

The copies under way share the speed that ``CopyCosts`` gives. The share of each changes whenever one starts or ends.
"""

from __future__ import annotations

from megatron.pipeline.planner.schedule.core.costs import CopyCosts


class Switch:
    """The copies under way between the devices and host memory behind one switch, and how fast each is.

    Rows are two for every rank, to the host and to the device, from ``first`` on.
    """

    def __init__(self, costs: CopyCosts, first: int) -> None:
        self._costs, self._first = costs, first
        self._now = 0.0
        self._left: dict[int, float] = {}  # by lane, counted from the first: seconds of its copy if it were alone
        self._speeds: dict[int, float] = {}  # 1 for a copy that is alone

    def change(self, now: float, row: int, seconds: float | None) -> dict[int, float]:
        """A row starts a copy of ``seconds`` if alone, or ends it (None); returns when those under way end if nothing changes."""
        for lane, speed in self._speeds.items():
            self._left[lane] = max(0.0, self._left[lane] - (now - self._now) * speed)
        self._now = now
        if seconds is None:
            del self._left[row - self._first]
        else:
            self._left[row - self._first] = seconds
        busy = [sum(lane % 2 == direction for lane in self._left) for direction in (0, 1)]
        self._speeds = {
            lane: min(1.0, self._costs.shared * self._costs.switch / busy[lane % 2])
            * (self._costs.both if lane ^ 1 in self._left else 1.0)
            for lane in self._left
        }
        return {self._first + lane: now + left / self._speeds[lane] for lane, left in self._left.items()}


def switches(ranks: int, costs: CopyCosts) -> dict[int, Switch]:
    """The switch of every row of copies; those rows follow the ones of the ranks."""
    firsts = [ranks + lane // (2 * costs.switch) * 2 * costs.switch for lane in range(2 * ranks)]
    by_first = {first: Switch(costs, first) for first in firsts}
    return {ranks + lane: by_first[first] for lane, first in enumerate(firsts)}
