"""Certificate of traffic over a transport: whether and where it hangs, and what it costs that messages stand in line behind
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.lower.traffic import Traffic
from megatron.pipeline.planner.schedule.rules.deadlock import Hang, TrafficNetwork
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS, TransportModel


@dataclass(frozen=True)
class TransportOutcome:
    """Outcome over one transport.

    Attributes:
        makespan: from the start to the end of the last pass; None if it hangs.
    """

    transport: TransportModel
    hang: Hang | None
    makespan: float | None


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
    hang = network.hang()
    return TransportOutcome(transport, hang, None if hang else network.makespan)
