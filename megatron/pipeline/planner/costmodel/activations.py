"""Memory of a microbatch on a rank: bytes of activations, from a GPT's shape and from how ranks share it (``shape.policy``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from operator import add
from typing import NamedTuple

from megatron.pipeline.planner.shape.description import SINGLE
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.hybrid import EXPERTS, MLP
from megatron.pipeline.planner.shape.stages import numbers_of_layers
from megatron.pipeline.planner.shape.trained import OUTPUT


class Held(NamedTuple):
    """Bytes of one microbatch in the layers of a stage.

    Attributes:
        checkpoint: from F to B, where B makes the rest again.
        activation: at most, within B; from F to B where nothing is made again.
        retained: from B to W.
    """

    checkpoint: float
    activation: float
    retained: float


def held_by_stages(shape: Shape, layers: Sequence[int], spread: bool, split: bool = True) -> list[Held]:
    """Bytes that every stage holds of a microbatch, the output layer among them unless the vocabulary is spread over all ranks.

    Args:
        layers: of every stage, in the model's order.
        split: as of ``held_by_stage``.
    """
    of_stage = cache(held_by_stage)
    stages = [of_stage(shape.of_layers(numbers), len(numbers), split) for numbers in numbers_of_layers(layers)]
    if spread:
        return stages
    kept = output_activation(shape)
    output = Held(kept, kept, output_retained(shape))
    # A layer of multi-token prediction is a unit of its own, and computes its loss with the output layer.
    of_predictor = [held_by_stage(shape.predictor, shape.predictor.layers, split), output] if shape.mtp_layers else []
    for more in (output, *of_predictor * shape.mtp_layers):
        stages[-1] = Held(*map(add, stages[-1], more))
    return stages


def held_by_stage(shape: Shape, layers: int, split: bool = True) -> Held:
    """Bytes that the layers of a stage hold of a microbatch.

    B goes through the layers, or units of them, from the last to the first: it makes one of them whole again while those before
    it still have what F kept, and those behind it what W needs.

    Args:
        split: whether W is another pass than B.
    """
    held = shape.policy
    layers = round(layers * shape.trained.backward) if shape.trained else layers  # the others keep nothing
    full, input_ = layer_activation(shape), shape.hidden_bytes
    retained = layer_retained(shape) if split else 0.0
    if not layers:
        return Held(0.0, 0.0, 0.0)
    if not held.recompute_layers:
        left = layer_checkpoint(shape)
        # A schedule's own R needs the input of the stage alone.
        kept = layers * left if held.recomputed or held.offloaded else input_
        whole = min(layers, 2 if held.offloaded else 1)  # of one the copies are under way
        most = (layers - whole) * max(left, retained) + whole * full
    elif held.recompute_first:
        again = min(held.recompute_layers, layers)
        kept = again * input_ + (layers - again) * full
        most = max(kept, (again - 1) * max(input_, retained) + (layers - again) * retained + full)
    else:
        unit = min(held.recompute_layers, layers)
        units = math.ceil(layers / unit)
        kept = units * input_
        most = max((units - 1) * input_, (layers - unit) * retained) + unit * full
    return Held(min(kept, most), most, 0.0 if held.weights_in_b else min(layers * layer_retained(shape), most))


def layer_activation(shape: Shape) -> float:
    """Bytes that F of a layer makes for its backward: 34sbh for a plain GPT in 16 bits under fused attention.

    Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", section 4: what W needs
    (``layer_retained``: B's gradients are as large as the tensors that it reads), two dropout masks (2sbh), and without fused
    attention its matrices (5as^2b). t tensor-parallel ranks share all but 10sbh, and under sequence parallelism these as well.
    Queries and keys before their norm come on top, and the copies for all heads of a key's part with the position. Of tokens that
    go to experts there are two copies, as peaks of Mixtral ask for, but one with DeepEP and HybridEP, where nothing keeps what
    experts make (``moe/fused_a2a.py``; their functions and TEGroupedMLP's, which weighs before the last product).
    """
    more = shape.keys_and_values - shape.projected_keys_and_values
    normalised = shape.queries_and_keys if shape.qk_norm and not shape.latent else 0
    further = shape.attention * (normalised + more) + shape.mixer.kept + _kept_again(shape) - _dispatched(shape)
    numbers = _weighed(shape) + shape.tokens * further * shape.policy.of_cut_layers
    kept = shape.policy.number * numbers + _indexed(shape) + layer_masks(shape) + attention_matrices(shape) + _quantized(shape)
    return kept - _unread(shape)


def layer_retained(shape: Shape) -> float:
    """Bytes of a layer that W needs: 32sbh for a plain GPT in 16 bits (Qi et al., table 1).

    These are the inputs of its four products (h, queries, h and the MLP's width) and the gradients of their outputs. Narrow
    vectors from which queries, keys and values are made are outputs and inputs too, and cut as hidden states are. Linears in
    fewer bits keep all of them so.
    """
    trained = shape.trained
    numbers = _weighed(shape) * (trained.whole / (trained.backward or 1.0) if trained else 1.0)
    return _linear_number(shape) * (numbers + shape.tokens * _adapted(shape)[1])


def _linear_number(shape: Shape) -> float:
    """Bytes of a number that linears keep."""
    number, quantized = shape.policy.number, shape.quantized
    return quantized.mean(number, quantized.recipe.number) if quantized else number


def _adapted(shape: Shape) -> tuple[float, float]:
    """Numbers of a token that adapters alone keep from F to B, as a mean over the layers that B passes, and what their W needs.

    Attention keeps its own output, and so the input of the linear behind it.
    """
    trained = shape.trained
    if trained is None or not trained.rank:
        return 0.0, 0.0
    share = trained.chosen / (trained.backward or 1.0)
    sides = [(each.share * trained.rank, *each.held(shape.policy), each.target != "linear_proj") for each in shape.adapters]
    return share * sum(r + read * own for r, read, _, own in sides), share * sum(r + read + made for r, read, made, _ in sides)


def _unread(shape: Shape) -> float:
    """Bytes of the inputs of frozen linears that F does not keep: W alone would read them, or that of an adapter."""
    trained = shape.trained
    frozen = 1 - trained.whole / (trained.backward or 1.0) if trained else 0.0
    return _linear_number(shape) * shape.tokens * (frozen * _linear_inputs(shape) - _adapted(shape)[0])


def _linear_inputs(shape: Shape) -> float:
    """Numbers that linears read of every token, and nothing else does: a router's input is in 16 bits, and is not among them."""
    whole = (shape.parts - shape.share(EXPERTS)) * shape.hidden
    whole += shape.attention * shape.latent.normalised if shape.latent else 0
    cut = shape.ffn + shape.mixer.mixed + _dispatched(shape)
    return whole * shape.policy.of_whole_layers + cut * shape.policy.of_cut_layers


def _indexed(shape: Shape) -> float:
    """Bytes that F keeps of an ``Indexer``: its queries, its key before and after its norm, weights of its heads, and for every
    query the numbers of its keys, in 64 bits."""
    indexer = shape.latent.indexer if shape.latent else None
    if indexer is None:
        return 0.0
    numbers = indexer.heads * indexer.width + 2 * indexer.width + indexer.heads
    return shape.attention * shape.tokens / shape.policy.context * (shape.policy.number * numbers + 8 * indexer.keys)


def _quantized(shape: Shape) -> float:
    """Bytes that F of a layer keeps more, or fewer, where linears are in fewer bits: the inputs of linears take fewer, and
    attention keeps its output, which is an input too, in 16 bits as well.

    The other numbers, which norms, attention and activation functions need, stay in 16 bits.
    """
    quantized, held = shape.quantized, shape.policy
    if quantized is None:
        return 0.0
    own = quantized.recipe.number
    more = (own - held.number) * _linear_inputs(shape) + own * shape.attention * shape.attended * held.of_cut_layers
    return shape.tokens * quantized.mean(0.0, more)


def _weighed(shape: Shape) -> float:
    """Numbers of ``layer_retained``."""
    narrow = shape.latent.width + shape.latent.normalised if shape.latent else 0
    whole = 2 * shape.parts * shape.hidden + shape.attention * narrow
    whole += shape.share(EXPERTS) * shape.narrowing_weights / shape.hidden
    cut = shape.attention * (shape.attended + shape.queries + shape.projected_keys_and_values)
    cut += (
        shape.attention * shape.gates
        + shape.matrices * shape.ffn
        + 2 * _dispatched(shape)
        + shape.mixer.projected
        + shape.mixer.mixed
    )
    return shape.tokens * (whole * shape.policy.of_whole_layers + cut * shape.policy.of_cut_layers)


def layer_masks(shape: Shape) -> float:
    """Bytes of a layer's two dropout masks: 2sbh."""
    return shape.parts * shape.tokens * shape.hidden * shape.policy.of_whole_layers if shape.policy.hidden_masks else 0.0


def attention_matrices(shape: Shape) -> float:
    """Bytes that attention keeps of every query with every key where it is not fused.

    With dropout 5as^2b in 16 bits: the softmax, a mask and what it leaves; without, 2as^2b. A softmax in float32 is 4as^2b, and
    without dropout its copy in 16 bits comes on top. Keys and values are then repeated for heads that share them.
    """
    held = shape.policy
    if not held.attention_matrices:
        return 0.0
    softmax = _softmax_number(shape)
    each = softmax + (held.number + 1 if held.attention_masks else held.number * (softmax > held.number))
    repeated = held.number * (shape.queries + shape.attended - shape.keys_and_values)
    return shape.tokens * shape.attention * (each * shape.seq * shape.heads + repeated) * held.of_cut_layers


def layer_checkpoint(shape: Shape) -> float:
    """Bytes of ``layer_activation`` that are left from F to B without ``policy.recomputed`` and ``policy.offloaded``.

    ``core_attn`` is what attention makes of queries and keys, ``layernorm`` the outputs of norms that are modules of their own
    (megatron-core's ``transformer_layer.py``), ``mlp`` and ``moe`` all within these, ``moe_act`` the outputs of the activation
    functions of experts that some tokens visit (``moe/experts.py``), ``shared_experts`` all within those that every token passes,
    and ``mla_up_proj`` queries, keys and values, which are made from narrow vectors (``multi_latent_attention.py``).
    """
    freed = shape.policy.recomputed | shape.policy.offloaded
    gone = sum(size for by, size in _parts(shape) if freed & {*by.split()})
    return max(layer_activation(shape) - gone, shape.hidden_bytes)


def _parts(shape: Shape) -> list[tuple[str, float]]:
    """Parts of ``layer_activation`` in bytes, each with the names in ``policy`` of which any frees it.

    Those with ``>``, of ``policy.offloaded``, are modules whose input, and what they keep else, goes to host memory:
    megatron-core's ``fine_grained_activation_offload.py`` and its users. A norm that is part of a linear goes with this one.
    """
    experts, latent, hidden = shape.experts, shape.latent, shape.hidden_bytes
    routed, visited = (experts.mean_routed_ffn, experts.mean_visited_ffn) if experts else (0.0, 0.0)
    of_experts = shape.share(EXPERTS) if shape.policy.fused_norms else shape.parts - shape.attention
    of_attention, narrow = shape.norms_alone - of_experts, latent.width + latent.normalised if latent else 0
    cut = [
        ("mlp", shape.matrices * (shape.ffn - routed)),
        ("moe >expert_fc1 >fused_group_mlp", _dispatched(shape)),
        ("moe", _kept_again(shape)),
        ("moe >moe_act >fused_group_mlp", (shape.matrices - 1) * visited),
        ("moe moe_act >fused_group_mlp", visited),
        ("moe shared_experts", shape.matrices * (routed - visited)),
        (f"{'mla_up_proj ' if latent else ''}>core_attn", shape.attention * (shape.queries + shape.keys_and_values)),
        (">attn_proj", shape.attention * shape.attended),
        (">qkv_linear", shape.attention * shape.queries_and_keys * (shape.qk_norm and not latent)),
    ]
    return [(by, width * shape.policy.number * shape.tokens * shape.policy.of_cut_layers) for by, width in cut] + [
        ("core_attn >core_attn", attention_matrices(shape)),
        ("layernorm >qkv_linear", of_attention * hidden),
        (">attn_norm", of_attention * hidden),
        ("layernorm", of_experts * hidden),
        (">mlp_norm", of_experts * hidden),
        (">qkv_linear", (2 * (shape.attention - of_attention) + shape.attention * narrow / shape.hidden) * hidden),
    ]


def layer_temporary(shape: Shape, overlap: bool = False) -> float:
    """Bytes that B of a layer needs for a moment: gradients on both sides of the MLP's activation, of hidden states, and of
    attention's matrices where these stand; or of what another kind of layer makes. Or, if these are more, what experts'
    all-to-alls send and receive.

    Args:
        overlap: whether all-to-alls of one microbatch run while another one computes: both then need theirs at once.
    """
    held = shape.policy
    widest = max([shape.ffn / (shape.share(MLP) + shape.share(EXPERTS) or 1), *(mixer.projected for _, mixer in shape.mixers)])
    mlp = held.number * shape.matrices * widest * held.of_cut_layers
    matrices = 2 * _softmax_number(shape) * shape.seq * shape.heads * held.of_cut_layers if held.attention_matrices else 0.0
    scores = SINGLE * shape.seq / held.context if shape.latent and shape.latent.indexer else 0.0
    computing, exchanging = shape.tokens * (mlp + matrices + scores), exchanged_bytes(shape)
    return (computing + exchanging if overlap else max(computing, exchanging)) + 2 * shape.hidden_bytes


def exchanged_bytes(shape: Shape) -> float:
    """Bytes that a rank sends to the ranks with the experts of one layer, and that it gets from these, on average."""
    experts = shape.experts
    if not experts or experts.parallel == 1:
        return 0.0
    sent, received = (1, experts.parallel) if experts.gathered else (experts.topk, experts.visits)
    return routed_bytes(shape) * (sent + received * experts.tensor)


def output_activation(shape: Shape) -> float:
    """Bytes that megatron-core's output layer keeps until its backward: its input, and the softmax, in float32 unless fused."""
    held = shape.policy
    return shape.hidden_bytes + held.logits_kept * shape.tokens * shape.vocabulary * held.of_cut_layers


def output_retained(shape: Shape) -> float:
    """Bytes of those that its W needs, if it has one: its input, and the gradient of the logits in the model's precision."""
    if not shape.trains(OUTPUT):
        return 0.0
    return shape.hidden_bytes + shape.policy.number * shape.tokens * shape.vocabulary * shape.policy.of_cut_layers


def output_temporary(shape: Shape, copies: int) -> float:
    """Bytes of 16-bit logits, and later of their gradient, in addition to that softmax; a float32 model has only one of them.

    Deferred weight gradients keep the output layer's input, of all ranks, and the gradient of its output.

    Args:
        copies: in float32 that megatron-core's fused cross entropy makes: ``Device.loss_copies``.
    """
    held = shape.policy
    each = (held.number if held.number < held.logits_kept else 0) + SINGLE * copies * held.native_loss
    waiting = held.deferred_logits * held.number
    inputs = waiting * shape.tokens * shape.hidden / held.context
    return (each + waiting) * shape.tokens * shape.vocabulary * held.of_cut_layers + inputs


def shard_activation(shape: Shape, rows: int) -> float:
    """Bytes that S of a shard of ``rows`` rows keeps until T: its input, and its logits unless they are over their limit."""
    tokens, limit = shape.tokens / shape.policy.context, shape.policy.logits_limit
    kept = limit is None or SINGLE * tokens * rows <= limit
    return shape.hidden_bytes + (shape.policy.number * tokens * rows if kept else 0.0)


def routed_bytes(shape: Shape) -> float:
    """Bytes of the same tokens as experts get them."""
    return shape.hidden_bytes * shape.routed_hidden / shape.hidden


def _softmax_number(shape: Shape) -> int:
    """Bytes of a number of attention's softmax."""
    return SINGLE if shape.policy.wide_softmax else shape.policy.number


def _dispatched(shape: Shape) -> float:
    """Width of what goes to experts for every token, as a mean over the layers; ranks that share each expert all get it."""
    return shape.experts.share * shape.experts.visits * shape.routed_hidden * shape.experts.tensor if shape.experts else 0.0


def _kept_again(shape: Shape) -> float:
    """Width of the second copy of ``_dispatched`` that F keeps."""
    return 0.0 if shape.experts and shape.experts.once else _dispatched(shape)
