"""One training or evaluation iteration of one rank under a plan.

It does for any program what ``megatron.core.pipeline_parallel.schedules`` does for its three built-in orders: it reuses
upstream's forward and backward steps and groups, honours the same settings of ``config``, and ends with
``finalize_model_grads_func``. What differs is that the order of passes is data.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import cuda_graphs, distributed_data_parallel, rerun_state_machine

from megatron.pipeline.backward.weight_tasks import check_no_gradient_is_lost
from megatron.pipeline.model import local_graphs, te_graphs
from megatron.pipeline.monitor.device_progress import DeviceProgress
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.recorder import NullRecorder
from megatron.pipeline.planner import Planned, ops
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.gradient_sync import GradientSync
from megatron.pipeline.runtime.layer_plans import LayerPlanStages
from megatron.pipeline.runtime.model_stages import ModelStages, per_chunk
from megatron.pipeline.runtime.offload.offloading import InFlight, Offloading
from megatron.pipeline.runtime.p2p import Channels, Transport
from megatron.pipeline.runtime.rewind import Rewind
from megatron.pipeline.runtime.stage_passes import StagePasses
from megatron.pipeline.runtime.vocabulary import Groups
from megatron.pipeline.runtime.vocabulary_stages import VocabularyStages
from megatron.pipeline.runtime.wiring import Wiring, wiring


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same plan
def _wiring(plan: Planned, rank: int) -> Wiring:
    return wiring(plan.programs[rank], rank, plan.schedule.placement, plan.schedule.frozen)


@lru_cache(maxsize=4)  # asked in every iteration, mostly of the same plan
def _slots(plan: Planned, rank: int) -> Sequence[Sequence[int]]:
    return plan.slots()[rank]


class _Attempt(NamedTuple):
    """State of one run of a program; after a roll-back there is a second one."""

    stages: ModelStages
    offloaded: InFlight | None
    executor: Executor
    recorder: NullRecorder
    embedding: Any  # upstream's buffer of inputs of the output layer


@dataclass(eq=False)
class Iteration:
    """One iteration, to run once.

    Args:
        plan: for the number of microbatches and chunks of the call; of forwards alone for an evaluation.
        channels: for messages.
        record: makes what measures the passes, or does not.
        posting: how sends and receives are started.
        groups: of the vocabulary's collectives; None for plans without any.
        offloading: moves what the plan copies to host memory; None for plans without copies.
        first: whether the model trains for the first time. The end then looks for gradients that no W has computed.

    Attributes:
        executor: runs the program; None before ``run``.
        attempts: how many times the program has begun.
    """

    plan: Planned
    channels: Channels
    record: Callable[[], NullRecorder] = NullRecorder
    posting: ops.Posting = ops.Posting.SINGLE
    groups: Groups | None = None
    offloading: Offloading | None = None
    first: bool = False
    executor: Executor | None = field(default=None, init=False)
    attempts: int = field(default=0, init=False)
    _running: Generator[None, bool | None, list[Any]] | None = field(default=None, init=False)

    def run(self, call: Call) -> list[Any]:
        """Run it, or what is left of it once it has begun.

        Returns:
            What the loss function reported for every microbatch, on the rank with the last stage; elsewhere an empty list.

        Raises:
            ValueError: the settings ask for what a schedule of data cannot do, or do not fit the plan.
            RuntimeError: the model uses a weight elsewhere than in its module (``check_no_gradient_is_lost``).
        """
        try:
            next(self._running or self._passes(call))
        except StopIteration as end:
            reported: list[Any] = end.value
            return reported
        raise AssertionError("it has stopped for its validation, and goes on to its end")

    def begin(self, call: Call) -> None:
        """Run what may come before the optimizer step before this iteration is known to be accepted; raises what ``run`` does."""
        self._running = self._passes(call, ahead=True)
        next(self._running)

    def start_anew(self) -> None:
        """Take back what has begun: the data is read again, random states and buffers are as before. ``run`` then runs it all.
        All ranks of the pipeline do so."""
        assert self._running is not None, "it has begun"
        self._running.send(True)

    def _passes(self, call: Call, ahead: bool = False) -> Generator[None, bool | None, list[Any]]:
        """All of it; ahead, it stops where the program validates, and once more when it has been taken back."""
        call.check(self.plan.schedule, ahead)
        config, rank = call.config, self.channels.rank
        wrapped = [chunk for chunk in call.chunks if isinstance(chunk, DistributedDataParallel)]
        # DDP that overlaps has no need of that function, by which upstream aligns ranks: they would all reduce behind the passes.
        overlaps = any(chunk.ddp_config.overlap_grad_reduce for chunk in wrapped)
        reduces_late = config.grad_sync_func is not None and rank != 0 and not overlaps
        kept = config.finalize_model_grads_func is None  # the caller reduces them, maybe behind several calls
        # Upstream lets every microbatch report where a loop gives no function: DDP then expects as many of each later iteration.
        no_sync = config.no_sync_func or [chunk.no_sync for chunk in wrapped]
        sync = GradientSync(no_sync, self.plan.schedule.passes[rank], reduces_late or kept)
        checks: list[rerun_state_machine.Noted] = []  # of losses and gradients, judged at its end
        rewind = Rewind(call.chunks, call.iterators) if ahead else None
        iterators = rewind.iterators if rewind else call.iterators
        with _timed(config):
            attempt = self._begin(call, iterators, sync, checks)
            if rewind:
                if (yield):
                    attempt.executor.abandon()
                    rewind.rewind()
                    checks.clear()
                    yield
                    attempt = self._begin(call, iterators, sync, checks)
                rewind.forget()
            with rerun_state_machine.together(checks):
                with sync, attempt.recorder.observing():
                    attempt.executor.finish()
                attempt.recorder.end(attempt.offloaded.copies() if attempt.offloaded else ())
                for chunk in call.chunks if self.first else ():
                    check_no_gradient_is_lost(chunk)
                if not call.forward_only:
                    self._finish_gradients(call, attempt, reduces_late)
        if getattr(config, "cuda_graph_impl", None) == local_graphs.GRAPHED:
            cuda_graphs.capture()
        return list(attempt.stages.reported)  # plain, as upstream's: others look into it by its type

    def _begin(
        self, call: Call, iterators: Sequence[Any], sync: GradientSync, checks: list[rerun_state_machine.Noted]
    ) -> _Attempt:
        """Run the program up to its validation."""
        plan, rank, config = self.plan, self.channels.rank, call.config
        embedding = None
        if not call.forward_only and config.finalize_model_grads_func is not None:
            chunk = call.chunks[plan.schedule.placement.home(plan.schedule.placement.last_stage)[1]]
            embedding = schedules.clear_embedding_activation_buffer(config, chunk, self._holds_output)
        self._gather_parameters(call)
        graphs = getattr(config, "cuda_graph_impl", None)
        if graphs == te_graphs.GRAPHED and not call.forward_only:
            te_graphs.place(call.chunks, _slots(plan, rank))
        if graphs == local_graphs.GRAPHED:
            local_graphs.place(call.chunks, () if call.forward_only else _slots(plan, rank))
        recorder = self.record()
        program = plan.programs[rank]
        stages: ModelStages
        if plan.schedule.vocabulary:
            assert self.groups is not None, f"schedule {plan.schedule.name} has collectives of a vocabulary: give their groups"
            stages = VocabularyStages(call, plan.schedule, rank, iterators, self.groups)
        elif config.overlap_moe_expert_parallel_comm and not call.forward_only:
            stages = LayerPlanStages(call, plan.schedule, rank, iterators)
        else:
            stages = ModelStages(call, plan.schedule, rank, iterators)
        offloaded = self._in_flight(program, call.chunks)
        frozen = plan.schedule.frozen
        first = frozen + bool(frozen and config.recompute_granularity is None)  # whose backwards need an input that needs one
        chunks = [
            {chunk for chunk, stage in enumerate(plan.schedule.placement.stages[rank]) if stage in wanted}
            for wanted in (plan.schedule.shielded, range(frozen), range(first))
        ]
        handlers = StagePasses(stages, program, not call.forward_only, offloaded, *chunks).handlers.joined(stages.handlers)
        handlers = replace(handlers, around=sync.around)
        dtype = config.pipeline_dtype or config.params_dtype
        transport = Transport(self.channels, call.shapes(plan.schedule.splits), dtype, call.device, self.posting)
        progress = DeviceProgress(plan.leads[rank]) if call.device.type == "cuda" else None
        self.executor = executor = Executor(program, _wiring(plan, rank), handlers, transport, recorder, progress)
        self.attempts += 1
        with rerun_state_machine.together(checks, last=False), recorder.observing():
            executor.begin()
        return _Attempt(stages, offloaded, executor, recorder, embedding)

    def _gather_parameters(self, call: Call) -> None:
        """Start all gathers of parameters that a distributed optimizer has left in shards, in the order of their use."""
        sync = call.config.param_sync_func
        for index in dict.fromkeys(work.chunk for work in self.plan.schedule.passes[self.channels.rank]):
            chunk = call.chunks[index]
            if sync is None or distributed_data_parallel.gathered(chunk):
                distributed_data_parallel.gather(chunk)
            elif not call.forward_only:
                per_chunk(sync, index)(chunk.parameters())

    def situation(self, iterations: int) -> Situation:
        """Position of this rank, for a report of a failure. May be called from another thread.

        Args:
            iterations: how many have begun.
        """
        executor = self.executor
        position, begun = executor.reached if executor else (None, 0)
        progress = iterations, self.attempts, begun
        if executor is None or position is None:
            return Situation(progress=progress)
        here = Situation.in_program(executor.program, position, begun, progress, self.channels.ranks.__getitem__)
        return replace(here, of_device=executor.position is not position)

    @property
    def _holds_output(self) -> bool:
        """Tell whether this rank has the output layer of the whole vocabulary."""
        schedule = self.plan.schedule
        return self.channels.rank == schedule.placement.home(schedule.placement.last_stage)[0] and not schedule.vocabulary

    def _in_flight(self, program: ops.Program, chunks: Sequence[torch.nn.Module]) -> InFlight | None:
        """Mover of activations to host memory and back, if any are to be moved."""
        if not self.plan.schedule.has_copies:
            return None
        if self.offloading is None:
            raise ValueError(f"schedule {self.plan.schedule.name} copies activations to host memory: say with what (offloading)")
        # DDP has a list called ``buffers``.
        staying = (tensor for chunk in unwrap_model(list(chunks)) for tensor in (*chunk.parameters(), *chunk.buffers()))
        return InFlight(self.offloading, program, staying)

    def _finish_gradients(self, call: Call, attempt: _Attempt, reduces_late: bool) -> None:
        config = call.config
        if config.finalize_model_grads_func is None:
            for chunk in call.chunks:
                distributed_data_parallel.start_when_finished(chunk)
            return
        if reduces_late:
            for index, chunk in enumerate(call.chunks):
                per_chunk(config.grad_sync_func, index)(chunk.parameters())
        schedules.finish_embedding_wgrad_compute(config, attempt.embedding, self._holds_output, call.groups.tp)
        config.finalize_model_grads_func(
            call.chunks,
            attempt.stages.num_tokens if config.calculate_per_token_loss else None,
            pg_collection=call.groups,
            force_all_reduce=call.force_all_reduce,
        )


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Upstream's timer of an iteration, if there are timers."""
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()
