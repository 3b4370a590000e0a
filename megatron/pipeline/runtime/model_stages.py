"""What the passes of one rank compute: upstream's forward and backward steps on the chunks of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_type

from megatron.pipeline.model.slices import Slices
from megatron.pipeline.runtime.p2p import Tensors
from megatron.pipeline.runtime.vocabulary import VocabularyPasses, noting
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.lower.program import Collective


@dataclass
class ModelStages:
    """The passes of this rank's model chunks, and of its shard of the vocabulary. One iteration owns it.

    Args:
        in_flight: by chunk, the most microbatches between their F and their B (``most_in_flight``).
        vocabulary: where it is spread over all ranks.
    """

    placement: Placement
    rank: int
    chunks: Sequence[torch.nn.Module]
    iterators: Sequence[Any]
    config: Any
    context_parallel_size: int
    num_microbatches: int
    in_flight: dict[int, int]
    forward_step_func: Callable[..., Any]
    collect_non_loss_data: bool
    first_val_step: bool | None
    forward_only: bool
    slices: Slices
    vocabulary: VocabularyPasses | None = None

    def __post_init__(self) -> None:
        self._reported: list[Any] = []
        self._num_tokens = torch.zeros([], dtype=torch.int, device=next(self.chunks[0].parameters()).device)
        self._model_type = get_model_type(self.chunks[0])
        self._forwarded: set[int] = set()  # chunks that have run a forward
        self._asked: set[int] = set()  # chunks whose parameters have been asked for
        self._read: dict[tuple[int, int], list[Any]] = {}  # what forwards read that will be recomputed

    @property
    def reported(self) -> list[Any]:
        """What the loss function said of every microbatch; empty away from the last stage."""
        if self.vocabulary is None:
            return self._reported
        return self.vocabulary.reported if self.rank == self.placement.home(self.placement.last_stage)[0] else []

    @property
    def num_tokens(self) -> torch.Tensor:
        """How many tokens count, over all microbatches; 0 away from the last stage."""
        return self._num_tokens if self.vocabulary is None else self._num_tokens + self.vocabulary.num_tokens

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        self._ask_for_parameters(work.chunk)
        first = work.chunk not in self._forwarded
        self._forwarded.add(work.chunk)
        if self.vocabulary:
            if self.placement.is_first(self._stage(work)):
                self.vocabulary.arrive(work.microbatch, again=not keep_graph)
            data: Iterator[Any] | None = self.vocabulary.batch(work.microbatch)
        else:
            data = self.slices.iterator(work, self.iterators[work.chunk])
            if data is not None and not keep_graph:
                data = noting(data, self._read.setdefault((work.microbatch, work.chunk), []))
        complete = self.slices.completes(work)
        with nullcontext() if keep_graph else torch.no_grad():
            outputs, num_tokens = self._forward_step(work, inputs, data, self._reported if complete else [], first)
        if self.vocabulary and self.placement.is_last(self._stage(work)):
            output = outputs[0]
            assert output is not None
            self.vocabulary.offer(work.microbatch, output)
            self.release(outputs)
        if self.config.calculate_per_token_loss and complete:
            self._num_tokens += num_tokens
        return outputs

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        if self.vocabulary:
            if self.placement.is_first(self._stage(work)):
                self.vocabulary.arrive(work.microbatch, again=False)
            data: Iterator[Any] | None = self.vocabulary.batch(work.microbatch)
        else:
            read = self._read.pop((work.microbatch, work.chunk), None)
            data = None if read is None else iter(read)
        outputs, _ = self._forward_step(work, inputs, data, [], first=False)
        if self.vocabulary and self.placement.is_last(self._stage(work)):
            self.release(outputs)
        return outputs

    def _ask_for_parameters(self, chunk: int) -> None:
        """Where parameters arrive chunk by chunk, as for the distributed optimizer, start with that; once."""
        if self.config.param_sync_func is None or self.forward_only or chunk in self._asked:
            return
        self._asked.add(chunk)
        per_chunk(self.config.param_sync_func, chunk)(self.chunks[chunk].parameters())

    def _stage(self, work: Pass) -> int:
        return self.placement.stage(self.rank, work.chunk)

    def _forward_step(
        self, work: Pass, inputs: Tensors, data: Iterator[Any] | None, reported: list[Any], first: bool
    ) -> tuple[Tensors, Any]:
        partial = self.config.num_microbatches_with_partial_activation_checkpoints
        with self.slices.around(work):
            outputs, num_tokens = schedules.forward_step(
                self.forward_step_func,
                data,
                self.chunks[work.chunk],
                self.num_microbatches,
                inputs,
                reported,
                self.config,
                self.context_parallel_size,
                collect_non_loss_data=self.collect_non_loss_data,
                checkpoint_activations_microbatch=(
                    None if partial is None else work.microbatch % self.in_flight[work.chunk] >= partial
                ),
                is_first_microbatch=schedules.check_first_val_step(self.first_val_step, self.forward_only, first),
                current_microbatch=work.microbatch,
                vp_stage=work.chunk if len(self.chunks) > 1 else None,
                is_last_stage=self.vocabulary is None and self.placement.is_last(self._stage(work)),
            )
        return outputs, num_tokens

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        if self.vocabulary and self.placement.is_last(self._stage(work)):
            output = outputs[0]
            assert output is not None
            gradients = [self.vocabulary.output_gradient(work.microbatch, output.dtype)]
        with self.slices.around(work):
            return schedules.backward_step(inputs, outputs, gradients, self._model_type, self.config)

    def release(self, outputs: Tensors) -> None:
        if not self.forward_only:
            # Upstream frees the first tensor of a hop, and needs just that: backward starts from it.
            schedules.deallocate_output_tensor(outputs[0], self.config.deallocate_pipeline_outputs)

    def run_shard(self, work: Pass) -> None:
        assert self.vocabulary is not None
        if work.kind is Kind.IF:
            self._ask_for_parameters(0)  # it has the shard
        self.vocabulary.run(work)

    def join(self, collective: Collective) -> None:
        assert self.vocabulary is not None
        self.vocabulary.join(collective)

    def wait(self, collective: Collective) -> None:
        assert self.vocabulary is not None
        self.vocabulary.wait(collective)

    def abandon(self) -> None:
        if self.vocabulary:
            self.vocabulary.abandon()


def most_in_flight(passes: Sequence[Pass]) -> dict[int, int]:
    """For every chunk, the most microbatches between their F and their B: what partial recomputation cycles through."""
    most: dict[int, int] = {}
    current: dict[int, int] = {}
    for work in passes:
        if work.kind is Kind.F:
            current[work.chunk] = current.get(work.chunk, 0) + 1
            most[work.chunk] = max(most.get(work.chunk, 0), current[work.chunk])
        elif work.kind.sends_gradient:
            current[work.chunk] -= 1
    return most


def per_chunk(function: Any, chunk: int) -> Callable[..., Any]:
    """Upstream gives one function, or a list with one for every chunk."""
    return function[chunk] if isinstance(function, (list, tuple)) else function
