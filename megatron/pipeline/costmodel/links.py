"""Which links the ranks of a layout talk over, and what that takes within a layer.

Megatron-LM's order of ranks is assumed, tp-cp-ep-dp-pp: tensor-parallel ranks are neighbours, and stages the farthest apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.costmodel import activations
from megatron.pipeline.costmodel.device import Device, Link
from megatron.pipeline.shape.gpt import Shape


@dataclass(frozen=True)
class Links:
    """What every kind of group talks over.

    Attributes:
        hop: from a stage to the next.
        tensor, context, expert, data: within groups of these kinds.
    """

    hop: Link
    tensor: Link
    context: Link
    expert: Link
    data: Link

    @classmethod
    def within(cls, device: Device) -> Links:
        """All ranks on one node."""
        return cls(device.hop, *[device.within] * 4)

    @classmethod
    def of(cls, device: Device, per_node: int, tensor: int, context: int, expert: int, data: int, pipeline: int) -> Links:
        """For a layout on nodes of ``per_node`` GPUs.

        Args:
            expert: ranks that share the experts of a layer, among those of tensor, context and data parallelism.
        """
        stage = tensor * context * data

        def stays(ranks: int) -> bool:
            """Whether every group of that number of neighbours is on one node."""
            return stage * pipeline <= per_node or per_node % ranks == 0

        def group(first: int, size: int) -> Link:
            """The link of ``size`` ranks that are ``first`` apart: a ring over nodes uses the cards of all its members."""
            if size == 1 or stays(first * size):
                return device.within
            mine = max(1, per_node // first)
            return Link(device.between.latency, min(device.within.bandwidth, mine * device.between.bandwidth))

        return cls(
            # If any stage's neighbour is on another node: the slowest hop sets the pace of all.
            hop=device.hop if stage * pipeline <= per_node or pipeline == 1 else device.between,
            tensor=group(1, tensor),
            context=group(tensor, context),
            # All-to-alls send to every rank by itself: what leaves a node shares each rank's own card.
            expert=device.within if stays(tensor * expert) else device.between,
            data=group(tensor, context * data),
        )


def layer_communication(shape: Shape, links: Links, attention: tuple[float, float]) -> tuple[float, float]:
    """Seconds that F and B of a layer wait for the ranks that share it.

    Tensor parallelism: two all-reduces in each, or as much as an all-gather and a reduce-scatter under sequence parallelism
    (Korthikanti et al., section 4.2.2); that of W's inputs overlaps with B. Context parallelism: keys and values go round, in B
    with their gradients, in parallel with attention, so only the excess counts. Experts: tokens go to theirs and back.

    Args:
        attention: seconds of F and B of attention alone.
    """
    held = shape.holding
    hidden = held.number * shape.tokens * shape.hidden / held.context
    tensor = 2 * links.tensor.all_reduce(hidden, held.tensor)
    around = links.context.all_gather(held.number * shape.tokens * shape.keys_and_values / held.tensor, held.context)
    exchanged = 0.0
    if shape.experts and shape.experts.parallel > 1:
        sent = hidden / (held.tensor if held.sequence_parallel else 1) * shape.experts.topk
        exchanged = 2 * shape.experts.share * links.expert.all_to_all(sent, shape.experts.parallel)
    waits = [max(0.0, times * around - seconds) for times, seconds in zip((1, 2), attention, strict=True)]
    return tensor + exchanged + waits[0], tensor + exchanged + waits[1]


def hop_seconds(shape: Shape, links: Links) -> float:
    """Of the message from a stage to the next."""
    return links.hop.seconds(activations.hidden_bytes(shape))
