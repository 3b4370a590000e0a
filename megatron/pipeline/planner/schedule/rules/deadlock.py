"""Traffic over a transport: the one proof that ranks do not wait for each other, and what it costs that messages stand in line.

All orders are given: of steps on a rank, of posts in a line, and of messages between two ranks. So whether everything ends does
not depend on times, and it is stuck exactly where what has not happened waits for each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.core.schedule import ScheduleError
from megatron.pipeline.planner.schedule.lower.program import (
    Collective,
    Compute,
    Copy,
    Join,
    Message,
    Receive,
    Send,
    Validate,
    Wait,
    describe,
)
from megatron.pipeline.planner.schedule.lower.traffic import Step, Sync, Traffic
from megatron.pipeline.planner.schedule.rules.transports import TransportModel
from megatron.pipeline.planner.schedule.time.network import NEVER, START, Network

End: TypeAlias = tuple[int, int, bool]  # one end of a message: the rank, the place in its row, whether its host connects for it


@dataclass(frozen=True)
class Blocked:
    """Operation that a rank is stuck in; it waits for the next of a hang, or for what is never posted.

    Attributes:
        rank, place: the step of the rank's row.
        what: in words.
        after, before: the last pass that the rank computes before it, and the first one after it.
        end: the post that it is about, if any.
        row: ``row`` if the rank's compute stream waits, ``line`` if the stream of a communicator does, ``host`` if its host does.
    """

    rank: int
    place: int
    what: str
    after: Pass | None
    before: Pass | None
    end: End | None
    row: str

    def __str__(self) -> str:
        where = f"after {self.after}" if self.after else f"before {self.before}" if self.before else "at its end"
        return f"rank {self.rank}, {where}: {self.what}"

    def fields(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "operation": self.what,
            "after": self.after and str(self.after),
            "before": self.before and str(self.before),
        }


@dataclass(frozen=True)
class Hang:
    """Each waits for the next, and the last for the first.

    Attributes:
        missing: the last waits for what no rank ever posts, so that this is a chain and no circle.
    """

    chain: tuple[Blocked, ...]
    missing: bool


def nothing_deadlocks(traffic: Traffic, transport: TransportModel) -> None:
    """All rows end over a transport, and every rank receives from another in the order in which that sends.

    Raises:
        ScheduleError: ranks disagree on the order, or wait for each other; the message names them and what each waits in.
    """
    network = TrafficNetwork(traffic, transport)
    for swapped in network.swapped():
        raise ScheduleError(f"{swapped}; both must use the same order")
    if hang := network.hang():
        places = "; ".join(f"rank {blocked.rank} in {blocked.what}" for blocked in hang.chain)
        raise ScheduleError(f"deadlock over {transport.name} ({transport.meaning}): {places}")


class TrafficNetwork(Network):
    """Traffic over a transport.

    Attributes:
        passes: the ends of passes; only where there are costs.
        stuck: events that never happen, as ``run`` says; empty if everything ends.
    """

    def __init__(
        self, traffic: Traffic, transport: TransportModel | None, costs: Costs | None = None, cold: bool = False
    ) -> None:
        """
        Args:
            transport: None for one without lines: a message travels as soon as it is sent, or as costs say that links are free
                again, and a receive holds up nothing.
            costs: without them nothing takes time.
            cold: whether hosts connect before the first messages.
        """
        super().__init__()
        self.traffic, self._blocks = traffic, transport is not None and transport.line is None
        self._costs = cutting.sliced(costs, traffic.splits) if costs else None
        self.passes: list[int] = []
        self._row_ends: list[int] = []
        self._waits: dict[int, End] = {}  # events at which a row has waited, and where it stands
        self._joined: dict[Collective, list[int]] = {}  # see ``_gathering``
        for rank in range(traffic.ranks):
            lines = _Lines(self, transport, rank, cold) if transport and transport.line else None
            self._add_row(rank, lines)
        for event, *ranks in self._joined.values():
            if len(ranks) < traffic.ranks:
                self.follow(event, NEVER)
        self.stuck = self.run() and self.run(self._row_ends)

    @property
    def makespan(self) -> float:
        """From the start to the end of the last pass."""
        return max((self.times[event] for event in self.passes), default=0.0)

    def _add_row(self, rank: int, lines: _Lines | None) -> None:
        """Add what a rank's compute stream runs."""
        now, over, blocks = self.add(), lines.over if lines else {}, self._blocks
        rest: dict[Pass, float] = {}  # seconds of a braid, after its forward
        links: dict[int, int] = {}  # by receiver, the event at which the link is free again
        # Steps that add nothing. What a blocking rank waits for, it has waited for where it posted it.
        nothing: set[type] = set() if lines else {Copy, Validate, Wait if blocks else Copy, Copy if self._costs else Compute}
        step: Any  # isinstance is too slow here
        for place, step in enumerate(self.traffic.rows[rank]):
            kind = type(step)
            if kind in nothing:
                continue
            if lines and lines.posted:
                now = lines.start_before(step, now)
            if kind is Send or kind is Receive:
                if lines:
                    lines.posted.append(place)
                    continue
                sends = kind is Send
                ends = self.ends(rank, ~step.peer) if sends else self.ends(~rank, step.peer)
                hop = 0.0 if sends and not blocks else self.hop(rank, step)
                done = START if sends and not blocks else self.add(now if blocks else START, START, hop)
                begun = self._enter(links, rank, step, now) if sends and not blocks and self._costs else now
                ends.append((begun, done, (rank, place, False)))
                if blocks:
                    now = done
                else:
                    over[step.message] = done
            elif kind is Compute and self._costs:
                now = self.add(now, seconds=self._seconds(rank, step, rest))
                self.passes.append(now)
            elif kind is Join:
                joined = self._gathering(step.collective)
                joined.append(rank)
                self.follow(joined[0], now)
                now = self._wait(now, joined[0], rank, place) if blocks else now
            elif kind is Wait and type(item := step.message) is not Pass:
                needed = self._gathering(item)[0] if type(item) is Collective else over.get(item, NEVER)
                now = self._wait(now, needed, rank, place)
            elif kind is Sync and lines:
                lines.host = self.add(lines.host, now)
        if lines:
            now = lines.start(now)
        self._row_ends.append(now)

    def _enter(self, links: dict[int, int], rank: int, step: Send, now: int) -> int:
        """The event at which a message has its turn on its link."""
        assert self._costs
        seconds = self._costs.of(step.message.microbatch).in_line.get((rank, step.peer))
        if not seconds:
            return now
        turn = self.add(now, links.get(step.peer, START))
        links[step.peer] = self.add(turn, START, seconds)
        return turn

    def hop(self, rank: int, step: Send | Receive) -> float:
        """Seconds of a message that a rank sends or receives."""
        ends = (rank, step.peer) if type(step) is Send else (step.peer, rank)
        return self._costs.of(step.message.microbatch).message(*ends) if self._costs else 0.0

    def _gathering(self, collective: Collective) -> list[int]:
        """The event that all ranks have joined a collective, and those that have."""
        if collective not in self._joined:
            self._joined[collective] = [self.add(seconds=self._costs.of(collective.microbatch).exchange if self._costs else 0.0)]
        return self._joined[collective]

    def _wait(self, now: int, needed: int, rank: int, place: int) -> int:
        event = self.add(now, needed)
        self._waits[event] = (rank, place, False)
        return event

    def _seconds(self, rank: int, step: Compute, rest: dict[Pass, float]) -> float:
        assert self._costs
        (work, backward), placement = step, self.traffic.placement
        stage = placement.stage(rank, work.chunk)
        if backward is None:
            return rest.pop(work) if work in rest else self._costs.of(work.microbatch).seconds(work.kind, stage)
        other, numbers = placement.stage(rank, backward.chunk), (work.microbatch, backward.microbatch)
        seconds, rest[backward] = self._costs.braid(stage, backward.kind, other, numbers)
        return seconds

    def swapped(self) -> Iterator[str]:
        """The first message of each two ranks and direction that is taken for another: after it, the others are wrong as well."""
        rows: Any = self.traffic.rows
        for (own, sender), ends in self.met.items():
            if isinstance(own, int) and own < 0:
                for (_, _, (rank, place, _)), (_, _, (_, there, _)) in zip(ends, self.met.get((sender, own), ()), strict=False):
                    if (message := rows[rank][place][0]) != (other := rows[sender][there][0]):
                        yield f"rank {rank} receives the {message} where rank {sender} sends the {other}"
                        break

    def hang(self) -> Hang | None:
        """Returns what waits for each other, if anything does."""
        if not self.stuck:
            return None
        ends = {done: (end, theirs is not None) for (_, done, end), theirs in self.pairs()}
        blocked = []
        for event, following in zip(self.stuck, [*self.stuck[1:], self.stuck[0]], strict=True):
            if following == self.other[event]:  # what waits for what is before it in its own order adds nothing
                if event in ends:
                    blocked.append(self._blocked(*ends[event]))
                elif event in self._waits:
                    blocked.append(self._blocked(self._waits[event]))
        return Hang(tuple(blocked), self.stuck[-1] == NEVER)

    def _blocked(self, end: End, is_met: bool | None = None) -> Blocked:
        """
        Args:
            is_met: whether there is another end of a post; None for what waits in its row.
        """
        rank, place, connects = end
        row: Any = self.traffic.rows[rank]
        what = ("connecting for the " if connects else "") + describe(row[place])
        if is_met is False:
            what += f", which that rank never {'receives' if isinstance(row[place], Send) else 'sends'}"
        around = reversed(row[:place]), row[place:]
        after, before = (next((step.work for step in steps if isinstance(step, Compute)), None) for steps in around)
        kind = "host" if connects else "row" if is_met is None or self._blocks else "line"
        return Blocked(rank, place, what, after, before, None if is_met is None else end, kind)


