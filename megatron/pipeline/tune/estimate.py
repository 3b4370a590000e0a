"""From what a GPT has to compute and to hold to what passes cost on a device.

The model of time: products run at a share of the device's peak, the same for all; looking up embeddings takes what it reads and
writes at the memory's bandwidth; a message takes its bytes at the link's, as does a collective its largest, the hidden states.
Nothing else takes time; ranks that share layers or sequences have equal parts of it. The model of memory is that of
``activations``; ``memory`` adds all else that a rank needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.model.vocabulary.layout import Shards
from megatron.pipeline.schedule.costs import Costs, StageCosts, VocabularyCosts
from megatron.pipeline.schedule.passes import Vocabulary
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.tune import activations, gpt
from megatron.pipeline.tune.activations import Held
from megatron.pipeline.tune.gpt import Shape, Work


@dataclass(frozen=True)
class Device:
    """How fast a GPU is; by default an A100 of 80 GB within its node.

    Attributes:
        peak: operations per second in 16 bits.
        efficiency: the share of them that products reach in a training, with all that runs between them.
        bandwidth: bytes per second of its memory.
        link: bytes per second to another rank.
    """

    peak: float = 312e12
    efficiency: float = 0.55
    bandwidth: float = 2e12
    link: float = 250e9

    def __post_init__(self) -> None:
        for name in ("peak", "bandwidth", "link"):
            if not getattr(self, name) > 0:
                raise ValueError(f"the {name} of a device must be above 0, got {getattr(self, name):g}")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"the efficiency of a device is a share above 0 and of at most 1, got {self.efficiency:g}")

    def seconds(self, operations: float) -> float:
        """Of products."""
        return operations / (self.peak * self.efficiency)


def estimate(
    shape: Shape,
    placement: Placement,
    layers: Sequence[int],
    device: Device,
    vocabulary: Vocabulary | None = None,
    split: bool = True,
) -> Costs:
    """Seconds and bytes of every pass.

    Args:
        layers: of every stage, in the model's order.
        vocabulary: how the vocabulary is spread over all ranks; None where the first and the last stage have it.
        split: whether the schedule has B and W apart: what B makes again is then held until W.
    """
    share = shape.holding.of_cut_layers
    work = gpt.layer_work(shape).times(share)

    def stage(count: int) -> StageCosts:
        return _stage(device, work.times(count), activations.held_by_stage(shape, count, split))

    stages = [stage(count) for count in layers]
    hop = activations.hidden_bytes(shape) / device.link
    if vocabulary is not None:
        return Costs(tuple(stages), hop, shard_costs(shape, placement.ranks, device, vocabulary))
    ends = [(0, embedding_costs(shape, device)), (placement.last_stage, output_costs(shape, device))]
    # A layer of multi-token prediction is a unit of its own, and computes its loss with the output layer.
    ends += shape.further * [(placement.last_stage, stage(1)), (placement.last_stage, output_costs(shape, device))]
    for index, more in ends:
        stages[index] = _sum(stages[index], more)
    return Costs(tuple(stages), hop)


def embedding_costs(shape: Shape, device: Device) -> StageCosts:
    """What the embedding adds to the first stage: F reads rows and writes them; B reads the gradient and adds it in float32."""
    part = activations.hidden_bytes(shape) / device.bandwidth
    return StageCosts(2 * part, 5 * part, 0.0, 0.0, 0.0)


def output_costs(shape: Shape, device: Device) -> StageCosts:
    """What the output layer and the loss add to the last stage."""
    kept = activations.output_activation(shape)
    work = gpt.output_work(shape).times(shape.holding.of_cut_layers)
    return _stage(device, work, Held(kept, kept, kept))


def shard_costs(shape: Shape, ranks: int, device: Device, vocabulary: Vocabulary) -> VocabularyCosts:
    """The costs of every rank's share of embedding and output layer.

    Of the three products with a shard's rows, S has the logits and with one barrier the gradient by its input, T the others
    (arXiv 2411.05288, algorithms 1 and 2). IF writes hidden states, of which it reads its own rows, IB reads all gradients and
    adds those of its own rows in float32.
    """
    rows = shards(shape, ranks).rows
    product = device.seconds(gpt.row_work(shape) * rows) / shape.holding.context
    early = 2 if vocabulary is Vocabulary.ONE_BARRIER else 1
    part = activations.hidden_bytes(shape) / device.bandwidth
    return VocabularyCosts(
        S=early * product,
        T=(3 - early) * product,
        IF=(1 + 1 / ranks) * part,
        IB=(1 + 4 / ranks) * part,
        activation=activations.shard_activation(shape, rows),
        exchange=activations.hidden_bytes(shape) / device.link,
    )


def shards(shape: Shape, ranks: int) -> Shards:
    """How the vocabulary is cut over the ranks of a pipeline, and the tensor-parallel ones of each."""
    return Shards.of(shape.vocabulary, shape.vocabulary, ranks * shape.holding.tensor)


def _stage(device: Device, work: Work, held: Held) -> StageCosts:
    forward, backward, weight = map(device.seconds, work)
    return StageCosts(forward, backward, weight, held.activation, held.retained, recompute=forward, checkpoint=held.checkpoint)


def _sum(one: StageCosts, other: StageCosts) -> StageCosts:
    return StageCosts(
        one.forward + other.forward,
        one.backward + other.backward,
        one.weight + other.weight,
        one.activation + other.activation,
        one.retained + other.retained,
        recompute=one.recompute + other.recompute,
        checkpoint=one.checkpoint + other.checkpoint,
    )
