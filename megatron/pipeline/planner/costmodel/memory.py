"""Memory of its GPU that every rank of a training needs, from the flags and the schedule alone.

``predict`` is the one place for that. It counts

- weights, gradients and optimizer state, of all parameters (``parameters``);
- activations: the schedule, replayed with what its passes hold (``activations``, ``estimate``, ``simulate``);
- the largest temporary in addition to them, or in the optimizer's step where that is larger;
- a constant for all else, ``OVERHEAD``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from megatron.pipeline.planner.costmodel import activations
from megatron.pipeline.planner.costmodel.device import Device, named
from megatron.pipeline.planner.costmodel.estimate import estimate
from megatron.pipeline.planner.costmodel.parameters import Parameters, parameters
from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.planner.schedule.core.names import counted
from megatron.pipeline.planner.schedule.core.passes import Kind, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Compute
from megatron.pipeline.planner.schedule.lower.slots import slots_of
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.transform import fuse, recompute
from megatron.pipeline.planner.shape.description import HALF, SINGLE, ModelDescription
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.precision import Quantized
from megatron.pipeline.planner.shape.stages import layers_of_ranks, numbers_of_layers

GIB = 2**30
# CUDA's context, NCCL's buffers, the workspaces of products, messages, and what the allocator cannot use: a guess, not measured.
OVERHEAD = 2 * GIB
_ROUNDS = 4  # microbatches a rank that are planned for
SHARE = 0.95  # of a GPU's memory that a prediction may take: it is off by a few percent


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        layers: transformer layers that it has.
        parameters: that it has; with tensor parallelism, its share of them.
        state: weights, gradients and optimizer state.
        activations: at their peak.
        microbatches: that are held then, from F to W, a chunk of several counting as its part.
        temporary: in addition to the activations, or the excess of the optimizer's step over them.
        workspaces: of libraries, a part of ``OVERHEAD`` that torch allocates.
        graphs: that CUDA graphs keep in addition to what microbatches hold without them (``graph_bytes``).
    """

    layers: int
    parameters: int
    state: float
    activations: float
    microbatches: float
    temporary: float
    workspaces: float = 0.0
    graphs: float = 0.0

    @property
    def counted(self) -> float:
        """All but ``OVERHEAD``."""
        return self.state + self.activations + self.temporary + self.graphs

    @property
    def allocated(self) -> float:
        """Bytes that torch's ``max_memory_allocated`` would give."""
        return self.counted + self.workspaces

    @property
    def total(self) -> float:
        return self.counted + OVERHEAD


def usable(memory: float) -> float:
    """Bytes of a GPU's memory that a prediction may take, so that the training fits although the prediction is off."""
    return SHARE * memory


def predict(model: ModelDescription, schedule: Schedule, layers: Sequence[int], gpu: Device | None = None) -> list[RankMemory]:
    """The memory of every pipeline rank.

    Args:
        schedule: what an iteration runs; its vocabulary is sharded if the schedule says so, even if ``model`` differs.
        layers: transformer layers of every stage, in the model's order.
        gpu: whose workspaces, and copies of logits, count.

    Raises:
        ValueError: ``layers`` are of another number of stages than the schedule has.
    """
    shape, placement = Shape.of(model), schedule.placement
    if len(layers) != placement.ranks * placement.chunks:
        raise ValueError(
            f"layers of {len(layers)} stages for a schedule of {placement.ranks} ranks with "
            f"{counted(placement.chunks, 'chunk')} each: give one number for every stage"
        )
    microbatches = activation_peaks(schedule, uniform(placement))
    schedule = recomputed(model, shape, schedule)
    split = any(work.kind is Kind.W for row in schedule.passes for work in row)
    gpu = gpu or any_device(shape)
    costs = estimate(shape, placement, layers, gpu, schedule.vocabulary, split)
    held = activation_peaks(schedule, costs)
    all_fixed = fixed_memory(model, placement, layers, schedule.vocabulary, gpu)
    graphs = graph_bytes(shape, schedule, layers, microbatches) if shape.policy.layer_graphs else [0.0] * placement.ranks
    workspaces = gpu.grouped_workspaces if model.moe_grouped_gemm else gpu.workspaces
    return [
        RankMemory(
            layers=count,
            parameters=fixed.count.total,
            state=fixed.state,
            activations=peak,
            microbatches=held_then,
            temporary=max(fixed.temporary, step_bytes(model, fixed.count.trained) - peak),
            workspaces=workspaces,
            graphs=graphed,
        )
        for count, fixed, peak, held_then, graphed in zip(
            layers_of_ranks(layers, placement), all_fixed, held, microbatches, graphs, strict=True
        )
    ]


