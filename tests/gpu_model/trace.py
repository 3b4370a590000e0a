"""What one rank's host hands to its device and waits for, in the host's order: the material of ``judge.py``.

Tensors and times are left out. An item that others name is named by its place in the trace, its *moment*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

NEVER = -1  # the moment of what happened while nothing was recorded: nothing waits for it


class At(NamedTuple):
    """The host begins an operation of its program."""

    label: str


class Kernels(NamedTuple):
    """Kernels and copies, one after another on a stream."""

    stream: str
    many: int


class Mark(NamedTuple):
    """An event is recorded on a stream."""

    stream: str


class Follow(NamedTuple):
    """What a stream is given from here on comes after a moment."""

    stream: str
    moment: int


class Part(NamedTuple):
    """What one rank does in a kernel of NCCL's.

    Attributes:
        what: "send", "recv", or the name of a collective.
        peer: the other end's global rank; None for a collective.
    """

    what: str
    peer: int | None = None


class Create(NamedTuple):
    """A communicator is made where it is first used: the host waits for the hosts of all of its members.

    Attributes:
        group, ranks: its process group, and the global ranks in it: all of the group's, or a pair.
        place: in the product.
    """

    group: str
    ranks: tuple[int, ...]
    place: str


class Post(NamedTuple):
    """A kernel of NCCL's, behind what a stream has been given.

    Attributes:
        stream: that was current.
        asynchronous: it runs on its communicator's stream, not on the current one.
        group, ranks: its process group, and the global ranks in it.
        rank: this one.
        parts: several messages if they are batched.
        alone: a single message, which has a communicator of its pair where a group makes one.
        place: in the product.
    """

    stream: str
    asynchronous: bool
    group: str
    ranks: tuple[int, ...]
    rank: int
    parts: tuple[Part, ...]
    alone: bool
    place: str

    @property
    def what(self) -> str:
        return ", ".join(part.what for part in self.parts)

    def communicator(self, eager: bool) -> tuple[str, tuple[int, ...]]:
        """The group's, and the ranks in it.

        Args:
            eager: a group has only one.
        """
        if eager or not self.alone:
            return self.group, self.ranks
        [part] = self.parts
        assert part.peer is not None
        return self.group, tuple(sorted((self.rank, part.peer)))


class Bytes(NamedTuple):
    """Memory of the device that the host takes, or gives back.

    Attributes:
        many: how much; what is given back is negative.
        after: moments until which the allocator keeps what is given back: of streams that it was recorded on.
    """

    many: int
    after: tuple[int, ...] = ()


class HostWait(NamedTuple):
    """The host waits for a moment; for None, for all that the device has been given."""

    moment: int | None
    place: str


Item: TypeAlias = At | Kernels | Mark | Follow | Create | Post | HostWait | Bytes


class Trace:
    """Of one rank, while it is ``recording``."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._on = self._memory = False
        self._posted: dict[str, int] = {}  # the last on each communicator's stream
        self._asked = NEVER  # the work that was asked last whether it is over, and was not

    @contextmanager
    def recording(self, memory: bool = False) -> Iterator[list[Item]]:
        """What is recorded in here; nothing else is.

        Args:
            memory: also every change of it, which makes the trace many times as long.
        """
        self.items, self._on, self._memory = [], True, memory
        self._posted.clear()
        try:
            yield self.items
        finally:
            self._on = self._memory = False

    def add(self, item: Item) -> int:
        """Returns its moment."""
        if not self._on:
            return NEVER
        self._asked = NEVER
        self.items.append(item)
        return len(self.items) - 1

    def post(self, post: Post, stream: str) -> int:
        """A kernel of NCCL's, and the stream that it runs on here."""
        self._posted[stream] = self.add(post)
        return self._posted[stream]

    def takes(self, many: int) -> None:
        if self._memory and many:
            self.items.append(Bytes(many))

    def gives(self, many: int, streams: Iterable[str]) -> None:
        """Give memory back that was recorded on some streams."""
        if self._memory and many:
            asked = self._asked
            # What a communicator's stream was given last is the last that was posted.
            after = tuple(self._posted[one] if one in self._posted else self.add(Mark(one)) for one in streams)
            self.items.append(Bytes(-many, tuple(moment for moment in after if moment != NEVER)))
            self._asked = asked

    def kernel(self, stream: str) -> None:
        """Another one; those that nothing separates are counted."""
        last = self.items[-1] if self._on and self.items else None
        if isinstance(last, Kernels) and last.stream == stream:
            self.items[-1], self._asked = Kernels(stream, last.many + 1), NEVER
        else:
            self.add(Kernels(stream, 1))

    def follow(self, stream: str, moment: int) -> None:
        if moment != NEVER:
            self.add(Follow(stream, moment))

    def host_waits(self, moment: int | None, place: str) -> None:
        if moment != NEVER:
            self.add(HostWait(moment, place))

    def ask(self, moment: int, over: bool, place: str) -> None:
        """The host asks whether work is over. If it asks the same again at once, it waits."""
        if over and moment == self._asked:
            self.host_waits(moment, place)
        elif self._on:
            self._asked = NEVER if over else moment