class _Lines:
    """The streams of a rank's communicators while its row grows, and at a cold start its host.

    Attributes:
        over: by message that has been started, when it is over.
        posted: the places of posts that have not been started.
        host: the last event of the rank's host.
    """

    def __init__(self, network: TrafficNetwork, transport: TransportModel, rank: int, cold: bool) -> None:
        self._network, self._transport, self._rank, self._cold = network, transport, rank, cold
        self._row: Any = network.traffic.rows[rank]
        self.over: dict[Message, int] = {}
        self.posted: list[int] = []
        self.host = network.add()
        self._last: dict[Hashable, int] = {}  # by communicator
        self._made: set[Hashable] = set()

    def start_before(self, step: Step, now: int) -> int:
        """Start what has been posted, if what is posted next is in no group with it; returns when the row goes on."""
        return self.start(now) if not self._transport.grouped or self._transport.starts(step) else now

    def start(self, now: int) -> int:
        network, rank, line = self._network, self._rank, self._transport.line
        assert line
        groups: dict[Hashable, list[int]] = {}  # places by communicator
        for place in self.posted:
            groups.setdefault(line(*self._way(place)), []).append(place)
        self.posted.clear()
        if self._cold:
            for communicator, places in groups.items():
                if self._transport.made_by_pair:
                    self._connect({communicator: places[-1]})
                self._connect({(communicator, self._way(place)): place for place in places})
            now = network.add(now, self.host)
        for communicator, places in groups.items():
            hop = max(network.hop(rank, self._row[place]) for place in places)
            done = begun = network.add(self._last.get(communicator, START), now)
            if self._transport.holds:  # one place, since nothing is grouped
                done = begun = network.add(begun, seconds=hop if type(self._row[places[0]]) is Send else 0.0)
                now, hop = network.add(now, begun), 0.0
            for place in places:
                done = network.add(done)
                sender, receiver = self._way(place)
                ends = network.ends(rank, ~receiver) if sender == rank else network.ends(~rank, sender)
                ends.append((begun, done, (rank, place, False)))
            network.seconds[done] = hop
            self._last[communicator] = done
            for place in places:
                self.over[self._row[place].message] = done
        return now

    def _way(self, place: int) -> tuple[int, int]:
        """The sender and the receiver of a post."""
        step = self._row[place]
        return (self._rank, step.peer) if type(step) is Send else (step.peer, self._rank)

    def _connect(self, wanted: dict[Hashable, int]) -> None:
        """Have the host wait twice for the hosts at the other ends of what has yet to be made."""
        new = {name: place for name, place in wanted.items() if name not in self._made}
        self._made.update(new)
        for phase in (0, 1) if new else ():
            begun = self.host
            for name, place in new.items():
                self.host = self._network.add(self.host)
                ends = self._network.ends((phase, name, self._rank), (phase, name, self._row[place].peer))
                ends.append((begun, self.host, (self._rank, place, True)))
