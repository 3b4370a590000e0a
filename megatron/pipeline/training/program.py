"""``pretrain_gpt.py`` from start to end: check everything, start the ranks, train, say where the results lie."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.timers import Timers
from megatron.core.transformer.enums import LayerType

from megatron.pipeline.model.layout import end_in_layers, stage_layers
from megatron.pipeline.model.slices import check_slices
from megatron.pipeline.model.vocabulary.layout import Shards
from megatron.pipeline.runtime.device import this_device
from megatron.pipeline.runtime.offload import numa
from megatron.pipeline.runtime.offload.words import in_words
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.situation import Situation
from megatron.pipeline.runtime.watchdog import Watchdog
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.simulate import activation_peaks, simulate
from megatron.pipeline.training import checkpoint
from megatron.pipeline.training.arguments import parse
from megatron.pipeline.training.config import microbatch_counts
from megatron.pipeline.training.data import Samples, check_data
from megatron.pipeline.training.flags import OFF, PROFILE
from megatron.pipeline.training.logging import Log
from megatron.pipeline.training.loop import train
from megatron.pipeline.training.planning import plan_pipeline
from megatron.pipeline.training.state import Training, build_training, initialize_model_parallel
from megatron.pipeline.training.tokenizer import build_tokenizer, padded_vocab_size
from megatron.pipeline.training.trace import draw_consecutive, draw_last_trace
from megatron.pipeline.training.validation import validate
from megatron.pipeline.tune.balance import heaviest

logger = logging.getLogger(__name__)

_FIRST_WORD = 10  # seconds that rank 0 has to say what is wrong, if it is wrong there as well

_ONE_QUEUE = (
    " WARNING: CUDA_DEVICE_MAX_CONNECTIONS is 1: passes then queue behind copies to and from host memory that have to wait; "
    "leave it out, or set it to 8, where neither tensor nor context parallelism needs it"
)

_WHEN = {
    "measured": "synchronous steps at first, to know what they cost; ahead from there on where that pays",
    "always": "every step is taken ahead, unless something else than the next iteration follows it",
}

Guard = Callable[..., AbstractContextManager[object]]


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code: 0, or 2 when the flags or the files they name are wrong."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        args, tokenizer, pipeline = prepare(argv, world_size)
    except ValueError as error:
        if rank > 0:
            time.sleep(_FIRST_WORD)  # torchrun ends all ranks when one of them has ended
        print(f"pretrain_gpt.py: {error}", file=sys.stderr)
        return 2
    _configure_logging(args, rank)
    with _world(args, rank, world_size, binds=pipeline.offloads and args.offload_numa_binding):
        run(args, tokenizer, pipeline)
    return 0


def prepare(argv: Sequence[str], world_size: int) -> tuple[Namespace, Any, Pipeline]:
    """Everything that can be wrong without starting anything: flags, schedule, tokenizer, data files, checkpoint.

    Raises:
        ValueError: what is wrong, and what to change.
    """
    args = parse(argv)
    validate(args, world_size)
    tokenizer = build_tokenizer(args)
    args.vocab_size = tokenizer.vocab_size
    args.padded_vocab_size = padded_vocab_size(tokenizer.vocab_size, args)  # decides what --layer-redistribution does
    pipeline = plan_pipeline(args)
    stage_layers(args, pipeline.placement)
    check_slices(args, pipeline.splits)
    check_data(args, tokenizer.vocab_size)
    checkpoint.check(args)
    return args, tokenizer, pipeline


def run(args: Namespace, tokenizer: Any, pipeline: Pipeline, guard: Guard = Watchdog) -> None:
    """Build, load and train, on every rank of a world that exists.

    Args:
        guard: the context to train in; it is told how to find out where this rank is, and how long it may be there.
    """
    training: Training | None = None

    def situation() -> Situation:
        if training is None:
            return Situation("the start-up")
        here, iteration = pipeline.situation, training.iteration
        # What goes on belongs to the next iteration, or to an evaluation or a checkpoint after this one.
        return replace(here, place=f"{here.place} after iteration {iteration}", progress=(*here.progress, iteration))

    guarded = guard(situation, args.pipeline_timeout, stuck_seconds=60 * args.distributed_timeout_minutes)
    with _megatron_state(args, pipeline.placement), guarded:
        pipeline.install()
        timers = Timers(args.timing_log_level, args.timing_log_option) if args.timing_log_level else None
        training = build_training(args, pipeline.placement, timers)
        loaded = checkpoint.load(args, training)
        samples = Samples(args, tokenizer, training.chunks)
        with Log(args, _has_loss(pipeline), torch.distributed.get_world_size()) as log:
            log.line(_first_words(args, pipeline, loaded))
            if log.writes:
                log.line(_plan_in_words(args, pipeline))
                if args.post_validation:
                    log.line(f" post-validation: {_WHEN[args.post_validation_when]}")
                if pipeline.offloads:
                    log.line(_offload_in_words(args, pipeline))
                if pipeline.offloads and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and torch.cuda.is_available():
                    log.line(_ONE_QUEUE)
                for obstacle in _obstacles(args, pipeline.placement):
                    log.line(f" WARNING: --post-validation: {obstacle}")
            train(args, training, samples, pipeline, log, timers)
            torch.distributed.barrier()  # what other ranks write is there
            if log.writes:
                log.line(_last_words(args, log))


def _configure_logging(args: Namespace, rank: int) -> None:
    """Notes of this package from rank 0 alone; upstream's timers from the last rank; warnings from every rank."""
    logging.basicConfig(level=logging.WARNING, format=" %(message)s", stream=sys.stdout)
    if rank == 0:
        logging.getLogger("megatron.pipeline").setLevel(logging.INFO)
    if args.timing_log_level:
        logging.getLogger("megatron.core.timers").setLevel(logging.INFO)


