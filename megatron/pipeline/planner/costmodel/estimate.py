"""Seconds and bytes of every pass of a GPT on a device.

The model of time: a pass is its products, at a share of the device's peak; what its other kernels read and write, at the same
share of the memory's bandwidth (``traffic``); what it waits for of the ranks that share its layers (``links``); and a moment to
begin. Where a GPU was measured, the first two take as many times as long as they did (``Device.times``). The model of memory is
that of ``activations``; ``memory`` adds all else that a rank needs. docs/model.md has the formulas, and how well they agree with
published trainings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from megatron.pipeline.planner.costmodel import activations, traffic
from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.costmodel.links import Links, exchange_seconds, hop_seconds, layer_communication, with_messages
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, MemoryUnit, StageCosts, VocabularyCosts
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, linear
from megatron.pipeline.planner.schedule.core.stage_costs import PARTS
from megatron.pipeline.planner.schedule.families import Family
from megatron.pipeline.planner.shape import gpt
from megatron.pipeline.planner.shape.activation_policy import ITERATION
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.gpt import Shape, Work
from megatron.pipeline.planner.shape.hybrid import MLP, Pattern
from megatron.pipeline.planner.shape.shards import Shards
from megatron.pipeline.planner.shape.stages import numbers_of_layers
from megatron.pipeline.planner.shape.trained import EMBEDDING, OUTPUT

# Seconds of the host in F, B and W of a layer with attention and experts in 16 bits, fitted with the efficiencies of
# benchmarks/published_throughput.py; for a product of one expert that is launched alone, and for a CUDA graph; shares of modules.
LAYER, PRODUCT, REPLAY = Work(2.2e-3, 2.7e-3, 0.55e-3), 4e-5, 5e-5
HOST = {"attn": 0.35, "mamba": 0.35, "mlp": 0.15, "moe_router": 0.15, "moe_preprocess": 0.1, "moe": 0.4}


def estimate(
    shape: Shape,
    placement: Placement,
    layers: Sequence[int],
    device: Device,
    vocabulary: Vocabulary | None = None,
    split: bool = True,
    links: Links | None = None,
    exposed_hops: float = 0.0,
) -> Costs:
    """Seconds and bytes of every pass.

    Args:
        layers: of every stage, in the model's order.
        vocabulary: how the vocabulary is sharded over all ranks; None where the first and the last stage have it.
        split: whether the schedule has B and W apart: what B makes again is then held until W.
        links: what ranks talk over; by default all of them are on one node.
        exposed_hops: for how many messages a rank waits in every F and every B, instead of computing meanwhile: see ``Family``.
    """
    links = links or Links.within(device)
    # Collectives of a sharded vocabulary wait for all ranks, beside passes of layers. Interlaced, ranks wait for them instead.
    slower = device.beside_communication if vocabulary in (Vocabulary.ONE_BARRIER, Vocabulary.TWO_BARRIERS) else 1.0
    hop = hop_seconds(shape, links)
    gap = device.latency + exposed_hops * hop

    @cache
    def of_layer(one: Shape) -> tuple[Work, float, float, dict[str, float]]:
        seconds = layer_seconds(one, device, links).times(slower)
        parts = {name: slower * part for name, part in layer_parts(one, device, links).items()}
        return seconds, slower * saved_seconds(one, device, links), recomputed_seconds(one, device, seconds), parts

    @cache
    def stage(one: Shape, count: int, gap: float = 0.0) -> StageCosts:
        seconds, saved, remade, parts = of_layer(one)
        waits = Work(gap, gap, device.latency if gap else 0.0)
        known = {name: part * count for name, part in parts.items()} | ({"layers": count} if parts else {})
        costs = _stage(seconds.times(count).plus(waits), waits.weight + saved * count)
        if shielding := shielded_seconds(one, device, links):
            known |= dict(zip(("behind", "saved"), (slower * value * count for value in shielding), strict=True))
        costs = _as_trained(replace(costs, recompute=remade * count, **known), one, count, device)
        if one.policy.weights_in_b:
            costs = replace(costs, backward=costs.value("fused"), weight=0.0, fused=None, behind=None, saved=None)
        return costs

    stages = [stage(shape.of_layers(numbers), len(numbers), gap) for numbers in numbers_of_layers(layers)]
    shards = VocabularyCosts()
    if vocabulary is not None:
        shards = shard_costs(shape, placement.ranks, device, vocabulary, links)
    else:
        forward, backward = map(device.moving, traffic.embedding_traffic(shape))
        embedding = StageCosts(forward, backward * shape.trains(EMBEDDING), 0.0, 0.0, 0.0)
        ends = [(0, embedding), (placement.last_stage, output_costs(shape, device))]
        # A layer of multi-token prediction is a unit of its own, and computes its loss with the output layer.
        ends += shape.mtp_layers * [
            (placement.last_stage, stage(shape.predictor, shape.predictor.layers)),
            (placement.last_stage, output_costs(shape, device)),
        ]
        for index, more in ends:
            again = 0.0 if shape.policy.recomputes else more.recompute  # flags recompute layers alone
            stages[index] = _sum(stages[index], replace(more, recompute=again))
    held = activations.held_by_stages(shape, layers, vocabulary is not None, split)
    return Costs(
        tuple(replace(seconds, **own._asdict()) for seconds, own in zip(stages, held, strict=True)),
        hop,
        shards,
        CopyCosts(1 / device.to_host, 1 / device.to_device),
        MemoryUnit.BYTES,
        device.beside_communication,
    )


def costs_of_training(
    model: ModelDescription,
    placement: Placement,
    layers: Sequence[int],
    device: Device,
    links: Links,
    family: Family | None = None,
) -> Costs:
    """Seconds and bytes of passes, without what backwards make again (``remade``).

    Args:
        layers: of every stage.
        family: of its schedule; None for costs that any family and number of ranks plans for: every message takes what the
            slowest does, and no waits for messages count.
    """
    split, exposed = not model.makes_weights_again, 0.0
    if family is not None:
        overlaps = family.name == "interleaved" and model.overlap_p2p_comm
        waits = model.is_stock and model.pipeline_model_parallel_size > 1 and not overlaps
        split, exposed = split and not family.fused, family.exposed_hops if waits else 0.0
    shape = Shape.of(model)
    costs = estimate(shape, placement, layers, device, model.spread, split, links, exposed)
    costs = costs if family is None else with_messages(costs, shape, links)
    # A plan joins B and W where BW hides sums over tensor-parallel ranks, not to save a pass's start alone.
    return costs if fuses(model, family) else cutting.without_fused(costs)


def fuses(model: ModelDescription, family: Family | None = None) -> bool:
    """Tell whether B and W run as one pass, always or where the plan likes."""
    return bool(family and family.fused) or model.makes_weights_again or model.tensor_model_parallel_size > 1


def remade(model: ModelDescription, costs: Costs) -> Costs:
    """The costs where backwards make activations again, if they do."""
    return cutting.with_recomputation(costs, model.makes_weights_again) if Shape.of(model).policy.recomputes else costs


def by_layer(model: ModelDescription, device: Device, depth: int, links: Links) -> Costs:
    """Costs of a model whose every layer is a stage, and whose first and last stage have all that is no layer.

    Args:
        depth: stages of its pipeline, whose passes each begin with the device's latency; layers share these.
    """
    layers = [0, *[1] * model.num_layers, 0]
    gpu = replace(device, latency=device.latency * depth / len(layers))
    costs = remade(model, costs_of_training(model, linear(len(layers)), layers, gpu, links))
    pattern = model.hybrid_layer_pattern
    return replace(costs, pattern=Pattern.of(pattern).whole if pattern else "")


def layer_seconds(shape: Shape, device: Device, links: Links) -> Work:
    """Seconds of F, B and W of one layer, on one of the ranks that share it."""
    attention = _attention(shape, device).by(device.times)
    waits = layer_communication(shape, links, (attention.forward, attention.backward), _beside_exchange(shape, device))
    computing = computing_seconds(shape, device).plus(Work(*waits, 0.0))
    return Work(*map(max, computing, launch_seconds(shape, device)))


def _beside_exchange(shape: Shape, device: Device) -> tuple[float, float]:
    """Seconds of F and B of the experts that every token passes, where these run beside the exchange of the others' tokens."""
    experts = shape.experts
    if not (experts and experts.beside):
        return 0.0, 0.0
    operations = 2 * shape.tokens * shape.hidden * shape.matrices * experts.share * experts.shared_ffn
    each = _linears(shape, device, operations * shape.policy.of_cut_layers)
    return each, each


