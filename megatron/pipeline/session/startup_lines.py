"""The lines that a run prints at its start: schedule, split of the model, plan, and what limits it."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from megatron.pipeline.distributed.device import device_memory, this_device
from megatron.pipeline.flags.config import microbatch_counts
from megatron.pipeline.flags.facts import cautions, of_flags
from megatron.pipeline.flags.settings import PROFILE, Settings
from megatron.pipeline.flags.validation import has_transformer_engine
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.model.layout import balances_letters, decoder_layers, last_stage_in_layers
from megatron.pipeline.planner import (
    Objective,
    Placement,
    PlanCache,
    Shards,
    activation_peaks,
    counted,
    kinds,
    rank_memory,
    topics,
    uniform,
    view,
)
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session.memory import knows_sizes, more_than_stock, predicted_memory, stock_memory

_ONE_QUEUE = (
    " WARNING: CUDA_DEVICE_MAX_CONNECTIONS is 1: passes may wait behind copies to and from host memory; "
    "unset it, or set it to 8, unless tensor or context parallelism needs it"
)

_NO_ENGINE = (
    " WARNING: the package transformer-engine is not installed: layers are megatron-core's own (--transformer-impl local), whose "
    "attention is not fused and takes more time and memory"
)

_WHEN = {
    "measured": "synchronous steps first, to measure their cost; then steps ahead while they pay",
    "always": "every step is taken ahead, unless something other than the next iteration follows it",
}


def first_words(args: Settings, pipeline: Pipeline, loaded: Path | None) -> list[str]:
    """Lines about the schedule, the ranks and the first iteration."""
    sizes = (
        f"{args.tensor_model_parallel_size} tensor x {args.pipeline_model_parallel_size} pipeline x "
        f"{args.context_parallel_size} context x {args.data_parallel_size} data parallel"
    )
    words = f" schedule {pipeline.name} on {counted(torch.distributed.get_world_size(), 'rank')} ({sizes})"
    if loaded:
        return [f"{words}, {'with the weights of' if args.finetune else 'going on from'} {loaded}"]
    missing = [f" WARNING: no checkpoint in {args.load}: training starts from iteration 0 with new weights"] if args.load else []
    return [words, *missing]


def buckets_in_words(buckets: int | None, setting: str) -> list[str]:
    """A line about a plan's buckets of a chunk, if there is a plan; ``setting`` is the user's to have others."""
    words = f"the gradients of a chunk are reduced in {counted(buckets or 0, 'bucket')}, as planned; {setting} sets another size"
    return [words] if buckets else []


def plan_in_words(args: Settings, pipeline: Pipeline, knows_memory: bool = True) -> list[str]:
    """Lines about the split of the model, the plan of the largest iteration, and what limits it.

    Args:
        knows_memory: whether the formulas of memory are for a model like this.
    """
    knows_memory = knows_memory and knows_sizes(args)
    lines = [*pipeline.plans.notes]
    with suppress(ValueError) if pipeline.is_stock else nullcontext():  # it also trains what our schedules could not place
        lines.append(_plan(args, pipeline, knows_memory))
    if knows_memory and not pipeline.is_stock:
        lines += _memory(args, pipeline)
    if torch.cuda.is_available() and not pipeline.is_stock and pipeline.placement.ranks > 1:
        lines.append(_messages(args, pipeline))
    if args.transformer_impl == "local" and torch.cuda.is_available() and not has_transformer_engine():
        lines.append(_NO_ENGINE)
    if args.steps.ahead:
        lines.append(f" post-validation: {_WHEN[args.steps.when]}")
    if pipeline.plans.offloads:
        lines.append(offload_in_words(args, pipeline.plans))
    if pipeline.plans.offloads and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and torch.cuda.is_available():
        lines.append(_ONE_QUEUE)
    last = min(filter(None, (args.train_iters, args.exit_interval)), default=args.log_interval)
    if args.pipeline.trace and last < args.log_interval:
        lines.append(
            f" WARNING: --pipeline-trace: none of {counted(last, 'iteration')} is logged: give --log-interval {last} or less"
        )
    lines += [f" WARNING: --post-validation: {obstacle}" for obstacle in obstacles(args, pipeline.placement)]
    lines += [] if pipeline.is_stock else [f" {one}" for one in of_flags(args).sentences(topics.AT_ONCE)]
    return lines + [f" WARNING: {caution}" for caution in cautions(args)]


_BRAIDED = "dualpipe-v, interleaved, zb-v or v-half"  # schedules in which braids pay


def _plan(args: Settings, pipeline: Pipeline, knows_memory: bool) -> str:
    layers = decoder_layers(args, pipeline.placement)
    balanced = not pipeline.is_stock and balances_letters(args)
    letters = "costs of letters" if getattr(args, "letter_costs", None) else "what letters are predicted to take"
    how = f", balanced by {letters}" if balanced else ""
    words = f" layers of the model's {counted(len(layers), 'stage')}{how}: {' '.join(map(str, layers))}"
    if args.vocabulary.spread:
        words += f"; {_shards(args)}"
    if args.vocabulary.redistributes:
        words += f" ({_redistribution(args, pipeline.placement, layers)})"
    if pipeline.is_stock:
        return words
    plans = pipeline.plans
    planned = plans.plan(max(microbatch_counts(args)))
    objective = plans.objective
    length = f"{objective} {1e3 * objective.length(planned.timeline):.4g} ms, " if plans.costs else ""
    count = max(activation_peaks(planned.schedule, uniform(pipeline.placement)))
    held = f"{planned.peak / 2**20:.4g} MiB" if plans.costs else counted(count, "microbatch")
    equal = "equal costs, as stages are balanced," if balanced else "equal costs"
    at = "these costs" if plans.costs else equal if knows_memory else "equal costs, as if stages were equal,"
    of_span = f" ({planned.timeline.span_bubble_rate:.1%} of the span)" if objective is Objective.SPAN else ""
    words += (
        f"; planned at {at} for {counted(planned.schedule.microbatches, 'microbatch')}: {length}bubble "
        f"{planned.timeline.bubble_rate:.1%} of the makespan{of_span}, activations of at most {held} on a rank"
    )
    if shielded := planned.schedule.shielded:
        words += f"; B has weight gradients behind its collectives on {len(shielded)} of {counted(len(layers), 'stage')}"
    if args.overlap_moe_expert_parallel_comm:
        if not planned.braids:
            return f"{words}; no forward runs together with a backward, so all-to-alls stay exposed: take {_BRAIDED}"
        exposed, whole = planned.communication
        forwards = sum(work.kind.row.sends is kinds.Flow.ACTIVATION for row in planned.schedule.passes for work in row)
        words += (
            f"; {planned.braids} of {forwards} forwards run together with a backward, which leaves {exposed / whole:.0%} of the "
            "all-to-alls exposed"
        )
        if not any(stage.has_parts for stage in (plans.costs.stages if plans.costs else ())):
            words += " if they are a fifth of F and of B"
    return words


def _memory(args: Settings, pipeline: Pipeline) -> list[str]:
    """Lines about the memory that every rank allocates, so that it is known before a device is full."""
    ranks = predicted_memory(args, pipeline)
    allocated, activations = (
        " ".join(f"{bytes / rank_memory.GIB:.3g}" for bytes in each)
        for each in ([rank.allocated for rank in ranks], [rank.activations for rank in ranks])
    )
    warning = more_than_stock(args, ranks, stock_memory(args))
    lines = [
        f" predicted memory by pipeline rank: {allocated} GiB, of which activations {activations} GiB (details: mpipe memory)",
        *([f" {warning}"] if warning else []),
    ]
    if not torch.cuda.is_available() or args.rehearsal.on:  # a machine's memory, or a GPU's that several ranks share
        return lines
    fullest, memory = max(rank.total for rank in ranks), device_memory(this_device())
    if fullest > rank_memory.usable(memory):
        lines.append(
            f" WARNING: with {rank_memory.OVERHEAD / rank_memory.GIB:g} GiB for CUDA and NCCL the fullest rank needs "
            f"{fullest / rank_memory.GIB:.4g} GiB, more than "
            f"{rank_memory.SHARE:.0%} of this GPU's {memory / rank_memory.GIB:.4g} GiB: mpipe memory says what would fit"
        )
    return lines


def _messages(args: Settings, pipeline: Pipeline) -> str:
    size = shape_of(args).hidden_bytes / pipeline.plans.splits / 2**20
    count = pipeline.plans.plan(max(microbatch_counts(args))).message_buffers
    return f" messages take at most {count} x {size:.4g} MiB on a rank in addition"


def _redistribution(args: Settings, placement: Placement, layers: list[int]) -> str:
    """Why --layer-redistribution chose these numbers of layers."""
    extra = last_stage_in_layers(args, placement)
    most = max(sum(layers[stage] + extra.get(stage, 0.0) for stage in row) for row in placement.stages)
    mean = (sum(layers) + sum(extra.values())) / placement.ranks
    return (
        f"by its operations the output layer takes as long as {extra[placement.last_stage]:.3g} layers: the heaviest rank "
        f"has the work of {most:.3g}, the mean is {mean:.3g}"
    )


def _shards(args: Settings) -> str:
    count = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    cut = Shards.of(args.vocab_size, args.padded_vocab_size, count, args.vocabulary.masks_padding)
    rows = count * cut.rows
    masked = rows - cut.total_counted
    return (
        f"--vocab-parallel {args.vocabulary.spread}: {cut.rows} rows on each of {count} ranks, in all {cut.size} tokens, "
        f"{rows - cut.size - masked} rows of padding that count in the softmax, {masked} that do not"
    )


def offload_in_words(args: Settings, plans: PlanCache) -> str:
    schedule, costs = plans.plan(max(microbatch_counts(args))).schedule, plans.planned_costs
    words = f" offload {'as the file says' if args.offloading.mode is None else args.offloading.mode}:"
    if plans.costs is None:
        later = ", until they have been measured" if args.pipeline.costs == PROFILE else ": --offload-profile measures them"
        if not schedule.has_copies and args.offloading.host_memory is not None:
            return f"{words} nothing until bytes have been measured, to know what fits into host memory"
        words += f" copies are taken to last as long as passes (k = 1){later};"
    limited = args.offloading.host_memory is not None
    return f"{words} {view.copies_in_words(schedule, costs, plans.costs is not None, limited)}"


def obstacles(args: Settings, placement: Placement) -> list[str]:
    """Reasons why ranks wait for each other at the end of an iteration in spite of post-validation."""
    apart = placement.home(0)[0] != placement.home(placement.last_stage)[0]
    if not (args.steps.ahead and apart):
        return []
    found = []
    copies = not args.untie_embeddings_and_output_weights or args.mtp_num_layers
    if copies and args.vocabulary.spread is None:
        found.append(
            "the first and the last rank add up the gradients of their tied embeddings, so the first one waits for the last: "
            "take --untie-embeddings-and-output-weights, --vocab-parallel, or a schedule that has both on one rank, such as zb-v"
        )
    if args.calculate_per_token_loss:
        found.append("with --calculate-per-token-loss every rank waits for the last stage to say how many tokens there were")
    return found
