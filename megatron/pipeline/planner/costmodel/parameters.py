"""The exact number of parameters of every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add

from megatron.pipeline.planner.costmodel.estimate import shards
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.gpt import DIFFERING, Shape
from megatron.pipeline.planner.shape.hybrid import ATTENTION, EXPERTS, MLP
from megatron.pipeline.planner.shape.stages import numbers_of_layers
from megatron.pipeline.planner.shape.trained import EMBEDDING, OUTPUT


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of one rank.

    Attributes:
        dense: those that all data-parallel ranks have.
        expert: those of experts, which only ranks with the same experts have.
        quantized: of both, those of layers whose linears are in fewer than 16 bits.
        layers: of both, those of layers: all but embedding, output layer, positions and the last norm.
        frozen, frozen_expert: those of each that do not train.
    """

    dense: int = 0
    expert: int = 0
    quantized: int = 0
    layers: int = 0
    frozen: int = 0
    frozen_expert: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(*map(add, vars(self).values(), vars(other).values()))  # often: without a copy of either

    @property
    def total(self) -> int:
        return self.dense + self.expert

    @property
    def trained(self) -> Parameters:
        """Those that train."""
        frozen = self.frozen + self.frozen_expert
        if not frozen:
            return self
        return Parameters(self.dense - self.frozen, self.expert - self.frozen_expert, 0, max(0, self.layers - frozen))


def parameters(
    shape: Shape, placement: Placement, layers: Sequence[int], vocabulary: Vocabulary | None = None, tied: bool = False
) -> list[Parameters]:
    """Parameters of every pipeline rank, of a GPT of megatron-core; with tensor parallelism one of the ranks that share its
    layers.

    Args:
        layers: of every stage, in the model's order.
        vocabulary: how the vocabulary is sharded over all ranks; None if it is not.
        tied: whether embedding and output layer are one matrix; without ``vocabulary`` each end has it, unless one rank has both.
    """
    numbers = numbers_of_layers(layers)
    lists = [own.layers for name in DIFFERING if (own := getattr(shape, name)) and own.layers]
    kinds = list(zip(*lists, strict=False)) or [()] * shape.layers
    of_kind = {kind: layer_parameters(shape, kinds.index(kind)) for kind in set(kinds)}
    counts = [sum((of_kind[kinds[layer]] for stage in row for layer in numbers[stage]), Parameters()) for row in placement.stages]
    first, last = placement.home(0)[0], placement.home(placement.last_stage)[0]
    ends = {EMBEDDING: [0] * placement.ranks, OUTPUT: [0] * placement.ranks}
    ends[EMBEDDING][first] += shape.positions * shape.hidden
    ends[OUTPUT][last] += shape.norm * shape.hidden  # the norm before the output layer
    if vocabulary is not None:
        shard = shape.hidden * shards(shape, placement.ranks).rows
        ends = {end: [count + shard * (end == EMBEDDING or not tied) for count in dense] for end, dense in ends.items()}
    else:
        matrix = shape.hidden * shape.vocabulary // shape.policy.tensor
        ends[EMBEDDING][first] += matrix
        if not (tied and first == last):
            ends[OUTPUT][last] += matrix
        if shape.mtp_layers and first != last:
            ends[EMBEDDING][last] += matrix  # of the tokens that are predicted from
    for _ in range(shape.mtp_layers):
        predictor = shape.predictor
        counts[last] += sum((layer_parameters(predictor, layer) for layer in range(predictor.layers)), Parameters())
        # Three norms, and the product of hidden states and embeddings side by side.
        ends[OUTPUT][last] += 3 * shape.norm * shape.hidden + 2 * shape.hidden**2 // shape.policy.tensor
    for end, dense in ends.items():
        frozen = not shape.trains(end)
        counts = [count + Parameters(more, frozen=frozen * more) for count, more in zip(counts, dense, strict=True)]
    return counts


def layer_parameters(shape: Shape, layer: int) -> Parameters:
    """One layer of the model, counted from 0, on one of the ranks that share it.

    Tensor-parallel ranks each have the norms, and the biases of outputs that they add up.
    """
    hidden, tensor, experts, symbols = shape.hidden, shape.policy.tensor, shape.experts, shape.symbols(layer)
    cut, whole, routed = 0, len(symbols) * shape.norm * hidden, 0
    if ATTENTION in symbols:
        biases = shape.queries + shape.projected_keys_and_values + shape.gates if shape.qkv_bias else 0
        cut += shape.sinks + shape.cut_attention_weights + biases
        whole += shape.latent_weights + (hidden if shape.biases else 0)
        if shape.latent and (indexer := shape.latent.indexer):
            whole += indexer.weights(hidden, shape.latent.queries) + 2 * indexer.width  # its key's norm has a bias
        if shape.qk_norm:
            whole += shape.norm * (shape.latent.normalised if shape.latent else 2 * shape.head_width)
    for symbol, mixer in shape.hybrid.mixers if shape.hybrid else ():
        if symbol in symbols:
            cut += round(hidden * (mixer.projected + mixer.mixed) + mixer.parameters)
    if experts and EXPERTS in symbols:
        width = experts.shared_ffn
        whole += experts.count * (hidden + (1 if shape.biases else 0)) + shape.narrowing_weights  # the router, and these
        if shape.biases and experts.latent:
            whole += hidden + experts.latent
        expert_cut, expert_whole = _mlp(replace(shape, hidden=shape.routed_hidden), experts.ffn)
        routed = experts.count // experts.parallel * (expert_cut // experts.tensor + expert_whole)
    else:
        width = round(shape.dense_ffn) if MLP in symbols else 0
    shared, bias = _mlp(shape, width) if width else (0, 0)
    dense = (cut + shared) // tensor + whole + bias
    in_fewer_bits = shape.quantized is not None and shape.quantized.layers[layer]
    count = Parameters(dense, routed, in_fewer_bits * (dense + routed), dense + routed)
    one = shape.of_layers(range(layer, layer + 1))
    if one.trained is None or one.trained.whole:
        return count
    sizes = (one.trained.rank * (each.inputs + each.outputs) // tensor for each in one.adapters) if one.trained.chosen else ()
    more = round(sum(sizes))
    return count + Parameters(more, layers=more, frozen=count.dense, frozen_expert=count.expert)


def total_parameters(shape: Shape, tied: bool) -> int:
    """Parameters of the whole model, each counted once."""
    experts = shape.experts and replace(shape.experts, parallel=1, tensor=1)
    whole = replace(shape, experts=experts, policy=ActivationPolicy())
    return parameters(whole, Placement(((0,),)), [shape.layers], None, tied)[0].total


def _mlp(shape: Shape, ffn: int) -> tuple[int, int]:
    """Parameters of an MLP that ranks share, and those that each has for itself."""
    before = 2 if shape.gated else 1
    shared = (before + 1) * shape.hidden * ffn
    return (shared + before * ffn, shape.hidden) if shape.biases else (shared, 0)