def saved_seconds(shape: Shape, device: Device, links: Links) -> float:
    """Seconds that B and W of a layer take less as one pass: the sums over tensor-parallel ranks that W's products hide.

    Of megatron-core's linear layers, those that are cut by columns (queries, keys and values; the first of the MLP) begin to sum
    their inputs' gradients, compute their weights' gradients, and wait then: ``LinearWithGradAccumulationAndAsyncCommunication``
    of ``megatron.core.tensor_parallel.layers``. A sum is an all-reduce, or a reduce-scatter under sequence parallelism, which is
    half of one. B alone has nothing to hide it behind. Latent attention and experts count as if nothing were hidden. Of a B that
    waits for the host nothing is saved.
    """
    columns = [] if shape.latent else [(shape.attention, float(shape.queries + shape.keys_and_values))]
    if shape.experts is None:
        columns.append((shape.share(MLP), (2 if shape.gated else 1) * shape.dense_ffn))
    columns += [(share, mixer.projected) for share, mixer in shape.mixers]
    products, each = _products(shape, device, [width for _, width in columns]), _sum_seconds(shape, links)
    hidden = sum(share * links.hides(each, product) for (share, _), product in zip(columns, products, strict=True))
    return min(hidden, layer_seconds(shape, device, links).backward - launch_seconds(shape, device).backward)


