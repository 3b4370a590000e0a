"""Traffic over a transport, as rows that ``time/replay.py`` runs: every rank's row, its lines, and at a cold start its host.

All orders are given: of steps on a rank, of posts in a line, and of messages between two ranks. So whether everything ends does
not depend on times, and it is stuck exactly where what has not run waits for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from megatron.pipeline.schedule.certify.traffic import Await, Batch, Item, Post, Traffic, TrafficShape
from megatron.pipeline.schedule.certify.transports import TransportModel
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.lower.program import Collective, Compute, Join, Message
from megatron.pipeline.schedule.time.links import PassLink, Rows
from megatron.pipeline.schedule.time.replay import Replay, advance


class End(NamedTuple):
    """A post, by where it stands: the rank, the place of its batch in the rank's row, and its number in the batch."""

    rank: int
    place: int
    number: int


class RowItem(NamedTuple):
    """Meaning of an item of a row.

    Attributes:
        row: which kind of row it is of: ``row``, ``line`` or ``host``.
        rank, place: the step that it belongs to.
        end: the post, where it is about one.
        meets: whether it waits for the other end of that post.
    """

    row: str
    rank: int
    place: int
    end: End | None = None
    meets: bool = False


def ends_of(traffic: Traffic) -> Iterator[tuple[End, Post]]:
    for rank, row in enumerate(traffic.rows):
        for place, step in enumerate(row):
            if isinstance(step, Batch):
                for number, post in enumerate(step.posts):
                    yield End(rank, place, number), post


def partners(traffic: Traffic) -> dict[End, End]:
    """For every post its other end: the n-th send from a rank to another meets the n-th receive there. Those left over have
    none."""
    orders: dict[tuple[int, int, bool], list[End]] = defaultdict(list)
    for end, post in ends_of(traffic):
        sender, receiver = (end.rank, post.peer) if post.sends else (post.peer, end.rank)
        orders[sender, receiver, post.sends].append(end)
    found: dict[End, End] = {}
    for (sender, receiver, sends), ends in orders.items():
        for one, other in zip(ends, orders.get((sender, receiver, True), ()) if not sends else (), strict=False):
            found[one], found[other] = other, one
    return found


