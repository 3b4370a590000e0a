"""``pretrain_gpt.py`` from start to end: check everything, start the ranks, train, say where the results lie."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, init_num_microbatches_calculator
from megatron.core.timers import Timers
from megatron.pipeline.patches import compat

from megatron.pipeline.distributed.device import local_device
from megatron.pipeline.distributed.groups import barrier
from megatron.pipeline.distributed.processes import free_port, let_rank_0_speak
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.settings import Flags, Settings
from megatron.pipeline.flags.support import check_trained
from megatron.pipeline.flags.validation import batch_size_steps, validate
from megatron.pipeline.model.layout import stage_layers
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.watchdog import Watchdog
from megatron.pipeline.planner import Placement
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.session import save_lock
from megatron.pipeline.session.call_watch import Guard, watching
from megatron.pipeline.session.checkpoints import latest
from megatron.pipeline.session.groups import initialize_model_parallel
from megatron.pipeline.session.memory import check_rehearsal_fits
from megatron.pipeline.session.planning import as_planned, plan_pipeline
from megatron.pipeline.session.rehearsal.groups import open_world
from megatron.pipeline.session.startup_lines import first_words, plan_in_words
from megatron.pipeline.session.tokenizer import build_tokenizer, sizes_of_vocabulary
from megatron.pipeline.session.trace import draw_last_trace
from megatron.pipeline.trainer import checkpoint, checkpoint_files
from megatron.pipeline.trainer.data import Samples, check_data
from megatron.pipeline.trainer.loop import Loop
from megatron.pipeline.trainer.run_log import Log
from megatron.pipeline.trainer.state import Training, build_training

logger = logging.getLogger(__name__)

Watch = Callable[[Training], None]


def main(argv: Sequence[str]) -> int:
    """Train as the flags say; returns the exit code: 0, or 2 when the flags or the files they name are wrong."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        args, tokenizer, pipeline = prepare(argv, world_size)
    except ValueError as error:
        return _refused(error)
    try:
        start(args, tokenizer, pipeline, rank, world_size)
    except save_lock.CannotSave as error:
        return _refused(error)
    return 0


def start(args: Settings, tokenizer: Any, pipeline: Pipeline, rank: int, world_size: int, **more: Any) -> None:
    """``run``, with ``more`` of its arguments, on this rank of a world that begins and ends here."""
    _configure_logging(args, rank)
    with _world(args, rank, world_size):
        run(args, tokenizer, pipeline, **more)


def _refused(error: ValueError) -> int:
    """Say why nothing is trained, in one line; returns the exit code."""
    let_rank_0_speak()
    print(f"pretrain_gpt.py: {error}", file=sys.stderr)
    return 2


def prepare(argv: Sequence[str], world_size: int) -> tuple[Settings, Any, Pipeline]:
    """Everything that can be wrong without starting anything: flags, schedule, tokenizer, data files, checkpoint.

    Raises:
        ValueError: what is wrong, and what to change.
    """
    return prepared(parse(argv), world_size)


def prepared(args: Flags, world_size: int) -> tuple[Settings, Any, Pipeline]:
    """The same from parsed flags."""
    check_trained(args)
    settings = validate(args, world_size)
    tokenizer = build_tokenizer(settings)
    settings |= sizes_of_vocabulary(tokenizer.vocab_size, settings)  # they decide what --layer-redistribution does
    pipeline = plan_pipeline(settings)
    stage_layers(settings, pipeline.placement)
    settings = as_planned(settings, pipeline)
    check_rehearsal_fits(settings, pipeline, world_size)
    check_data(settings, tokenizer.vocab_size)
    checkpoint_files.check(settings)
    return settings, tokenizer, pipeline