def shielded_seconds(shape: Shape, device: Device, links: Links) -> tuple[float, float] | None:
    """Seconds of the weight gradients of a layer's row-parallel linears, and what B and W save together where B computes them.

    The products of attention's and the MLP's last linear run while the sum of the linear before it, cut by columns, is under way
    (``saved_seconds``). None where there is none to hide.
    """
    if shape.latent or shape.hybrid or shape.policy.tensor == 1:
        return None
    widths = [float(shape.attended), *([shape.ffn] if shape.experts is None else [])]
    rows, each = [device.weight * product for product in _products(shape, device, widths)], _sum_seconds(shape, links)
    return sum(rows), sum(links.hides(each, product) for product in rows)


def _sum_seconds(shape: Shape, links: Links) -> float:
    """Seconds of the sum of an input's gradient over tensor-parallel ranks."""
    held = shape.policy
    number = held.number * shape.tokens * shape.hidden / held.context
    return links.tensor.all_reduce(number, held.tensor) / (2 if held.sequence_parallel else 1)


def _products(shape: Shape, device: Device, widths: Sequence[float]) -> list[float]:
    """Seconds of products of hidden states with a rank's part of these widths."""
    operations = 2 * shape.tokens * shape.hidden * shape.policy.of_cut_layers
    return [_linears(shape, device, operations * width) for width in widths]


def layer_parts(shape: Shape, device: Device, links: Links) -> dict[str, float]:
    """Seconds of those parts of a layer's passes that take turns with another microbatch's in a braid, by ``PARTS``.

    None where no ranks share experts. The rest of each pass is attention, the router, and experts that all tokens pass. Where
    the host takes longer than a pass without its exchanges, these count only as far as they make it longer.
    """
    if not (shape.experts and shape.experts.parallel > 1 and shape.experts.share):
        return {}
    exchange = [exchange_seconds(shape, links)] * 2
    forward, backward = map(device.moving, traffic.expert_traffic(shape))
    computing = _linear_work(shape, device, gpt.expert_work(shape), traffic.expert_products_traffic(shape))
    computing = computing.plus(Work(forward, backward, 0.0)).by(device.times)
    longer = zip(exchange, layer_seconds(shape, device, links), launch_seconds(shape, device), strict=False)
    there, back = (min(each, (whole - least) / 2) for each, whole, least in longer)
    seconds = (there, computing.forward, there, back, computing.backward, back, computing.weight)
    return dict(zip(PARTS, seconds, strict=True))


