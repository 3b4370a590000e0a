"""What is known to come before what: vector clocks of the host and of every stream.

A kernel that the host launches on a stream comes after all that was launched there, and after all that the host has waited for.
A stream that waits for an event comes after what the event was recorded behind. Nothing else is ordered, whatever the clock says.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

HOST = "host"

Clock = dict[str, int]


class At(NamedTuple):
    """The place of one piece of work: the ``number``-th of a stream, or of the host."""

    timeline: str
    number: int


class Order:
    """The clocks of one rank: of its host thread and its device's streams, by name."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)

    def launch(self, timeline: str) -> At:
        """The next piece of work of a stream, launched by the host now; or of the host itself."""
        clock = self._clocks[timeline]
        if timeline != HOST:
            join(clock, self._clocks[HOST])
        clock[timeline] = clock.get(timeline, 0) + 1
        return At(timeline, clock[timeline])

    def record(self, timeline: str) -> Clock:
        """An event behind all that a stream has been given so far."""
        return dict(self._clocks[timeline])

    def wait(self, timeline: str, event: Clock) -> None:
        """What a stream is given from now on, or what the host does, comes after an event."""
        join(self._clocks[timeline], event)

    def wait_for_all(self) -> None:
        """The host waits for every stream."""
        for clock in list(self._clocks.values()):
            join(self._clocks[HOST], clock)

    def comes_before(self, work: At, timeline: str) -> bool:
        """Whether work is over before anything that a timeline does from now on."""
        return work.number <= self._clocks[timeline].get(work.timeline, 0)


def join(clock: Clock, other: Clock) -> None:
    """Have a clock be behind another, too."""
    for timeline, count in other.items():
        if clock.get(timeline, 0) < count:
            clock[timeline] = count