def graph_bytes(shape: Shape, schedule: Schedule, layers: Sequence[int], microbatches: Sequence[float]) -> list[float]:
    """Bytes of every rank that CUDA graphs of layers keep: an estimate, as if whole layers were captured.

    Where W is a pass, graphs are captured by slot: each of a chunk's slots, the most microbatches between F and W, has an input,
    an output's gradient and an input's gradient for each layer, and a pool in which one layer's temporaries stay. Megatron-LM's
    own capture keeps the gradient of a layer's output for each microbatch that is held.

    Args:
        layers: of every stage, in the model's order.
        microbatches: that every rank holds at its peak.
    """
    placement = schedule.placement
    if not any(work.kind is Kind.W for row in schedule.passes for work in row):
        rows = zip(layers_of_ranks(layers, placement), microbatches, strict=True)
        return [shape.hidden_bytes * count * held for count, held in rows]
    pool, found = activations.layer_temporary(replace(shape, experts=None)), []
    for stages, row in zip(placement.stages, schedule.passes, strict=True):
        slots = slots_of(tuple(map(Compute, row)), stages)
        of_chunks = (3 * shape.hidden_bytes * layers[stage] + pool * (layers[stage] > 0) for stage in stages)
        found.append(sum(len(set(one)) * each for one, each in zip(slots, of_chunks, strict=True)))
    return found


@dataclass(frozen=True)
class FixedMemory:
    """Memory of a rank in addition to activations, in bytes, under any schedule.

    Attributes:
        count: its parameters.
        state, temporary: as in ``RankMemory``, the latter without the optimizer's step.
    """

    count: Parameters
    state: float
    temporary: float

    @property
    def total(self) -> float:
        """With ``OVERHEAD``; the rest of a GPU's memory is for activations."""
        return self.state + self.temporary + OVERHEAD


def fixed_memory(
    model: ModelDescription, placement: Placement, layers: Sequence[int], vocabulary: Vocabulary | None, gpu: Device | None = None
) -> list[FixedMemory]:
    """Memory of every rank in addition to activations; arguments as in ``predict``."""
    shape = Shape.of(model)
    counts = parameters(shape, placement, layers, vocabulary, model.tied)
    output_rank = None if vocabulary else placement.home(placement.last_stage)[0]
    of_layers = activations.layer_temporary(shape, model.overlap_moe_expert_parallel_comm)
    found = []
    for rank, (has, count) in enumerate(zip(layers_of_ranks(layers, placement), counts, strict=True)):
        temporary = of_layers if has else 0.0
        if rank == output_rank:
            temporary = max(temporary, activations.output_temporary(shape, (gpu or Device).loss_copies))
        found.append(FixedMemory(count, state_bytes(model, count, gpu), temporary))
    return found


@dataclass(frozen=True)
class StageSizes:
    """Bytes that one microbatch holds on every stage.

    Attributes:
        layers: of its transformer layers, from F to B.
        output: of the output layer and the loss, from F to B; 0 but on the last stage, and there with a spread vocabulary.
        retained: of these, from B to W.
        making: that B makes again, for a moment.
        grows: whether W needs more of some layers than F keeps of them.
        trained: shares of B and W that its layers have, where not all train.
    """

    layers: tuple[float, ...]
    output: tuple[float, ...]
    retained: tuple[float, ...]
    making: tuple[float, ...]
    grows: bool
    trained: tuple[tuple[float, float], ...]


def costs_in_bytes(model: ModelDescription, placement: Placement, layers: Sequence[int], vocabulary: Vocabulary | None) -> Costs:
    """Costs with the bytes of one microbatch, and seconds that mean nothing; arguments as in ``predict``."""
    shape = Shape.of(model)
    return estimate(shape, placement, layers, any_device(shape), vocabulary, not model.makes_weights_again)


def enough_microbatches(count: int, ranks: int) -> int:
    """Microbatches to plan for in a prediction: with further ones memory grows no more, and time by as much with each."""
    fewer = max(_ROUNDS * ranks, 2 * ranks + count % ranks)
    fewer += (count - fewer) % ranks  # interleaved wants multiples of the ranks
    return min(count, fewer)


def any_device(shape: Shape) -> Device:
    """A GPU that has the products, where none is named: activations are the same on all, workspaces hardly differ."""
    return named("GB200" if shape.quantized and shape.quantized.recipe.peak != "fp8" else "H100-80GB")