@contextmanager
def _world(args: Namespace, rank: int, world_size: int, binds: bool) -> Iterator[None]:
    """All ranks, each on its device, for the time of the training.

    Args:
        binds: each to the CPUs next to its GPU.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if binds:
            logger.info("%s", numa.bind(this_device()))  # before any host memory is allocated
    else:
        torch.set_num_threads(1)  # the ranks of one machine share its cores
    if world_size == 1:  # started without torchrun
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", str(_free_port()))
    torch.distributed.init_process_group(
        args.distributed_backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )
    yield
    torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _megatron_state(args: Namespace, placement: Placement) -> Iterator[None]:
    """What megatron-core keeps in globals: its process groups, and the number of microbatches."""
    initialize_model_parallel(args, placement)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )
    yield
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()


def _has_loss(pipeline: Pipeline) -> bool:
    """Whether this is the one rank that logs: the last of those with the last stage."""
    pipeline_rank, _ = pipeline.placement.home(pipeline.placement.last_stage)
    return bool(
        parallel_state.get_pipeline_model_parallel_rank() == pipeline_rank
        and parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_tensor_model_parallel_world_size() - 1
        and parallel_state.get_data_parallel_rank(with_context_parallel=True)
        == parallel_state.get_data_parallel_world_size(with_context_parallel=True) - 1
    )


def _first_words(args: Namespace, pipeline: Pipeline, loaded: Path | None) -> str:
    sizes = (
        f"{args.tensor_model_parallel_size} tensor x {args.pipeline_model_parallel_size} pipeline x "
        f"{args.context_parallel_size} context x {args.data_parallel_size} data parallel"
    )
    words = f" schedule {pipeline.name} on {torch.distributed.get_world_size()} ranks ({sizes})"
    if loaded:
        return f"{words}, going on from {loaded}"
    return f"{words}, no checkpoint in {args.load}: starting anew" if args.load else words


def _plan_in_words(args: Namespace, pipeline: Pipeline) -> str:
    """How the model is cut, and what the largest iteration is planned to be like."""
    layers = [stage.count(LayerType.decoder) for stage in stage_layers(args, pipeline.placement)]
    words = f" layers of the model's {len(layers)} stages: {' '.join(map(str, layers))}"
    if args.vocab_parallel != OFF:
        words += f"; {_shards(args)}"
    if args.layer_redistribution:
        words += f" ({_redistribution(args, pipeline.placement, layers)})"
    if pipeline.is_stock:
        return words
    schedule = pipeline.plan(max(microbatch_counts(args))).schedule
    costs = pipeline.planned_costs
    timeline, peak = simulate(schedule, costs), max(activation_peaks(schedule, costs))
    objective = pipeline.objective
    length = f"{objective} {1e3 * objective.length(timeline):.4g} ms, " if pipeline.costs else ""
    held = f"{peak / 2**20:.4g} MiB" if pipeline.costs else f"{peak:.4g} microbatches"
    at = "these costs" if pipeline.costs else "equal costs"
    bubble = objective.bubble_rate(timeline)
    return (
        f"{words}; planned at {at} for {schedule.microbatches} microbatches: {length}bubble {bubble:.1%} "
        f"of the {objective}, activations of at most {held} on a rank"
    )


def _redistribution(args: Namespace, placement: Placement, layers: list[int]) -> str:
    """Why --layer-redistribution chose these."""
    extra = end_in_layers(args, placement)
    mean = (sum(layers) + sum(extra.values())) / placement.ranks
    return (
        f"by its operations the output layer takes as long as {extra[placement.last_stage]:.3g} layers: the heaviest rank "
        f"has the work of {heaviest(layers, placement, extra):.3g}, the mean is {mean:.3g}"
    )


def _shards(args: Namespace) -> str:
    """How the vocabulary is cut."""
    count = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    cut = Shards.of(args.vocab_size, args.padded_vocab_size, count, args.vocab_mask_padding)
    rows = count * cut.rows
    masked = rows - cut.total_counted
    return (
        f"vocabulary spread as {args.vocab_parallel}, {cut.rows} rows on each of {count} ranks: in all {cut.size} tokens, "
        f"{rows - cut.size - masked} rows of padding that count in the softmax, {masked} that do not"
    )


def _offload_in_words(args: Namespace, pipeline: Pipeline) -> str:
    """How much goes to host memory."""
    schedule, costs = pipeline.plan(max(microbatch_counts(args))).schedule, pipeline.planned_costs
    words = f" offload {'as the file says' if args.offload == OFF else args.offload}:"
    if pipeline.costs is None:
        later = ", until they have been measured" if args.pipeline_costs == PROFILE else ": --offload-profile measures them"
        if not schedule.has_copies and args.offload_host_memory is not None:
            return f"{words} nothing until bytes have been measured, to know what fits into host memory"
        words += f" copies are taken to last as long as passes (k = 1){later};"
    limited = args.offload_host_memory is not None
    return f"{words} {in_words(schedule, costs, pipeline.costs is not None, limited)}"


def _obstacles(args: Namespace, placement: Placement) -> list[str]:
    """What keeps ranks waiting for each other at the end of an iteration, which post-validation cannot help."""
    apart = placement.home(0)[0] != placement.home(placement.last_stage)[0]
    if not (args.post_validation and apart):
        return []
    found = []
    copies = not args.untie_embeddings_and_output_weights or args.mtp_num_layers
    if copies and args.vocab_parallel == OFF:
        found.append(
            "the first and the last rank add up the gradients of their tied embeddings, so the first one waits for the last: "
            "take --untie-embeddings-and-output-weights, --vocab-parallel, or a schedule that has both on one rank, such as zb-v"
        )
    if args.calculate_per_token_loss:
        found.append("with --calculate-per-token-loss every rank waits for the last stage to say how many tokens there were")
    return found


def _last_words(args: Namespace, log: Log) -> str:
    """How far the loss fell, and where everything lies."""
    lines = []
    if log.first_loss is not None:
        lines.append(f" loss: {log.first_loss:.4f} -> {log.last_loss:.4f}")
    traces = args.pipeline_trace
    drawn = draw_last_trace(traces) if traces else None
    places = {
        "metrics": args.metrics,
        "TensorBoard log": args.tensorboard_dir,
        "checkpoint": checkpoint.latest(args.save) if args.save else None,
        "traces": traces if drawn else f"none in {traces}: no iteration was logged (--log-interval)" if traces else None,
        "timeline picture": drawn,
        "picture of consecutive iterations": draw_consecutive(traces) if traces else None,
    }
    return "\n".join(lines + [f" {name}: {place}" for name, place in places.items() if place])