def computing_seconds(shape: Shape, device: Device) -> Work:
    """The same from the device's efficiency, and without communication.

    All of attention counts, also what a causal mask hides: its kernels leave that out, and are less efficient than products.
    """
    forward, backward = map(device.moving, traffic.layer_traffic(shape))
    others = gpt.linear_work(shape).plus(gpt.expert_work(shape).times(-1.0))
    linears = _linear_work(shape, device, others, traffic.linear_traffic(shape))
    experts = _linear_work(shape, device, gpt.expert_work(shape), traffic.expert_products_traffic(shape))
    return _attention(shape, device).plus(linears).plus(experts).plus(Work(forward, backward, 0.0)).by(device.times)


def recomputed_seconds(shape: Shape, device: Device, whole: Work) -> float:
    """Seconds in which B makes again what ``ActivationPolicy.recomputed`` says of a layer, or all of it.

    Args:
        whole: seconds of a layer's passes.
    """
    held = shape.policy
    if not (held.recomputed or held.offloaded):
        return whole.forward
    attention = _attention(shape, device).forward if "core_attn" in held.recomputed else 0.0
    weights = {"mlp": shape.mlp_weights, "moe": shape.expert_weights, "mla_up_proj": shape.attention * shape.widening_weights}
    operations = 2 * shape.tokens * sum(weights[name] for name in held.recomputed & weights.keys())
    moved = 0.0  # what norms and activation functions read and write
    if "layernorm" in held.recomputed:
        moved += 2 * shape.norms_alone * shape.hidden_bytes
    if "moe_act" in held.recomputed and shape.experts:
        each = held.number * shape.tokens * held.of_cut_layers * shape.experts.mean_visited_ffn
        moved += shape.matrices * each
    products = attention + _linears(shape, device, operations * held.of_cut_layers)
    return min(whole.forward, device.forward * (products + device.moving(moved)))


def output_costs(shape: Shape, device: Device) -> StageCosts:
    """Seconds that the output layer and the loss add to the last stage."""
    products = _seconds(device, gpt.output_work(shape).times(shape.policy.of_cut_layers))
    moved = map(device.moving, traffic.output_traffic(shape))
    work = Work(*map(math.hypot, products, moved))
    forward, backward = map(device.moving, traffic.loss_traffic(shape, shape.vocabulary / shape.policy.tensor))
    costs = _stage(work.plus(Work(forward, backward, 0.0)))
    if shape.trained:
        costs = costs.times(Load(backward=any(shape.trained.layers), weight=shape.trains(OUTPUT)))
    # It has no row-parallel linear before it, and computes its own weight's gradient. Its sum counts as if it were hidden always.
    return replace(costs, behind=costs.weight) if shape.policy.tensor > 1 else costs


def _as_trained(costs: StageCosts, shape: Shape, count: int, device: Device) -> StageCosts:
    """The costs of layers of which not all train: without B where nothing before needs it, without W of what is frozen, and with
    an adapter's two products, which take as long as their numbers are read and written, in each of F, B and W.

    F reads an adapter's input, writes its output and adds that to the linear's; B does so the other way; W reads both.
    """
    trained = shape.trained
    if trained is None:
        return costs
    costs = costs.times(Load(backward=trained.backward, weight=trained.whole))
    costs = replace(costs, recompute=costs.recompute * trained.backward)
    inputs, outputs = (sum(each.held(shape.policy)[side] for each in shape.adapters) for side in (0, 1))
    products = device.seconds(2 * shape.tokens * trained.rank * (inputs + outputs))
    moved = (inputs + 3 * outputs, 3 * inputs + outputs, inputs + outputs)
    each = [max(products, device.moving(shape.policy.number * shape.tokens * numbers)) for numbers in moved]
    more = _stage(Work(*each).times(count * trained.chosen * bool(trained.rank)))
    return _sum(costs, more)


def shard_costs(shape: Shape, ranks: int, device: Device, vocabulary: Vocabulary, links: Links | None = None) -> VocabularyCosts:
    """The costs of every rank's share of embedding and output layer.

    Of the three products with a shard's rows, S has the logits and with one barrier the gradient by its input, T the others
    (arXiv 2411.05288, algorithms 1 and 2).
    """
    links = links or Links.within(device)
    rows = shards(shape, ranks).rows
    product = device.seconds(gpt.row_work(shape) * rows) / shape.policy.context
    early = 2 if vocabulary is Vocabulary.ONE_BARRIER else 1
    loss = list(map(device.moving, traffic.loss_traffic(shape, rows, sharded=True)))
    embedding = list(map(device.moving, traffic.embedding_traffic(shape, 1 / ranks)))
    return VocabularyCosts(
        S=device.latency + early * product + loss[0] + (loss[1] if early == 2 else 0.0),
        T=device.latency + (3 - early) * product + (loss[1] if early == 1 else 0.0),
        IF=device.latency + embedding[0],
        IB=device.latency + embedding[1],
        activation=activations.shard_activation(shape, rows),
        exchange=links.hop.all_gather(shape.hidden_bytes, ranks),
        ranks=ranks,
    )