def stage_sizes(model: ModelDescription, layers: Sequence[int], spread: bool) -> StageSizes:
    """Sizes of the stages of a model.

    Args:
        layers: as of ``predict``.
        spread: whether the vocabulary is spread over all ranks.
    """
    shape, split = Shape.of(model), not model.makes_weights_again
    alone, whole = (activations.held_by_stages(shape, layers, each, split) for each in (True, spread))
    kept = attrgetter("checkpoint" if shape.policy.recomputes else "activation")
    return StageSizes(
        tuple(map(kept, alone)),
        tuple(kept(every) - kept(own) for every, own in zip(whole, alone, strict=True)),
        tuple(every.retained - own.retained for every, own in zip(whole, alone, strict=True)),
        tuple(stage.activation - kept(stage) for stage in alone),
        any(stage.retained > kept(stage) for stage in alone),
        tuple(shape.of_layers(numbers).passes for numbers in numbers_of_layers(layers)),
    )


def state_bytes(model: ModelDescription, count: Parameters, gpu: Device | None = None) -> float:
    """Bytes of a rank's weights, and of the gradients and optimizer state of those that train.

    For each parameter of 16 bits that is 2 for it, 4 or 2 for its gradient (``--accumulate-allreduce-grads-in-fp32``), and 4 for
    the optimizer's own copy with Adam's 8 for two moments; in float32 the optimizer has no copy. ``--use-distributed-optimizer``
    cuts what is the optimizer's over the ranks with the same parameters, ``--post-validation`` keeps it twice, and
    ``--optimizer-cpu-offload`` has a fraction of it in host memory. ``--use-precision-aware-optimizer`` says what each takes; its
    copy in float32 shares 16 bits with weights in bfloat16. Linears in fewer bits have copies of their weights, or those alone.
    Muon has one moment of every matrix of a layer, and Adam's two of all else; norms and biases count as matrices.
    """
    weight, quantized, own = model.number, Quantized.of(model), count.trained
    moments = float(2 * SINGLE if model.optimizer == "adam" else SINGLE * (model.sgd_momentum > 0))
    if model.muon:
        moments -= SINGLE * own.layers / max(1, own.total)
    copy: float = SINGLE if weight < SINGLE else 0
    if model.use_precision_aware_optimizer:
        moments = model.exp_avg_bytes + model.exp_avg_sq_bytes
        copy = model.main_params_bytes
        if model.bf16 and copy == SINGLE and not (quantized and quantized.kept):
            copy = HALF
    here = 1 - model.optimizer_offload_fraction if model.optimizer_cpu_offload else 1.0
    undo = moments + SINGLE if model.undoes_steps else 0
    weights: float = count.total * weight
    if quantized:
        own_bytes = quantized.recipe.copies((gpu or Device).transposes) * quantized.recipe.number
        weights += count.quantized * (own_bytes - (weight if quantized.kept else 0))
    return weights + own.total * gradient_bytes(model) + (here * (moments + copy) + undo) * optimizer_parameters(model, own)


def step_bytes(model: ModelDescription, count: Parameters) -> float:
    """Bytes that the optimizer's step makes: gradients in float32, where they are not and are to be."""
    wide = not model.use_precision_aware_optimizer or model.main_grads_bytes == SINGLE
    return SINGLE * optimizer_parameters(model, count) if gradient_bytes(model) < SINGLE and wide else 0.0


def gathered_bytes(model: ModelDescription, count: Parameters) -> float:
    """Bytes of a parameter that ranks gather, as a mean."""
    weight, quantized = model.number, Quantized.of(model)
    fewer = weight - quantized.recipe.gathered if quantized and quantized.kept else 0
    return weight - fewer * count.quantized / max(1, count.total)


def gradient_bytes(model: ModelDescription) -> int:
    """Bytes of the gradient of one parameter."""
    return SINGLE if model.accumulate_allreduce_grads_in_fp32 else model.number


def optimizer_parameters(model: ModelDescription, count: Parameters) -> float:
    """Parameters whose optimizer state a rank stores; Muon's are not cut, or matrix by matrix over the ranks (``dist_muon``)."""
    if model.muon == "muon" or not (model.muon or model.use_distributed_optimizer):
        return count.total
    if not count.expert:
        return count.dense / model.copies
    return count.dense / model.copies + count.expert / expert_copies(model)


def expert_copies(model: ModelDescription) -> int:
    """Number of ranks with the same experts of a layer."""
    ranks = model.copies * model.tensor_model_parallel_size
    return ranks // (model.expert_tensor * model.expert_model_parallel_size)


def recomputed(model: ModelDescription, shape: Shape, schedule: Schedule) -> Schedule:
    """The schedule with an R where B makes activations again; one that has R already stays."""
    if not shape.policy.recomputes:
        return schedule
    stages = frozenset(range(schedule.placement.ranks * schedule.placement.chunks))
    return recompute(fuse(schedule, stages) if model.makes_weights_again else schedule, stages)
