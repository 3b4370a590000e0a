"""A network of events on several ranks: each happens once those that it follows have.

Nothing is left to choose, so one replay says when each happens, and which never do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from itertools import chain, zip_longest
from typing import Any, TypeAlias

START, NEVER = 0, 1  # the events that every network has
_UNKNOWN, _ASKED = -2.0, -1.0  # the time of an event before the replay comes to it, and while it replays what the event follows

Meeting: TypeAlias = tuple[int, int, Any]


class Network:
    """Events by number. Each follows one of its own order, such as that of a rank, and one of another: ``START`` where it need
    not.

    Attributes:
        own, other: by event, the events that it follows.
        seconds: by event, how long after the later of the two it happens.
        times: by event, when it happens; only after ``run``.
        met: by two sides, the ends of the first: see ``ends``.
    """

    def __init__(self) -> None:
        self.own, self.other, self.seconds = [START, START], [START, START], [0.0, 0.0]
        self.times: list[float] = []
        self.met: dict[tuple[Any, Any], list[Meeting]] = {}
        self._parts: dict[int, int] = {}  # by event that only stands for what another follows, that one

    def add(self, own: int = START, other: int = START, seconds: float = 0) -> int:
        """Number of a new event."""
        self.own.append(own)
        self.other.append(other)
        self.seconds.append(seconds)
        return len(self.own) - 1

    def follow(self, event: int, other: int) -> None:
        """Have an event follow another one, too."""
        if self.own[event] == START:
            self.own[event] = other
        else:
            if self.other[event] != START:
                self.own[event] = part = self.add(self.own[event], self.other[event])
                self._parts[part] = event
            self.other[event] = other

    def ends(self, own: Hashable, other: Hashable) -> list[Meeting]:
        """Ends of what two sides do together, such as messages: those of a side for another, in order.

        Each is (begun, done, which end it is). The n-th of them meets the n-th of the other side for this one, as NCCL's do,
        which has no tags: ``done``, if it is no ``START``, follows that one's ``begun``, and never happens where there is none.
        """
        ends = self.met.get((own, other))
        if ends is None:
            ends = self.met[own, other] = []
        return ends

    def pairs(self) -> Iterator[tuple[Meeting, Meeting | None]]:
        """Every end with the one that it meets, if there is one."""
        for (own, other), ends in self.met.items():
            yield from zip_longest(ends, self.met.get((other, own), [])[: len(ends)])

    def run(self, first: Iterable[int] = ()) -> list[int]:
        """Replay all events; once, when they and their ends are complete, or again.

        Args:
            first: events to ask for first: where something never happens, the path begins there.

        Returns:
            Nothing if all of them happen. Otherwise events that never do, each of which follows the next: the last one follows
            the first, or is ``NEVER``.
        """
        owns, others, seconds = self.own, self.other, self.seconds
        if not self.times:
            for (_, done, _), theirs in self.pairs():
                begun = theirs[0] if theirs else NEVER
                if done and not others[done]:
                    others[done] = begun
                elif done:
                    self.follow(done, begun)
        times: list[float] = [_UNKNOWN] * len(owns)
        self.times = times
        times[START] = 0
        path: list[int] = []
        for wanted in chain(first, range(NEVER + 1, len(owns))):
            if times[wanted] == _UNKNOWN:
                path.append(wanted)
            while path:
                event = path[-1]
                following = owns[event]
                latest = times[following]
                if latest >= 0:
                    following = others[event]
                    time = times[following]
                    if time >= 0:
                        times[event] = (latest if latest > time else time) + seconds[event]
                        path.pop()
                        continue
                times[event] = _ASKED
                path.append(following)
                if following == NEVER:
                    return self._whole(path)
                if times[following] == _ASKED:
                    return self._whole(path[path.index(following) : -1])
        return []

    def _whole(self, path: list[int]) -> list[int]:
        """The events of a path, without those that are only parts."""
        return list(dict.fromkeys(self._parts.get(event, event) for event in path))