def shards(shape: Shape, ranks: int) -> Shards:
    """Shards of the vocabulary over the ranks of a pipeline, and the tensor-parallel ones of each."""
    return Shards.of(shape.vocabulary, shape.vocabulary, ranks * shape.policy.tensor)


def _seconds(device: Device, work: Work) -> Work:
    return Work(*map(device.seconds, work))


def _attention(shape: Shape, device: Device) -> Work:
    """Seconds of attention's products, on one of the ranks that share them."""
    return gpt.attention_work(shape).times(shape.policy.of_cut_layers / (device.peak * device.attention))


def launch_seconds(shape: Shape, device: Device) -> Work:
    """Seconds in which the host launches the kernels of a layer: no pass of it takes less, in any precision.

    With experts it waits for the router's numbers of tokens, else it runs ahead: the slower of host and GPU sets the pace. In
    fewer bits twice as many kernels count, with those that cast inputs and gradients: no more, so that these never make a pass
    take more than twice as long. Experts of a rank are one product where they are grouped, and else launched one by one. A CUDA
    graph takes ``REPLAY`` for all kernels of a module. What was measured (``Device.times``) has it in it.
    """
    experts, graphed = shape.experts, shape.policy.graphed
    if device.is_measured or ITERATION in graphed:
        return Work(0.0, 0.0, 0.0)
    routed = experts.share if experts else 0.0
    counts = {"attn": shape.attention, "mamba": sum(share for share, _ in shape.mixers), "mlp": shape.share(MLP)}
    counts |= dict.fromkeys(("moe_router", "moe_preprocess", "moe"), routed)
    alone = sum(HOST[name] * count for name, count in counts.items() if name not in graphed)
    replayed = REPLAY * sum(count for name, count in counts.items() if name in graphed)
    # The gate's product is one with the other before the activation.
    single = 0.0 if experts is None or experts.grouped else 2 * PRODUCT * routed * experts.count / experts.parallel
    own = LAYER.times(alone).plus(Work(single, single, single)).times(1 + (shape.quantized.share if shape.quantized else 0.0))
    return own.plus(Work(replayed, replayed, replayed))


def _linear_work(shape: Shape, device: Device, work: Work, sizes: Sequence[float]) -> Work:
    """Seconds of products of linears that read and write ``sizes``, on one of the ranks that share them."""
    products = (_linears(shape, device, operations) for operations in work.times(shape.policy.of_cut_layers))
    return Work(*(math.hypot(each, device.moving(size)) for each, size in zip(products, sizes, strict=True)))


def _linears(shape: Shape, device: Device, operations: float) -> float:
    """Seconds of products of linears in the precision that these have, as a mean over the layers."""
    whole, quantized = device.seconds(operations), shape.quantized
    return quantized.mean(whole, device.seconds(operations, quantized.recipe.peak)) if quantized else whole


def _stage(seconds: Work, saved: float = 0.0) -> StageCosts:
    """Args: saved: seconds that B and W as one pass take less."""
    forward, backward, weight = seconds
    return StageCosts(forward, backward, weight, 0.0, 0.0, fused=backward + weight - saved, recompute=forward)


def _sum(one: StageCosts, other: StageCosts) -> StageCosts:
    """Both in one stage; its parts and its layers are those of the halves that have some."""
    costs: dict[str, Any] = {}
    for name in (field.name for field in fields(StageCosts) if field.name not in ("movable", "slow")):  # all of it is movable
        if name not in (*PARTS, "layers", "behind", "saved"):
            costs[name] = one.value(name) + other.value(name)
        elif given := [value for half in (one, other) if (value := getattr(half, name)) is not None]:
            costs[name] = sum(given)
    return StageCosts(**costs)
