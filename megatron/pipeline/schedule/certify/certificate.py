"""Certificate of traffic over a transport: whether and where it hangs, and what it costs that messages stand in line behind
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megatron.pipeline.schedule.certify.network import End, Network, RowItem, ends_of, partners
from megatron.pipeline.schedule.certify.traffic import Await, Batch, Traffic
from megatron.pipeline.schedule.certify.transports import TRANSPORTS, TransportModel
from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.lower.program import Compute


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


@dataclass(frozen=True)
class Delay:
    """A message that was posted at both ends, and waited for other messages.

    Attributes:
        end: one end of it; ``rank`` and ``peer`` exchange it.
        ready, start: when both ends had posted it, and when it started.
        behind: what stood before it in the line of that end, in words.
    """

    rank: int
    peer: int
    item: str
    ready: float
    start: float
    behind: str


@dataclass(frozen=True)
class TransportOutcome:
    """Outcome over one transport.

    Attributes:
        makespan: from the start to the end of the last pass; None if it hangs.
        delay: the message that waited longest in line, if any did.
    """

    transport: TransportModel
    hang: Hang | None
    makespan: float | None
    delay: Delay | None


@dataclass(frozen=True)
class Certificate:
    """Outcomes over each transport.

    Attributes:
        unlimited: the makespan if every message travels as soon as it is sent; None if it hangs even so.
        swapped: where two ranks disagree on the order of their messages: each receives what the other did not mean.
    """

    traffic: Traffic
    unlimited: float | None
    outcomes: tuple[TransportOutcome, ...]
    swapped: tuple[str, ...]

    @property
    def hangs(self) -> bool:
        """Tell whether anything is wrong: it hangs over one of the transports, or messages are swapped."""
        return bool(self.swapped) or any(outcome.hang for outcome in self.outcomes)


def certify(
    traffic: Traffic, costs: Costs, transports: Iterable[TransportModel] = tuple(TRANSPORTS.values()), cold: bool = False
) -> Certificate:
    """Find what happens to traffic over each transport.

    Args:
        costs: of every stage; times follow from them, hangs do not.
        cold: whether communicators and connections are made at the first message that needs them: see ``transports.py``.

    Raises:
        ValueError: the costs are for another number of stages.
    """
    costs.check_placement(traffic.placement)
    free = Network(traffic, costs, None)
    outcomes = tuple(_outcome(traffic, costs, transport, cold) for transport in transports)
    return Certificate(traffic, None if free.blocked else free.makespan, outcomes, tuple(_swapped(traffic)))


def _swapped(traffic: Traffic) -> Iterable[str]:
    """The first of each two ranks and direction: after it, the others are wrong as well."""
    posts, seen = dict(ends_of(traffic)), set()
    for one, other in partners(traffic).items():
        mine, theirs = posts[one], posts[other]
        if not mine.sends and mine.item != theirs.item and (one.rank, mine.peer) not in seen:
            seen.add((one.rank, mine.peer))
            yield f"rank {one.rank} receives the {mine.item} where rank {mine.peer} sends the {theirs.item}"


def _outcome(traffic: Traffic, costs: Costs, transport: TransportModel, cold: bool) -> TransportOutcome:
    network = Network(traffic, costs, transport, cold)
    if network.blocked:
        return TransportOutcome(transport, _hang(traffic, network), None, None)
    return TransportOutcome(transport, None, network.makespan, _longest_delay(network) if transport.line else None)


def _hang(traffic: Traffic, network: Network) -> Hang:
    row: int | None = next(row for row in range(len(network.works)) if network.stuck(row))
    chain: list[tuple[int, RowItem]] = []
    while row is not None and row not in [other for other, _ in chain]:
        stuck = network.stuck(row)
        assert stuck is not None
        chain.append((row, stuck[0]))
        row = stuck[1]
    if row is not None:
        chain = chain[[other for other, _ in chain].index(row) :]
    # That a line has not been given a post yet, and a row waits for its host, adds nothing to what the next in the chain waits
    # for.
    blocked = tuple(_blocked(traffic, network, work) for _, work in chain if work.meets or _waits(traffic, work))
    return Hang(blocked, missing=row is None)


def _waits(traffic: Traffic, work: RowItem) -> bool:
    return work.row == "row" and not isinstance(traffic.rows[work.rank][work.place], Batch)


def _blocked(traffic: Traffic, network: Network, work: RowItem) -> Blocked:
    step = traffic.rows[work.rank][work.place]
    if isinstance(step, Await):
        what = f"Wait for the {step.item}"
    elif work.end is not None:
        verb = "connecting for the " if work.row == "host" else ""
        what = f"{verb}{network.posts[work.end]}"
        if work.end not in network.partners:
            what += ", which that rank never " + ("receives" if network.posts[work.end].sends else "sends")
    else:
        what = type(step).__name__ + (f" of the {step[0]}" if step else "")
    row = traffic.rows[work.rank]
    around = reversed(row[: work.place]), row[work.place :]
    after, before = (next((step.work for step in steps if isinstance(step, Compute)), None) for steps in around)
    return Blocked(work.rank, work.place, what, after, before, work.end, work.row)


def _longest_delay(network: Network) -> Delay | None:
    """The message that waited longest between its later post and its start, seen from the end that was later to be first in
    line."""
    posted, begun, ahead = {}, {}, {}
    for row, works in enumerate(network.works):
        before: End | None = None
        for slot, work in enumerate(works):
            if work.row == "row" and not work.end:
                posted[work.rank, work.place] = network.run.ends[row][slot]
            elif work.row == "line" and work.meets and work.end:
                begun[work.end] = network.run.starts[row][slot]
                ahead[work.end] = before
            if work.row == "line" and work.meets:
                before = work.end
    worst: Delay | None = None
    for end, start in begun.items():
        other, stood = network.partners[end], ahead[end]
        ready = max(posted[one.rank, one.place] for one in (end, other))
        if stood is not None and start - ready > (worst.start - worst.ready if worst else 1e-9):
            post = network.posts[end]
            worst = Delay(end.rank, post.peer, str(post.item), ready, start, str(network.posts[stood]))
    return worst
