"""Computation of the stages of one rank: upstream's forward and backward steps on the chunks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.pipeline.patches import schedules as schedules_patch

from megatron.pipeline.model.slices import Slices, noting
from megatron.pipeline.planner import Kind, Pass, Schedule
from megatron.pipeline.runtime.call import Call, LossReports
from megatron.pipeline.runtime.executor import Handlers
from megatron.pipeline.runtime.p2p import Tensors


class ModelStages:
    """The stages of this rank's model chunks. One iteration owns it.

    Args:
        iterators: of the data, to be read instead of the call's.

    Attributes:
        braid: computes, as one unit, a forward that keeps its graph and the backward of another microbatch or chunk: takes the
            arguments of ``forward``, of ``backward``, and what to call with the forward's outputs once they are there; returns
            what ``backward`` returns. None where there are no braids.
        reported: what the loss function said of every microbatch; empty on ranks without the last stage.
    """

    braid: Callable[..., Tensors] | None = None

    def __init__(self, call: Call, schedule: Schedule, rank: int, iterators: Sequence[Any]) -> None:
        self._call, self._config, self._chunks = call, call.config, call.chunks
        self._placement, self._rank, self._iterators = schedule.placement, rank, iterators
        self._in_flight = most_in_flight(schedule.passes[rank])
        self._slices = Slices(call.chunks, schedule.splits, keep_graphs=not call.forward_only)
        self._forwarded: set[int] = set()  # chunks that have run a forward
        self._read: dict[tuple[int, int], list[Any]] = {}  # what forwards read that will be recomputed
        self.reported = LossReports()
        self._num_tokens = torch.zeros([], dtype=torch.int, device=call.device)

    @property
    def handlers(self) -> Handlers:
        """Those of kinds that ``StagePasses`` does not run: none."""
        return Handlers({})

    @property
    def num_tokens(self) -> torch.Tensor:
        """Number of tokens that count, over all microbatches; 0 on ranks without the last stage."""
        return self._num_tokens

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        """Run a forward, of [None] on the first stage, to the loss on the last. Without its graph ``recompute`` will come."""
        first = work.chunk not in self._forwarded
        self._forwarded.add(work.chunk)
        data = self._data(work, keep_graph)
        complete = self._slices.completes(work)
        with nullcontext() if keep_graph else torch.no_grad():
            outputs, num_tokens = self._forward_step(work, inputs, data, self.reported if complete else [], first)
        if self._config.calculate_per_token_loss and complete:
            self._num_tokens += num_tokens
        return outputs

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        """The forward step once more, with its graph; nothing is reported, and outputs, which F has sent, are released."""
        outputs, _ = self._forward_step(work, inputs, self._data_again(work), [], first=False)
        if not self._gives_loss(work):
            self.release(outputs)
        return outputs

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        """Gradients by the inputs, from those by the outputs: [None] on the last stage."""
        with self._slices.around(work):
            return schedules_patch.backward(inputs, outputs, gradients, self._config, self._chunks[work.chunk])

    def release(self, outputs: Tensors) -> None:
        """Free the data of outputs, which have been sent, and keep their graph."""
        if not self._call.forward_only:
            # Upstream frees the first tensor of a hop, and needs just that: backward starts from it.
            schedules.deallocate_output_tensor(outputs[0], self._config.deallocate_pipeline_outputs)

    def _data(self, work: Pass, keep_graph: bool) -> Iterator[Any] | None:
        """Read the data of a forward; one that keeps no graph notes it."""
        data = self._slices.iterator(work, self._iterators[work.chunk])
        if data is not None and not keep_graph:
            data = noting(data, self._read.setdefault((work.microbatch, work.chunk), []))
        return data

    def _data_again(self, work: Pass) -> Iterator[Any] | None:
        """Data that a forward has read that runs again now."""
        read = self._read.pop((work.microbatch, work.chunk), None)
        return None if read is None else iter(read)

    def _gives_loss(self, work: Pass) -> bool:
        """Tell whether a forward returns the loss."""
        return self._is_last(work)

    def _is_last(self, work: Pass) -> bool:
        return self._placement.is_last(self._placement.stage(self._rank, work.chunk))

    def _step_function(self, work: Pass) -> Callable[..., Any]:
        """Function that upstream's forward step calls, with the data and the chunk."""
        return self._call.forward_step_func

    def _forward_step(
        self, work: Pass, inputs: Tensors, data: Iterator[Any] | None, reported: list[Any], first: bool
    ) -> tuple[Tensors, Any]:
        call, partial = self._call, self._config.num_microbatches_with_partial_activation_checkpoints
        with self._slices.around(work):
            outputs, num_tokens = schedules.forward_step(
                self._step_function(work),
                data,
                self._chunks[work.chunk],
                call.num_microbatches,
                inputs,
                reported,
                self._config,
                call.groups.cp.size(),
                collect_non_loss_data=call.collect_non_loss_data,
                checkpoint_activations_microbatch=(
                    None if partial is None else work.microbatch % self._in_flight[work.chunk] >= partial
                ),
                is_first_microbatch=schedules.check_first_val_step(call.first_val_step, call.forward_only, first),
                current_microbatch=work.microbatch,
                vp_stage=work.chunk if len(self._chunks) > 1 else None,
                is_last_stage=self._gives_loss(work),
            )
        return outputs, num_tokens


def most_in_flight(passes: Sequence[Pass]) -> dict[int, int]:
    """For every chunk, the most microbatches between their F and their B: what partial recomputation cycles through."""
    most, current = Counter[int](), Counter[int]()
    for work in passes:
        if work.kind is Kind.F:
            current[work.chunk] += 1
            most |= current
        elif work.kind.sends_gradient:
            current[work.chunk] -= 1
    return most


def per_chunk(function: Any, chunk: int) -> Callable[..., Any]:
    """Upstream gives one function, or a list with one for every chunk."""
    return function[chunk] if isinstance(function, (list, tuple)) else function
