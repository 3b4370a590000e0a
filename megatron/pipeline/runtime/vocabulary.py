"""The passes of this rank's shard of the vocabulary, and its part in what all ranks of a pipeline exchange for them.

Every rank reads every microbatch, and once all shards' statistics are here it knows all losses: it then calls the user's loss
function itself, so the weights of tokens need not travel. The mathematics is in ``model/vocabulary``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model

from megatron.pipeline.distributed import sequence
from megatron.pipeline.distributed.device import side_stream
from megatron.pipeline.distributed.groups import connect, like, memory_noted, new_group
from megatron.pipeline.model.adapter import signature
from megatron.pipeline.model.slices import noting
from megatron.pipeline.model.vocabulary.input import ReceivedEmbedding
from megatron.pipeline.model.vocabulary.loss import Statistics, weigh
from megatron.pipeline.model.vocabulary.output import OutputPart
from megatron.pipeline.model.vocabulary.shard import VocabularyShard
from megatron.pipeline.monitor.memory import hold
from megatron.pipeline.planner import Kind, Pass, Schedule, Vocabulary, kinds, ops
from megatron.pipeline.runtime.call import Call, LossReports
from megatron.pipeline.runtime.p2p import Tensors


@dataclass(frozen=True)
class Groups:
    """The ranks of the vocabulary's collectives. These groups are used for nothing else: collectives wait for no other traffic.

    Attributes:
        pipeline: the ranks of a pipeline, in its order.
        shards: all tensor- and pipeline-parallel ranks of one model, each of which has a shard.
        tensor: the tensor-parallel ranks, for what the side stream sums over them. On the model's own group it would have the
            passes that follow wait for what the side stream waits for: the statistics of all shards.
    """

    pipeline: Any
    shards: Any
    tensor: Any

    @classmethod
    def open(cls, pipeline: torch.distributed.ProcessGroup, max_ctas: int | None = None) -> Groups:
        """Make the groups; collective over the world, every rank with the pipeline that it is in.

        Args:
            max_ctas: the most thread blocks of an NCCL kernel; None as ``groups.few_ctas``.
        """
        options = like(pipeline, max_ctas=max_ctas)
        tensor = parallel_state.get_tensor_model_parallel_group()
        members = [
            torch.distributed.get_process_group_ranks(group)
            for group in (pipeline, parallel_state.get_model_parallel_group(), tensor)
        ]
        own = new_group(members[0], **options)
        shards = own if len(members[0]) == len(members[1]) else new_group(members[1], **options)
        if tensor.size() > 1 and options["backend"] == "nccl":  # gloo has no streams
            tensor = new_group(members[2], **options)
        with memory_noted("communicators for the vocabulary"):
            for group in dict.fromkeys((own, shards, tensor)):
                connect(group)
        return cls(own, shards, tensor)


class Reader(torch.nn.Module):
    """Stands for the model in the user's forward step, to learn what a microbatch is: it is called as the model is.

    Attributes:
        inputs: what it was called with last, by the names of the model's arguments.
    """

    def __init__(self, chunk: torch.nn.Module) -> None:
        super().__init__()
        model = unwrap_model(chunk)
        self.config, self.vp_stage = model.config, model.vp_stage
        self.pre_process = self.post_process = True
        self.inputs: dict[str, Any] = {}
        self._signature = signature(model)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.inputs = self._signature.bind(self, *args, **kwargs).arguments
        return torch.zeros(())


@dataclass
class _ShardMicrobatch:
    """Tensors of one microbatch on this rank; each is dropped with its last use.

    Attributes:
        left: what is yet to come before all of it can be: T, IB and the end of the exchange of gradients.
        batch: what the user's forward step read.
        tokens, labels: [b, s].
        loss: the user's loss function.
        embedding: IF's part, then on the first stage the sum over all ranks.
        caught: on the first stage, the gradient by that sum once there is one.
        output: of the last stage.
        part, held: the result of S, and its tensors as the meter counts them.
        gathered: the statistics of all shards.
        weights: [b, s], the derivative of the training's loss by each token's.
        gradient: by the last stage's output: this shard's part, then on the last stage the sum.
        embedding_gradient: by the first stage's input.
    """

    batch: list[Any]
    tokens: torch.Tensor
    labels: torch.Tensor
    loss: Any
    embedding: torch.Tensor | None = None
    caught: list[torch.Tensor] = field(default_factory=list)
    output: torch.Tensor | None = None
    part: OutputPart | None = None
    held: list[Any] = field(default_factory=list)
    gathered: torch.Tensor | None = None
    statistics: Statistics | None = None
    weights: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    embedding_gradient: torch.Tensor | None = None
    left: int = 3


class VocabularyPasses:
    """Runs S, T, IF and IB, and takes part in their collectives. One iteration owns it.

    Args:
        iterator: of the data; upstream's or the user's.

    Attributes:
        reported: what the loss function said of every microbatch.
        num_tokens: how many count, over all microbatches so far.
    """

    def __init__(self, call: Call, schedule: Schedule, rank: int, iterator: Iterator[Any] | None, groups: Groups) -> None:
        self._call, self._config, self._iterator, self._groups = call, call.config, iterator, groups
        self._one_barrier = schedule.vocabulary is Vocabulary.ONE_BARRIER
        self._tensor = call.groups.tp
        self._shard: VocabularyShard = unwrap_model(call.chunks[0]).vocabulary
        if self._shard.tied and not call.forward_only:
            self._shard.tied.expect(call.num_microbatches)
        self._reader = Reader(call.chunks[0])
        homes = [schedule.placement.home(stage) for stage in (0, schedule.placement.last_stage)]
        self._first, self._last = (home == rank for home, _ in homes)
        self._roots = [torch.distributed.get_process_group_ranks(groups.pipeline)[home] for home, _ in homes]
        # The embedding of the first stage takes what all shards have looked up.
        first = call.chunks[homes[0][1]].modules() if self._first else ()
        self._arrived = next((module for module in first if isinstance(module, ReceivedEmbedding)), None)
        self._microbatches: dict[int, _ShardMicrobatch] = {}
        self._works: dict[ops.Collective, Any] = {}  # joined, and not waited for
        self.reported = LossReports()
        self.num_tokens: torch.Tensor | int = 0

    def run(self, work: Pass, _: Tensors) -> Tensors:
        """Run one pass of the shard. It takes and makes no messages: collectives carry its results."""
        if work.kind is Kind.IF:
            self._microbatches[work.microbatch] = self._read()
        one = self._microbatches[work.microbatch]
        match work.kind:
            case Kind.IF:
                one.embedding = self._shard.embedding(one.tokens)
            case Kind.S:
                assert one.output is not None, "its broadcast has been waited for, or it was made here"
                early = self._one_barrier and not self._call.forward_only
                one.part = self._shard.output(one.output, one.labels, with_gradient=early)
                one.held, one.output = hold(one.part.held), None
            case Kind.T:
                assert one.part is not None and one.weights is not None and one.statistics is not None
                gradient = one.part.backward(one.statistics, one.weights, with_gradient=not self._one_barrier)
                if not self._one_barrier:
                    one.gradient = gradient
                one.part, one.held = None, []
                self._end(work.microbatch)
            case Kind.IB:
                assert one.embedding_gradient is not None
                self._shard.embedding.backward(one.tokens, one.embedding_gradient)
                one.embedding_gradient, one.caught = None, []
                self._end(work.microbatch)
        return []

    def start(self, collective: ops.Collective) -> None:
        one = self._microbatches[collective.microbatch]
        first, last = self._roots
        pipeline = self._groups.pipeline
        match collective.exchange:
            case kinds.Exchange.EMBEDDING:
                assert one.embedding is not None, "IF has run"
                work = torch.distributed.reduce(one.embedding, first, group=pipeline, async_op=True)
            case kinds.Exchange.OUTPUT:
                if one.output is None:
                    one.output = self._blank_output(one)
                work = torch.distributed.broadcast(one.output, last, group=pipeline, async_op=True)
            case kinds.Exchange.STATISTICS:
                assert one.part is not None
                statistics = one.part.statistics
                one.gathered = statistics.new_empty((self._shard.shards.count, *statistics.shape))
                # Not into a list: NCCL would gather into memory of its own, given back when the side stream has waited,
                # which the stream that it was allocated on has not.
                whole = one.gathered.flatten(0, 1)
                work = torch.distributed.all_gather_into_tensor(whole, statistics, group=self._groups.shards, async_op=True)
            case kinds.Exchange.GRADIENT:
                with self._gradient_ready(one, collective.microbatch):
                    assert one.gradient is not None, "S or T has run"
                    work = torch.distributed.reduce(one.gradient, last, group=pipeline, async_op=True)
            case kinds.Exchange.EMBEDDING_GRADIENT:
                one.embedding_gradient = one.caught[0].contiguous() if one.caught else self._blank_embedding(one)
                work = torch.distributed.broadcast(one.embedding_gradient, first, group=pipeline, async_op=True)
        self._works[collective] = work

    def finish(self, collective: ops.Collective) -> None:
        self._works.pop(collective).wait()
        one = self._microbatches.get(collective.microbatch)
        if one is None:
            return  # this rank only contributed, and has finished the microbatch
        match collective.exchange:
            case kinds.Exchange.EMBEDDING:
                if self._first and one.embedding is not None:
                    sequence.complete(one.embedding, self._tensor, reduced=self._scatters)
                else:
                    one.embedding = None
            case kinds.Exchange.STATISTICS:
                self._compute_losses(one)
                if self._call.forward_only:
                    del self._microbatches[collective.microbatch]
            case kinds.Exchange.GRADIENT if not self._last:
                one.gradient = None
                self._end(collective.microbatch)

    def abandon(self) -> None:
        """Wait for the collectives under way, and let go of everything."""
        for work in self._works.values():
            work.wait()
        self._works.clear()
        self._microbatches.clear()

    def batch(self, microbatch: int) -> Iterator[Any]:
        """Batch that the user's forward step reads, on any chunk."""
        return iter(self._microbatches[microbatch].batch)

    def arrive(self, microbatch: int, again: bool) -> None:
        """Hand the embedding to the first stage, whose forward follows.

        Args:
            again: it will be needed once more.
        """
        one = self._microbatches[microbatch]
        assert self._arrived is not None and one.embedding is not None
        one.caught.clear()
        self._arrived.tensor = _Catch.apply(one.embedding, torch.zeros((), requires_grad=True), one.caught)
        if not again:
            one.embedding = None

    def offer(self, microbatch: int, output: torch.Tensor) -> None:
        """Take the last stage's output."""
        weight = self._shard.output.weight
        self._microbatches[microbatch].output = output.detach().to(weight.dtype).contiguous()

    def output_gradient(self, microbatch: int, dtype: torch.dtype) -> torch.Tensor:
        """Gradient that the last stage's backward starts from."""
        one = self._microbatches[microbatch]
        assert one.gradient is not None
        gradient = sequence.complete(one.gradient, self._tensor, reduced=self._config.sequence_parallel)
        if self._one_barrier:
            self._compute_losses(one)
            assert one.weights is not None
            parts = self._tensor.size() if self._config.sequence_parallel else 1
            gradient = weigh(gradient, one.weights, self._tensor.rank() if parts > 1 else 0, parts)
        one.gradient = None
        self._end(microbatch)
        return gradient.to(dtype)

    def _read(self) -> _ShardMicrobatch:
        """Have the user's forward step read a microbatch."""
        batch: list[Any] = []
        data = None if self._iterator is None else noting(self._iterator, batch)
        _, loss = self._call.forward_step_func(data, self._reader)
        inputs = self._reader.inputs
        if inputs.get("labels") is None:
            raise ValueError("with vocabulary parallelism the forward step has to give the model labels, on every rank")
        return _ShardMicrobatch(batch, inputs["input_ids"], inputs["labels"], loss)

    def _compute_losses(self, one: _ShardMicrobatch) -> None:
        """Compute the losses of a microbatch and the weight of each token, once."""
        if one.statistics is not None:
            return
        one.statistics = statistics = self._join_statistics(one)
        config = self._config
        losses = statistics.losses.requires_grad_(not self._call.forward_only)
        if config.timers is not None:
            config.timers("forward-compute", log_level=2).start()
        with torch.set_grad_enabled(not self._call.forward_only):
            loss, num_tokens = schedules.forward_step_calc_loss(
                self._reader,
                losses,
                one.loss,
                config,
                None,
                False,
                self._call.num_microbatches,
                self.reported,
                cp_group_size=self._call.groups.cp.size(),
                is_last_stage=True,
            )
            self.num_tokens = self.num_tokens + num_tokens
            if not self._call.forward_only:
                scaled = loss if config.grad_scale_func is None else config.grad_scale_func(loss)
                (one.weights,) = torch.autograd.grad(scaled, losses)

    def _join_statistics(self, one: _ShardMicrobatch) -> Statistics:
        assert one.gathered is not None
        shard = self._shard
        batch, length = one.labels.shape
        return Statistics(one.gathered, shard.loss, (batch, length), shard.shards.total_counted)

    def _gradient_ready(self, one: _ShardMicrobatch, microbatch: int) -> AbstractContextManager[Any]:
        """Make this shard's part of the gradient by the last stage's output; returns a context in which it has been computed.

        T has made it; or it is made here, from what S has made and the statistics of all shards, on a GPU on a side stream.
        """
        if not self._one_barrier:
            return nullcontext()
        assert one.part is not None and one.gathered is not None
        statistics = self._works[ops.Collective(kinds.Exchange.STATISTICS, microbatch)]  # T, which waits for it, comes later
        device = one.gathered.device
        with side_stream(device):
            statistics.wait()
            if device.type == "cuda":
                for tensor in (one.gathered, one.part.statistics, *one.part.held):
                    tensor.record_stream(torch.cuda.current_stream())
                one.gradient = one.part.input_gradient(self._join_statistics(one), self._groups.tensor)
            else:
                self._compute_losses(one)
                assert one.statistics is not None
                one.gradient = one.part.input_gradient(one.statistics, self._groups.tensor)
        if device.type == "cuda":
            one.gradient.record_stream(torch.cuda.current_stream())
        one.held = hold(one.part.held)
        return side_stream(device)

    @property
    def _scatters(self) -> bool:
        """Tell whether IF sums over the tensor-parallel ranks."""
        return self._shard.embedding.sequence_group is not None

    def _blank_output(self, one: _ShardMicrobatch) -> torch.Tensor:
        batch, length = one.labels.shape
        parts = self._tensor.size() if self._config.sequence_parallel else 1
        weight = self._shard.output.weight
        return weight.new_empty((length // parts, batch, weight.size(1)))

    def _blank_embedding(self, one: _ShardMicrobatch) -> torch.Tensor:
        batch, length = one.tokens.shape
        weight = self._shard.embedding.weight
        shape = (length // self._tensor.size(), batch) if self._scatters else (batch, length)
        return weight.new_empty((*shape, weight.size(1)))

    def _end(self, microbatch: int) -> None:
        """One of the last things of a microbatch is over."""
        one = self._microbatches[microbatch]
        one.left -= 1
        if not one.left:
            del self._microbatches[microbatch]


class _Catch(torch.autograd.Function):
    """The identity, whose gradient goes into a list and no further; nothing is kept for it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, _graph: torch.Tensor, caught: list[torch.Tensor]) -> torch.Tensor:
        ctx.caught = caught
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.caught.append(gradient)
        return None, None, None
