"""One training or evaluation iteration under a schedule, behind the signature of megatron-core's own schedules.

``run`` does for any program what ``megatron.core.pipeline_parallel.schedules`` does for its three built-in orders: it
reuses upstream's forward and backward steps, groups and communicator, honours the same settings of ``config``, and ends
with ``finalize_model_grads_func``. What differs is that the order of passes is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config, unwrap_model

from megatron.pipeline.model.slices import Slices
from megatron.pipeline.record.recorder import Recorder, Unmeasured
from megatron.pipeline.record.report import RecordFormat
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.gradient_sync import GradientSync
from megatron.pipeline.runtime.model_stages import ModelStages, most_in_flight, per_chunk
from megatron.pipeline.runtime.offload.offloading import InFlight, Offloading
from megatron.pipeline.runtime.p2p import Channels, Links
from megatron.pipeline.runtime.rewind import Rewind
from megatron.pipeline.runtime.vocabulary import Groups, VocabularyPasses
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.lower.program import Flow, Program


class Verdict(Enum):
    """What becomes of an iteration whose first forwards ran before the optimizer step before it was known to stand."""

    GO_ON = auto()  # it stands
    AGAIN = auto()  # it has been undone or redone, and parameters are others: forwards start anew
    STOP = auto()  # training ends before this iteration


@dataclass(frozen=True)
class Plan:
    """A schedule that has been verified, with its programs."""

    schedule: Schedule
    programs: tuple[Program, ...]

    @cached_property
    def record_formats(self) -> tuple[RecordFormat, ...]:
        """How ranks tell each other what they did in an iteration."""
        return tuple(map(RecordFormat, self.programs))


def run(
    plan: Plan,
    record: Callable[[], Recorder | Unmeasured],
    started: Callable[[Executor], None],
    channels_of: Callable[[torch.distributed.ProcessGroup, bool], Channels],
    groups_of: Callable[[torch.distributed.ProcessGroup], Groups],
    posting: Posting = Posting.SINGLE,
    settle: Callable[[], Verdict] | None = None,
    offloading: Offloading | None = None,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Iterator[Any] | list[Iterator[Any]] | None,
    model: torch.nn.Module | list[torch.nn.Module],
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run one iteration of ``plan``; the keywords and the result are those of megatron-core 0.16.1's schedules.

    Args:
        plan: for this number of microbatches and chunks; of forwards alone if ``forward_only``.
        record: makes what measures the passes, or does not.
        started: told what runs now, before it runs: for reports of where a rank is.
        channels_of: from the pipeline group, and whether lengths vary, to the channels of messages.
        groups_of: from the pipeline group to the groups of a spread vocabulary.
        posting: how sends and receives are started.
        settle: called where the program validates, if the optimizer step before this iteration is not known to stand: makes
            parameters and gradients what the rest of the iteration needs, and says what becomes of its start. All ranks of
            the pipeline must get the same verdict.
        offloading: moves what the plan copies to host memory; not needed for plans without copies.

    Returns:
        What the loss function reported for every microbatch, on the rank with the last stage; elsewhere, and for an iteration
        that was stopped, an empty list.

    Raises:
        ValueError: the settings ask for what a schedule of data cannot do, or do not fit the plan.
    """
    chunks = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
    config = get_model_config(chunks[0])
    communicator, groups = _groups(config, p2p_communicator, pg_collection)
    _check(plan, chunks, config, adjust_tensor_shapes_fn, communicator.pp_group.size(), num_microbatches)
    _check_non_loss_data(plan.schedule, collect_non_loss_data)
    rank = communicator.pp_group.rank()
    last_rank, last_chunk = plan.schedule.placement.home(plan.schedule.placement.last_stage)
    holds_output = rank == last_rank and not plan.schedule.vocabulary

    finalize = config.finalize_model_grads_func if not forward_only else None
    splits = plan.schedule.splits
    passes = plan.schedule.passes[rank]
    decoder_length = decoder_seq_length and decoder_seq_length // splits
    shapes = _shapes(config, groups, seq_length // splits, micro_batch_size, decoder_length, adjust_tensor_shapes_fn)
    reduces_late = config.grad_sync_func is not None and rank != 0
    sync = GradientSync(config.no_sync_func, passes, reduces_late)
    rewind = Rewind(chunks, iterators) if settle else None

    def vocabulary(variant: Vocabulary, iterator: Iterator[Any] | None, recorder: Recorder | Unmeasured) -> VocabularyPasses:
        return VocabularyPasses(
            placement=plan.schedule.placement,
            rank=rank,
            variant=variant,
            chunks=chunks,
            iterator=iterator,
            config=config,
            groups=groups_of(communicator.pp_group),
            tensor=groups.tp,
            forward_step_func=forward_step_func,
            num_microbatches=num_microbatches,
            context_parallel_size=groups.cp.size(),
            forward_only=forward_only,
            hold=recorder.hold,
        )

    def begin() -> tuple[ModelStages, Recorder | Unmeasured, Executor, Any]:
        embedding = None
        if finalize is not None:
            embedding = schedules.clear_embedding_activation_buffer(config, chunks[last_chunk], holds_output)
        recorder = record()
        reading = rewind.iterators if rewind else iterators
        stages = ModelStages(
            placement=plan.schedule.placement,
            rank=rank,
            chunks=chunks,
            iterators=reading,
            config=config,
            context_parallel_size=groups.cp.size(),
            num_microbatches=num_microbatches,
            in_flight=most_in_flight(passes),
            forward_step_func=forward_step_func,
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
            forward_only=forward_only,
            slices=Slices(chunks, splits, keep_graphs=not forward_only),
            vocabulary=vocabulary(plan.schedule.vocabulary, reading[0], recorder) if plan.schedule.vocabulary else None,
        )
        links = Links(
            channels_of(communicator.pp_group, config.variable_seq_lengths),
            shapes,
            config.pipeline_dtype or config.params_dtype,
            next(chunks[0].parameters()).device,
            posting,
        )
        executor = Executor(
            plan.programs[rank],
            plan.schedule.placement,
            rank,
            stages,
            links,
            recorder,
            sync.around,
            keep_graphs=not forward_only,
            offloaded=_in_flight(offloading, plan, rank, chunks, recorder),
        )
        started(executor)
        executor.begin()
        return stages, recorder, executor, embedding

    with _timed(config):
        stages, recorder, executor, embedding = begin()
        if settle is not None and rewind is not None:
            verdict = settle()
            if verdict is not Verdict.GO_ON:
                executor.abandon()
                rewind.rewind()
            rewind.forget()
            if verdict is Verdict.STOP:
                return []
            if verdict is Verdict.AGAIN:
                stages, recorder, executor, embedding = begin()
        with sync:
            executor.finish()
        recorder.end(executor.copies())
        if reduces_late and not forward_only:
            for index, chunk in enumerate(chunks):
                per_chunk(config.grad_sync_func, index)(chunk.parameters())

        if finalize is not None:
            schedules.finish_embedding_wgrad_compute(config, embedding, holds_output, groups.tp)
            finalize(
                chunks,
                stages.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
    return stages.reported


def _in_flight(
    offloading: Offloading | None,
    plan: Plan,
    rank: int,
    chunks: Sequence[torch.nn.Module],
    recorder: Recorder | Unmeasured,
) -> InFlight | None:
    """What moves activations to host memory and back in one iteration, if any are to be moved."""
    if not plan.schedule.has_copies:
        return None
    if offloading is None:
        raise ValueError(f"schedule {plan.schedule.name} copies activations to host memory: say with what (offloading)")
    # DDP has a list called ``buffers``.
    staying = (tensor for chunk in unwrap_model(list(chunks)) for tensor in (*chunk.parameters(), *chunk.buffers()))
    return offloading.iteration(plan.programs[rank], staying, recorder.hold)


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Upstream's timer of an iteration, if there are timers."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()


def _check(
    plan: Plan, chunks: Sequence[torch.nn.Module], config: Any, adjust_tensor_shapes_fn: Any, ranks: int, microbatches: int
) -> None:
    placement = plan.schedule.placement
    if (placement.ranks, plan.schedule.microbatches) != (ranks, microbatches):
        raise ValueError(
            f"schedule {plan.schedule.name} is for {placement.ranks} ranks and {plan.schedule.microbatches} microbatches, "
            f"but the pipeline group has {ranks} ranks and the iteration {microbatches} microbatches: plan one for these"
        )
    if placement.chunks != len(chunks):
        raise ValueError(
            f"schedule {plan.schedule.name} has {placement.chunks} chunk(s) per rank, but the model has {len(chunks)}: "
            "build the model for the schedule's placement"
        )
    if adjust_tensor_shapes_fn is not None and len(chunks) > 1:
        raise ValueError("adjust_tensor_shapes_fn works with one chunk per rank only, as in megatron-core")
    unsupported = {
        "overlap_moe_expert_parallel_comm": config.overlap_moe_expert_parallel_comm,
        "hybrid_context_parallel": config.hybrid_context_parallel,
        "fine_grained_activation_offloading": config.fine_grained_activation_offloading,
        "cuda_graph_impl": config.cuda_graph_impl != "none",
    }
    for setting, used in unsupported.items():
        if used:
            raise ValueError(
                f"{setting} relies on the order of megatron-core's own schedules: switch it off, or use --pipeline-schedule stock"
            )


def _check_non_loss_data(schedule: Schedule, collect: bool) -> None:
    if collect and schedule.splits > 1:
        raise ValueError("collect_non_loss_data needs whole sequences: take a schedule without slices")
    if collect and schedule.vocabulary:
        raise ValueError("collect_non_loss_data needs logits of the whole vocabulary on one rank: train without --vocab-parallel")


def _groups(
    config: Any, communicator: P2PCommunicator | None, groups: ProcessGroupCollection | None
) -> tuple[P2PCommunicator, ProcessGroupCollection]:
    """Both as given, or both from parallel_state: as upstream's schedules do."""
    if (communicator is None) != (groups is None):
        raise ValueError("give both p2p_communicator and pg_collection, or neither")
    if communicator is not None and groups is not None:
        missing = [name for name in ("tp", "cp", "embd", "pos_embd", "pp", "dp_cp") if not hasattr(groups, name)]
        if missing:
            raise ValueError(f"pg_collection lacks {', '.join(missing)}; set a group you do not need to None")
        return communicator, groups
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    return P2PCommunicator(pp_group=groups.pp, config=config), groups


def _shapes(
    config: Any,
    groups: ProcessGroupCollection,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    adjust: Callable[..., Any] | None,
) -> dict[Flow, list[Any]]:
    """What a message carries; a gradient has the shapes of the activation that this rank sent."""
    received = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    sent = list(received)
    if adjust is not None:
        received, sent = adjust(received, sent)
    return {Flow.ACTIVATION: received, Flow.GRADIENT: sent}