def run(args: Settings, tokenizer: Any, pipeline: Pipeline, guard: Guard = Watchdog, watch: Watch | None = None) -> None:
    """Build, load and train, on every rank of a world that exists.

    Args:
        guard: makes the context to train in, from a function that says where this rank is, a time limit for each place, and
            what to do before it ends the process.
        watch: called with what is trained, before the first iteration.

    Raises:
        CannotSave: another run saves into ``--save``.
    """
    training: Training | None = None

    def situation() -> Situation:
        if training is None:
            return Situation("the start-up")
        here, iteration = pipeline.situation, training.iteration
        # What goes on belongs to the next iteration, or to an evaluation or a checkpoint after this one.
        return replace(here, place=f"{here.place} after iteration {iteration}", progress=(*here.progress, iteration))

    with save_lock.saving_into(args.save), _megatron_state(args, pipeline.placement), watching(args, situation, guard):
        pipeline.agree()
        pipeline.install()
        timers = Timers(args.timing_log_level, args.timing_log_option) if args.timing_log_level else None
        training = build_training(args, pipeline.placement, timers)
        loaded = checkpoint.load(args, training)
        if watch is not None:
            watch(training)
        samples = Samples(args, tokenizer, training.chunks)
        with Log(args, _has_loss(pipeline), torch.distributed.get_world_size()) as log:
            for line in [*first_words(args, pipeline, loaded), *(plan_in_words(args, pipeline) if log.writes else ())]:
                log.line(line)
            Loop(args, training, samples, pipeline, log, timers).train()
            barrier()  # what other ranks write is there
            if log.writes:
                log.line(_last_words(args, log))


def _configure_logging(args: Settings, rank: int) -> None:
    """Notes of this package from rank 0 alone; upstream's timers from the last rank; warnings from every rank."""
    logging.basicConfig(level=logging.WARNING, format=" %(message)s", stream=sys.stdout)
    if rank == 0:
        logging.getLogger("megatron.pipeline").setLevel(logging.INFO)
    if args.timing_log_level:
        logging.getLogger("megatron.core.timers").setLevel(logging.INFO)


@contextmanager
def _world(args: Settings, rank: int, world_size: int) -> Iterator[None]:
    """All ranks, each on its device, for the time of the training."""
    device, shared = local_device(args.rehearsal.on)
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # the ranks of one machine share its cores
    if world_size == 1:  # started without torchrun
        os.environ.setdefault("MASTER_ADDR", "localhost")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if shared:
        open_world(rank, world_size, timeout)
    else:
        torch.distributed.init_process_group(args.distributed_backend, rank=rank, world_size=world_size, timeout=timeout)
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def _megatron_state(args: Settings, placement: Placement) -> Iterator[None]:
    """State that megatron-core keeps in globals: its process groups, and the number of microbatches."""
    initialize_model_parallel(args, placement)
    ramp: dict[str, Any] = {"rampup_batch_size": args.rampup_batch_size}
    if compat.ramps_up_by_steps() and args.rampup_batch_size is not None:
        ramp = {"step_batch_size_schedule": " ".join(f"{samples}:{size}" for samples, size in batch_size_steps(args))}
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        **ramp,
    )
    yield
    destroy_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()


def _has_loss(pipeline: Pipeline) -> bool:
    """Tell whether this is the one rank that logs: the last of those with the last stage."""
    pipeline_rank, _ = pipeline.placement.home(pipeline.placement.last_stage)
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    here = parallel_state.get_pipeline_model_parallel_rank() == pipeline_rank
    return here and all(group.rank() == group.size() - 1 for group in groups)


def _last_words(args: Settings, log: Log) -> str:
    """Say how far the loss fell, and where everything lies."""
    lines = []
    if log.first_loss is not None:
        lines.append(f" loss: {log.first_loss:.4f} -> {log.last_loss:.4f}")
    traces = args.pipeline.trace
    drawn = draw_last_trace(traces) if traces else None
    places = {
        "metrics": args.pipeline.metrics,
        "TensorBoard log": args.tensorboard_dir,
        "checkpoint": latest(args.save) if args.save else None,
        "traces": traces if drawn else f"none in {traces}: no iteration was logged (--log-interval)" if traces else None,
        "timeline picture": drawn,
    }
    return "\n".join(lines + [f" {name}: {place}" for name, place in places.items() if place])
