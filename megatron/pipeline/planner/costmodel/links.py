"""Links between the ranks of a layout, and the time that they take within a layer.

Megatron-LM's order of ranks is assumed, tp-cp-ep-dp-pp: tensor-parallel ranks are neighbours, and stages the farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.pipeline.planner.costmodel import activations
from megatron.pipeline.planner.costmodel.device import Device, Link
from megatron.pipeline.planner.schedule.core import link_costs
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.link_costs import LinkCosts
from megatron.pipeline.planner.shape.description import ModelDescription, Ranks
from megatron.pipeline.planner.shape.gpt import Shape


@dataclass(frozen=True)
class Spread:
    """A group of ranks, of which each sends something of its own to each other one.

    Attributes:
        near, far: the links to ranks on the same node, and to those on others.
        together: ranks of the group on a node; None for all.
    """

    near: Link
    far: Link
    together: int | None = None

    def all_to_all(self, size: float, ranks: int) -> float:
        """Seconds until every rank has sent its part of ``size`` bytes of its own to each other one.

        Both links are in use at once, and parts go over each of them one after another. What leaves a node goes over the rank's
        own card, which others do not help with as they do in a ring.
        """
        near = min(self.together or ranks, ranks)
        part = size / ranks
        return max((near - 1) * self.near.seconds(part), (ranks - near) * self.far.seconds(part))

    def visits(self, size: float, ranks: int, topk: int) -> float:
        """Seconds until tokens are where they visit experts, each at most once on a node and then once on each rank there.

        Experts are visited at random; both links are in use at once. One kernel sends to all ranks, so a latency counts once.

        Args:
            size: bytes of the tokens of a rank.
            topk: experts that a token visits.
        """
        near = min(self.together or ranks, ranks)

        def others(places: float) -> float:
            """Share of what arrives at one of some places that comes from another, over the tokens of a rank."""
            return (1 - (1 - 1 / places) ** topk) * (places - 1)

        within = others(ranks) * ranks * (near - 1) / near / max(1, ranks - 1)  # of whichever node: it arrives on another's card
        return max(self.near.seconds(within * size), self.far.seconds(others(ranks / near) * size))


@dataclass(frozen=True)
class Links:
    """Link of every kind of group.

    Attributes:
        hop: from a stage to the next, the slowest.
        near: for each rank of a pipeline, whether the next one, or for the last the first, is on its node: over ``near_hop``.
        tensor, context, data: within groups of these kinds.
        expert_tensor: between ranks that share each expert.
        experts: between ranks that share the experts of a layer, in a ring.
        expert_data: between ranks with the same experts.
        expert: between ranks that share the experts of a layer, where each sends to each.
        beside_communication: how many times as long computation takes while any of these is in use, as of a ``Device``.
    """

    hop: Link
    tensor: Link
    context: Link
    data: Link
    expert_tensor: Link
    experts: Link
    expert_data: Link
    expert: Spread
    beside_communication: float = 1.0
    near: tuple[bool, ...] = ()
    near_hop: Link | None = None

    def hides(self, communication: float, computation: float) -> float:
        """Seconds by which both take less at the same time than one after the other."""
        return min(communication / self.beside_communication, computation)

    @classmethod
    def within(cls, device: Device) -> Links:
        """All ranks on one node."""
        return cls.of(device, 1, Ranks(1, 1, 1, 1, 1))

    @classmethod
    def of_model(cls, device: Device, model: ModelDescription, per_node: int | None = None) -> Links:
        """For a training, on nodes of ``per_node`` GPUs; None for those that the device has."""
        return cls.of(device, per_node or device.node(model.gpus), model.ranks)

    @classmethod
    def of(cls, device: Device, per_node: int, ranks: Ranks) -> Links:
        """For a layout on nodes of ``per_node`` GPUs."""
        tensor, context, expert, data, pipeline, expert_tensor = ranks
        parts = expert_tensor or tensor
        stage, own = tensor * context * data, parts * expert  # ranks of a stage, and those of them that have all of its experts

        def stays(ranks: int) -> bool:
            """Tell whether every group of that number of neighbours is on one node."""
            return stage * pipeline <= per_node or per_node % ranks == 0

        def group(first: int, size: int) -> Link:
            """The link of ``size`` ranks that are ``first`` apart: a ring over nodes uses the cards of all its members."""
            if size == 1 or stays(first * size):
                return device.within
            mine = max(1, per_node // first)
            return Link(device.between.latency, min(device.within.bandwidth, mine * device.between.bandwidth))

        together = None
        if not stays(own):  # unless nodes have equal parts of every group, some rank is alone on its node
            together = max(1, per_node // parts) if own % per_node == 0 else 1
        return cls(
            # If any stage's neighbour is on another node: the slowest hop sets the pace of all.
            hop=device.hop if stage * pipeline <= per_node or pipeline == 1 else device.between,
            tensor=group(1, tensor),
            context=group(tensor, context),
            data=group(tensor, context * data),
            expert_tensor=group(1, parts),
            experts=group(parts, expert),
            expert_data=group(own, stage // own),
            expert=Spread(device.within, device.between, together),
            beside_communication=device.beside_communication,
            near=tuple(_is_near(rank, stage, pipeline, per_node) for rank in range(pipeline)),
            near_hop=device.hop,
        )


def _is_near(rank: int, stage: int, pipeline: int, per_node: int) -> bool:
    """Tell whether every GPU of a pipeline's rank, of ``stage``, has its counterpart of the next rank on its own node."""
    other = (rank + 1) % pipeline
    return all((rank * stage + place) // per_node == (other * stage + place) // per_node for place in range(stage))


def with_messages(costs: Costs, shape: Shape, links: Links) -> Costs:
    """Costs whose ``hop`` is that on a node where some neighbours are on one, and whose ``links`` are those between nodes."""
    if links.near_hop is None or not any(links.near):
        return costs
    ranks, latency = len(links.near), links.hop.latency
    seconds = hop_seconds(shape, links) - latency
    ways = [(rank, (rank + 1) % ranks) for rank in range(ranks) if not links.near[rank]]
    far = [LinkCosts(*pair, seconds, latency) for way in ways for pair in (way, way[::-1])]
    return replace(costs, hop=links.near_hop.seconds(shape.hidden_bytes), links=link_costs.joined((), far))


def layer_communication(
    shape: Shape, links: Links, attention: tuple[float, float], beside: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Seconds that F and B of a layer wait for the ranks that share it.

    Tensor parallelism: two all-reduces in each, or as much as an all-gather and a reduce-scatter under sequence parallelism
    (Korthikanti et al., section 4.2.2); that of W's inputs overlaps with B. Experts have ``exchange_seconds`` twice in place of
    one of these. Context parallelism: keys and values go round, in B with their gradients, in parallel with attention, so only
    what that does not hide counts.

    Args:
        attention: seconds of F and B of attention alone.
        beside: of what runs beside the exchange of tokens.
    """
    held, experts = shape.policy, shape.experts
    hidden = held.number * shape.tokens * shape.hidden / held.context
    visited = experts.share if experts and not experts.shared_ffn else 0.0  # of the MLPs, by some tokens alone
    tensor = (shape.parts - visited) * links.tensor.all_reduce(hidden, held.tensor)
    around = shape.attention * links.context.all_gather(
        held.number * shape.tokens * shape.keys_and_values / held.tensor, held.context
    )
    exchanged = 2 * exchange_seconds(shape, links)
    forward, backward = (
        each - links.hides(each, seconds) + exchanged - links.hides(exchanged, more)
        for each, seconds, more in zip((around, 2 * around), attention, beside, strict=True)
    )
    return tensor + forward, tensor + backward


def exchange_seconds(shape: Shape, links: Links) -> float:
    """Seconds in which the tokens of a layer go to the experts that they visit, as a mean over the layers.

    It takes as long to combine what experts make of them, and both ways in B. A token is sent once for every expert that it
    visits; where each expert is cut, those that have its parts gather each other's tokens then. Or all ranks gather those of all.
    """
    held, experts = shape.policy, shape.experts
    if not experts:
        return 0.0
    own = activations.routed_bytes(shape)
    if experts.gathered:
        ranks = experts.parallel
        across, sent = links.experts.all_gather(ranks * own, ranks), ranks * own
    else:
        sent = experts.visits * own  # or received: by the rank with most of them
        spread, ranks = links.expert, experts.parallel
        across = spread.visits(experts.load * own, ranks, experts.topk) if experts.once else spread.all_to_all(sent, ranks)
    parts = links.expert_tensor.all_gather(experts.tensor * sent, experts.tensor) if held.sequence_parallel else 0.0
    return experts.share * (across + parts)


def hop_seconds(shape: Shape, links: Links) -> float:
    """Seconds of the message from a stage to the next, over the slowest hop."""
    return links.hop.seconds(shape.hidden_bytes)
