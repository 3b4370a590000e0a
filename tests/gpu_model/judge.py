"""Whether all ranks' devices end together: a judge over the traces of all ranks.

What every host enqueues is known, so each item of a trace has three times: the host gets to it (*issued*), the device begins it
(*begun*), it is over (*done*). Each follows from others by the rules of streams and of NCCL, whatever hosts and devices take:

- A host goes on from an item at once, but for a wait, whose moment must be done, and for the making of a communicator, which the
  hosts of all of its members must have got to. It may be so many kernels ahead of the device.
- An item begins when it was issued and what precedes it on its stream is done. With one hardware queue it also begins only after
  all that the host issued before it has begun (CUDA_DEVICE_MAX_CONNECTIONS=1).
- A kernel of NCCL's also begins after those before it on its communicator, and ends once its counterparts have begun: for a
  collective all members' of the same number, for the n-th send of a rank to another that one's n-th receive. NCCL may end a send
  of a short message earlier, which no program may rely on.

What cannot happen under these rules is a deadlock: a cycle among them, or a counterpart that never comes. The rules leave no
choice, so one replay decides it. Times are in kernels: each takes one unit, hosts and messages take none, so that a host leads by
as much as its waits allow.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from gpu_model.trace import At, Bytes, Create, Follow, HostWait, Item, Kernels, Mark, Post
from megatron.pipeline.planner.schedule.time.network import NEVER, Network

Traces: TypeAlias = Sequence[Sequence[Item]]

_ISSUED, _BEGUN, _DONE = range(3)
_STATES = ("", "to begin", "to end")
_ON_HOST = At | Create | HostWait | Bytes


def _event(at: int, state: int) -> int:
    """Of an item, counted over all ranks."""
    return NEVER + 1 + 3 * at + state


class Setting(NamedTuple):
    """What is not in the traces.

    Attributes:
        one_queue: all streams of a device issue in the host's order.
        eager: a single message runs on its group's communicator.
        launches: kernels that a host may be ahead; None for any number.
    """

    one_queue: bool = False
    eager: bool = False
    launches: int | None = 1024


SETTINGS = {
    "queues": Setting(),
    "one queue": Setting(one_queue=True),
    "eager": Setting(eager=True),
    "eager, one queue": Setting(one_queue=True, eager=True),
}


class Verdict(NamedTuple):
    """What was found.

    Attributes:
        deadlock: what waits for each other, one item a line; empty if everything ends. Otherwise the rest is empty.
        receives: per rank, how many receives have begun whose senders have not, from when on (in kernels).
        lead: per rank, the most operations that the host was ahead of the device.
        peak: per rank, the most bytes of the device that the host had taken, beyond those before.
        kernels: when the last rank was done.
    """

    deadlock: tuple[str, ...]
    receives: tuple[tuple[tuple[int, int], ...], ...] = ()
    lead: tuple[int, ...] = ()
    peak: tuple[int, ...] = ()
    kernels: int = 0


def judge(traces: Traces, setting: Setting = Setting()) -> Verdict:  # noqa: B008
    """Replay all ranks of a world, from the first use of its groups to the end.

    Args:
        traces: by global rank.
    """
    rules = _Rules(traces, setting)
    if stuck := rules.run():
        return Verdict(tuple(rules.cycle(stuck)))
    known = [int(time) for time in rules.times[_event(0, _ISSUED) :]]
    ranks = range(len(traces))
    return Verdict(
        (),
        tuple(_overlaps(rules.waiting_receives(rank, known)) for rank in ranks),
        tuple(max((many for _, many in _overlaps(rules.ahead(rank, known))), default=0) for rank in ranks),
        tuple(rules.peak(rank, known) for rank in ranks),
        max(known, default=0),
    )


class _Rules(Network):
    """What each time follows from. The times of item i, counted over all ranks, are three events."""

    def __init__(self, traces: Traces, setting: Setting) -> None:
        super().__init__()
        self._traces, self._setting = traces, setting
        self._first = [sum(map(len, traces[:rank])) for rank in range(len(traces))]
        self._items = [item for trace in traces for item in trace]
        self._rank = [rank for rank, trace in enumerate(traces) for _ in trace]
        self._label: list[str] = []
        self._missing: dict[int, str] = {}  # events that will never be, and why
        self._pairs: list[tuple[int, int]] = []  # items of a receive, and of its send
        for item in self._items:
            for state in (_ISSUED, _BEGUN, _DONE):
                self.add(seconds=item.many if isinstance(item, Kernels) and state == _DONE else 0)
        for rank, trace in enumerate(traces):
            self._host(self._first[rank], trace)
            self._device(self._first[rank], trace)
        self._counterparts()

    def _host(self, first: int, trace: Sequence[Item]) -> None:
        label, kernels = "", 0
        launched: deque[tuple[int, int]] = deque()  # how many kernels there are up to an item
        for at, item in enumerate(trace, first):
            label = item.label if isinstance(item, At) else label
            self._label.append(label)
            if at > first:
                held = isinstance(trace[at - first - 1], Create | HostWait)
                self._follow(at, _ISSUED, at - 1, _DONE if held else _ISSUED)
            if isinstance(item, Kernels | Post) and self._setting.launches is not None:
                kernels += item.many if isinstance(item, Kernels) else 1
                launched.append((kernels, at))
                while launched[0][0] <= kernels - self._setting.launches:
                    one = launched.popleft()[1]
                    self._follow(at, _ISSUED, one, _DONE if isinstance(self._items[one], Kernels) else _BEGUN)

    def _device(self, first: int, trace: Sequence[Item]) -> None:
        last: dict[object, int] = {}  # item of every stream and of every communicator
        before = None
        for at, item in enumerate(trace, first):
            self._follow(at, _BEGUN, at, _ISSUED)
            self._follow(at, _DONE, at, _BEGUN)
            if isinstance(item, HostWait):
                for end in [first + item.moment] if item.moment is not None else last.values():
                    self._follow(at, _DONE, end, _DONE)
            if isinstance(item, _ON_HOST):
                continue
            queues: list[object] = [item.stream]
            if isinstance(item, Post):
                queues.append(item.communicator(self._setting.eager))
            for queue in queues:
                if queue in last:
                    self._follow(at, _BEGUN, last[queue], _DONE)
            if isinstance(item, Follow):
                self._follow(at, _BEGUN, first + item.moment, _DONE)
            if before is not None and self._setting.one_queue:
                self._follow(at, _BEGUN, before, _BEGUN)
            before = at
            for queue in queues[1:] if isinstance(item, Post) and item.asynchronous else queues:
                last[queue] = at

    def _counterparts(self) -> None:
        """An end follows its counterparts' begin, and the making of a communicator that of all members."""
        for at, item in enumerate(self._items):
            if isinstance(item, Create) and not self._setting.eager:
                for other in item.ranks:
                    where = item.group, item.ranks
                    ends = self.ends((where, self._rank[at], "makes"), (where, other, "makes"))
                    ends.append((_event(at, _ISSUED), _event(at, _DONE), at))
            elif isinstance(item, Post):
                where = item.communicator(self._setting.eager)
                for what, peer in item.parts:
                    sides = ("all", "all") if peer is None else (what, "recv" if what == "send" else "send")
                    for member in item.ranks if peer is None else [peer]:
                        ends = self.ends((where, item.rank, sides[0]), (where, member, sides[1]))
                        ends.append((_event(at, _BEGUN), _event(at, _DONE), at))
        for (own, (where, rank, side)), ends in self.met.items():
            theirs = self.met.get(((where, rank, side), own), [])
            for (_, done, at), there in zip_longest(ends, theirs[: len(ends)]):
                if there is None:
                    self._missing[done] = f"rank {rank} never {'comes' if side == 'makes' else 'posts its part'}"
                    continue
                mine, its = self._items[at], self._items[there[2]]
                if isinstance(mine, Post) and isinstance(its, Post) and side == "all" and mine.what != its.what:
                    self._missing[done] = f"rank {rank} has {its.what} in its place ({its.place})"
                    self.follow(done, NEVER)
                if side == "send":
                    self._pairs.append((at, there[2]))

    def _follow(self, at: int, state: int, other: int, of: int) -> None:
        self.follow(_event(at, state), _event(other, of))

    def cycle(self, stuck: Sequence[int]) -> list[str]:
        """What waits for each other, from one that does."""
        nodes = [event - _event(0, _ISSUED) for event in stuck if event != NEVER]
        shown = [one for one in nodes if one % 3 != _ISSUED and isinstance(self._items[one // 3], Post | HostWait | Create)]
        return list(dict.fromkeys(map(self._describe, shown)))

    def _describe(self, node: int) -> str:
        at, state = divmod(node, 3)
        item, label = self._items[at], self._label[at]
        match item:
            case Post():
                ends = ", ".join(f"{what} {peer}" if peer is not None else what for what, peer in item.parts)
                group, ranks = item.communicator(self._setting.eager)
                what, where = f"{ends} on the communicator of ranks {list(ranks)} of group {group}", item.place
            case Create():
                what, where = f"the making of the communicator of ranks {list(item.ranks)} of group {item.group}", item.place
            case HostWait():
                what, where = "the host's wait", item.place
            case _:
                what, where = str(item), ""
        why = f": {self._missing[_event(at, state)]}" if _event(at, state) in self._missing else ""
        inside = f", in {label}" if label else ""
        return f"rank {self._rank[at]} waits for {what} {_STATES[state]} ({where}{inside}){why}"

    def waiting_receives(self, rank: int, times: Sequence[int]) -> list[tuple[int, int]]:
        """From when to when each waits for its send."""
        begun = [(times[3 * own + _BEGUN], times[3 * other + _BEGUN]) for own, other in self._pairs if self._rank[own] == rank]
        return [(start, end) for start, end in begun if start < end]

    def ahead(self, rank: int, times: Sequence[int]) -> list[tuple[int, int]]:
        """From when to when the host is behind each of its operations, and the device before its end."""
        first, trace = self._first[rank], self._traces[rank]
        spans, start, end = [], 0, 0
        for at, item in enumerate(trace, first):
            if isinstance(item, At):
                spans.append((start, end))
                start = end = times[3 * at + _ISSUED]
            elif isinstance(item, Kernels | Mark | Follow):
                end = max(end, times[3 * at + _DONE])
        return [(start, end) for start, end in [*spans, (start, end)] if start < end]

    def peak(self, rank: int, times: Sequence[int]) -> int:
        """What the allocator holds at most. It gives memory out again in the host's order, unless a stream may still use it."""
        first, held, most = self._first[rank], 0, 0
        kept: list[tuple[int, int]] = []  # until when, and how much
        for at, item in enumerate(self._traces[rank], first):
            if not isinstance(item, Bytes):
                continue
            now = times[3 * at + _ISSUED]
            while kept and kept[0][0] <= now:
                held -= heappop(kept)[1]
            if item.many < 0:
                heappush(kept, (max((times[3 * (first + moment) + _DONE] for moment in item.after), default=now), -item.many))
            else:
                held += item.many
                most = max(most, held)
        return most


def _overlaps(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """How many spans there are, from when on."""
    changes: defaultdict[int, int] = defaultdict(int)
    for start, end in spans:
        changes[start] += 1
        changes[end] -= 1
    many, found = 0, []
    for time in sorted(changes):
        many += changes[time]
        found.append((time, many))
    return tuple(found)