class Network:
    """Traffic over a transport.

    Attributes:
        works: by row, what its items stand for.
        run: the times of the items that ran.
        blocked: whether any item never runs.
    """

    def __init__(self, traffic: Traffic, costs: Costs, transport: TransportModel | None, cold: bool = False) -> None:
        """
        Args:
            transport: None for one without lines: a message travels as soon as it is sent, and a receive holds up nothing.
        """
        self.works: list[list[RowItem]] = [[] for _ in traffic.rows]
        self.posts = dict(ends_of(traffic))
        self.partners = partners(traffic)
        self._traffic, self._transport, self._costs = traffic, transport, costs.sliced(traffic.splits)
        self._links: list[list[PassLink]] = [[] for _ in traffic.rows]
        self._numbers: dict[Hashable, int] = {"nothing": 0, "unused": 1}
        self._makers: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (row, slot) by number of a result
        self._units: dict[End, End] = {}  # the first of the group that a post belongs to
        self._ends: dict[tuple[int, Item], End] = {(end.rank, post.item): end for end, post in self.posts.items()}
        self._opened: dict[tuple[int, int], int] = {}  # by (rank, place), the host's step that opens what its posts need
        if transport and transport.line:
            self._add_lines(transport)
            if cold:
                self._add_hosts(transport)
        for rank in range(traffic.ranks):
            self._add_row(rank)
        rows = [[Pass(slot, 0) for slot in range(len(links))] for links in self._links]  # type: ignore[arg-type]  # keys
        tables = [[dict(enumerate(links))] for links in self._links]
        table = Rows(rows, rows, tables, [0] + [None] * (len(self._numbers) - 1), [])
        self.run: Replay
        self.run, blocked = advance(table, traffic.ranks)
        self.blocked = bool(blocked)

    @property
    def makespan(self) -> float:
        """From the start to the end of the last pass of those that ran."""
        ends = (
            end
            for rank, row in enumerate(self._traffic.rows)
            for work, end in zip(self.works[rank], self.run.ends[rank], strict=False)
            if isinstance(row[work.place], Compute)
        )
        return max(ends, default=0.0)

    def stuck(self, row: int) -> tuple[RowItem, int | None] | None:
        """Item that a row is stuck in, and the row that has yet to make what it waits for (None: none will); None if it has
        ended.
        """
        slot = len(self.run.ends[row])
        if slot == len(self._links[row]):
            return None
        makers = self._makers.get(self._links[row][slot].needed, ())
        return self.works[row][slot], next((other for other, at in makers if at >= len(self.run.ends[other])), None)

    def _number(self, name: Hashable) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _add(
        self,
        row: int,
        work: RowItem,
        needs: Hashable = "nothing",
        makes: Hashable = "unused",
        seconds: float = 0.0,
        hop: float = 0.0,
        is_part: bool = False,
    ) -> None:
        made = self._number(makes)
        if made > 1:
            self._makers[made].append((row, len(self._links[row])))
        self._links[row].append(PassLink(made, self._number(needs), hop, seconds, is_part))
        self.works[row].append(work)

    def _new_row(self) -> int:
        self._links.append([])
        self.works.append([])
        return len(self._links) - 1

    def _add_row(self, rank: int) -> None:
        """Add what a rank's compute stream runs."""
        row = self._traffic.rows[rank]
        rest: dict[Pass, float] = {}  # of a braid, after its forward
        for place, step in enumerate(row):
            here = RowItem("row", rank, place)
            match step:
                case Compute(work, backward):
                    stage = self._traffic.placement.stage(rank, work.chunk)
                    if backward:
                        other = self._traffic.placement.stage(rank, backward.chunk)
                        seconds, rest[backward] = self._costs.braid(stage, backward.kind, other)
                    else:
                        seconds = rest.pop(work, self._costs.seconds(work.kind, stage))
                    self._add(rank, here, seconds=seconds)
                case Batch():
                    self._add_posts(rank, place)
                case Await(Collective() as collective):
                    self._add(rank, here, ("joined", collective), hop=self._costs.exchange)
                case Await(Message() | TrafficShape() as item):
                    self._add_wait(here, self._ends[rank, item])
                case Join(collective):
                    self._add(rank, here, makes=("joined", collective), is_part=True)
                    if self._transport and not self._transport.line:
                        self._add(rank, here, ("joined", collective), hop=self._costs.exchange)
                case _:
                    self._add(rank, here, makes=("reached", rank, place))

    def _add_posts(self, rank: int, place: int) -> None:
        if self._transport and not self._transport.line:
            for end in self._ends_at(rank, place):
                self._add(rank, RowItem("row", rank, place, end), makes=("begun", end))
                self._add_meeting(rank, "row", end, end, makes=("done", end))
            return
        opened = self._opened.get((rank, place))
        needs: Hashable = "nothing" if opened is None else ("open", rank, opened)
        self._add(rank, RowItem("row", rank, place), needs, ("posted", rank, place))

    def _add_wait(self, here: RowItem, end: End) -> None:
        if self._transport:
            self._add(here.rank, here._replace(end=end), ("done", self._units.get(end, end)))
        elif not self.posts[end].sends:
            other = self.partners.get(end)
            needs = ("posted", other.rank, other.place) if other else ("never", end)
            self._add(here.rank, here._replace(end=end), needs, hop=self._costs.hop)

    def _add_meeting(
        self, row: int, kind: str, end: End, unit: End, makes: Hashable = "unused", seconds: float | None = None
    ) -> None:
        other = self.partners.get(end)
        needs = ("begun", self._units.get(other, other)) if other else ("never", end)
        taken = self._costs.hop if seconds is None else seconds
        self._add(row, RowItem(kind, end.rank, end.place, end, meets=True), needs, makes, taken)

    def _ends_at(self, rank: int, place: int) -> list[End]:
        step = self._traffic.rows[rank][place]
        return [End(rank, place, number) for number in range(len(step.posts))] if isinstance(step, Batch) else []

    def communicator(self, end: End) -> Hashable:
        assert self._transport is not None
        assert self._transport.line is not None
        post = self.posts[end]
        return self._transport.line(end.rank, post.peer) if post.sends else self._transport.line(post.peer, end.rank)

    def _groups(self, transport: TransportModel, rank: int, place: int) -> list[list[End]]:
        """The posts of a step that start together, in order."""
        ends = self._ends_at(rank, place)
        if not transport.grouped:
            return [[end] for end in ends]
        groups: dict[Hashable, list[End]] = {}
        for end in ends:
            groups.setdefault(self.communicator(end), []).append(end)
        return list(groups.values())

    def _add_lines(self, transport: TransportModel) -> None:
        """Add what the stream of each communicator of a rank runs."""
        groups = [
            (group, self.communicator(group[0]))
            for rank, row in enumerate(self._traffic.rows)
            for place in range(len(row))
            for group in self._groups(transport, rank, place)
        ]
        self._units = {end: group[0] for group, _ in groups for end in group}
        lines: dict[tuple[int, Hashable], int] = {}
        for group, communicator in groups:
            first = group[0]
            if (first.rank, communicator) not in lines:
                lines[first.rank, communicator] = self._new_row()
            row = lines[first.rank, communicator]
            self._add(row, RowItem("line", first.rank, first.place, first), ("posted", first.rank, first.place), ("begun", first))
            for end in group[:-1]:
                self._add_meeting(row, "line", end, first, seconds=0.0)
            self._add_meeting(row, "line", group[-1], first, makes=("done", first))

    def _add_hosts(self, transport: TransportModel) -> None:
        """Add for each rank what its host has to do before posts can start: a host step for each communicator and group of
        connections."""
        steps: list[list[tuple[int, dict[Hashable, End]]]] = []  # by rank: place, and what is new with the post that needs it
        first: dict[tuple[int, Hashable], int] = {}  # by rank and what is new, the host's step
        for rank, row in enumerate(self._traffic.rows):
            own: list[tuple[int, dict[Hashable, End]]] = []
            for place in range(len(row)):
                for group in self._groups(transport, rank, place):
                    for names in self._needed(transport, group):
                        new = {name: end for name, end in names.items() if (rank, name) not in first}
                        if new:
                            first |= {(rank, name): len(own) for name in new}
                            self._opened[rank, place] = len(own)
                            own.append((place, new))
            steps.append(own)
        for rank, own in enumerate(steps):
            self._add_host(rank, own, first)

    def _needed(self, transport: TransportModel, group: Sequence[End]) -> Iterator[dict[Hashable, End]]:
        """Items that must have been made before a group can start, in order."""
        if transport.made_by_pair:
            yield {("communicator", self.communicator(end)): end for end in group}
        connections: dict[Hashable, End] = {}
        for end in group:
            post = self.posts[end]
            way = (end.rank, post.peer) if post.sends else (post.peer, end.rank)
            connections["connection", self.communicator(end), way] = end
        yield connections

    def _add_host(
        self, rank: int, steps: Sequence[tuple[int, dict[Hashable, End]]], first: dict[tuple[int, Hashable], int]
    ) -> None:
        row, done = self._new_row(), 0
        for place, step in enumerate(self._traffic.rows[rank]):
            while done < len(steps) and steps[done][0] == place:
                new = steps[done][1]
                self._add(row, RowItem("host", rank, place), makes=("arrived", rank, done))
                for phase, made in (("arrived", "connected"), ("connected", "open")):
                    for count, (name, end) in enumerate(new.items(), 1):
                        peer = self.posts[end].peer
                        needs = (phase, peer, first[peer, name]) if (peer, name) in first else ("never", end)
                        makes: Hashable = (made, rank, done) if count == len(new) else "unused"
                        self._add(row, RowItem("host", rank, place, end, meets=True), needs, makes)
                done += 1
            if not isinstance(step, (Batch, Compute, Await, Join)):
                self._add(row, RowItem("host", rank, place), ("reached", rank, place))
