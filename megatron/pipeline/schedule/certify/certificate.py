"""Certificate of traffic over a transport: whether and where it hangs, and what it costs that messages stand in line behind
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.pipeline.schedule.core.costs import Costs
from megatron.pipeline.schedule.lower.program import describe
from megatron.pipeline.schedule.lower.traffic import Traffic
from megatron.pipeline.schedule.rules.deadlock import Hang, TrafficNetwork
from megatron.pipeline.schedule.rules.transports import TRANSPORTS, TransportModel


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
    free = TrafficNetwork(traffic, None, costs)
    outcomes = tuple(_outcome(TrafficNetwork(traffic, transport, costs, cold), transport) for transport in transports)
    return Certificate(traffic, None if free.stuck else free.makespan, outcomes, tuple(free.swapped()))


def _outcome(network: TrafficNetwork, transport: TransportModel) -> TransportOutcome:
    if hang := network.hang():
        return TransportOutcome(transport, hang, None, None)
    return TransportOutcome(transport, None, network.makespan, _longest_delay(network) if transport.line else None)


def _longest_delay(network: TrafficNetwork) -> Delay | None:
    """The message that waited longest between its later post and its start, seen from the end that was later to be first in
    line."""
    times, own, posted = network.times, network.own, network.other  # a line goes on from its own last one to what is posted
    pairs = [(mine, theirs) for mine, theirs in network.pairs() if theirs and not mine[2][2]]
    ends = {done: end for (_, done, end), _ in pairs}
    worst: Delay | None = None
    for (begun, done, end), (other, _, _) in pairs:
        start, before = max(times[own[done]], times[other]), ends.get(own[done] if own[done] != begun else own[begun])
        ready = max(times[posted[begun]], times[posted[other]])
        if before and times[begun] >= times[other] and start - ready > (worst.start - worst.ready if worst else 1e-9):
            post = network.step(end)
            worst = Delay(end[0], post.peer, str(post.message), ready, start, describe(network.step(before)))
    return worst
