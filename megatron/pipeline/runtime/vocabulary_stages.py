"""The stages of a rank whose model has its vocabulary in shards, and the handlers of the vocabulary's passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.pipeline.planner import Kind, Pass, Schedule, kinds
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.executor import Handler, Handlers
from megatron.pipeline.runtime.model_stages import ModelStages
from megatron.pipeline.runtime.p2p import Tensors
from megatron.pipeline.runtime.vocabulary import Groups, VocabularyPasses


class VocabularyStages(ModelStages):
    """The first stage takes its embeddings from the shards of all ranks, and the last gives them its output."""

    def __init__(self, call: Call, schedule: Schedule, rank: int, iterators: Sequence[Any], groups: Groups) -> None:
        super().__init__(call, schedule, rank, iterators)
        self._vocabulary = VocabularyPasses(call, schedule, rank, iterators[0], groups)
        # As without shards, although every rank knows all losses.
        if rank == schedule.placement.home(schedule.placement.last_stage)[0]:
            self.reported = self._vocabulary.reported

    @property
    def handlers(self) -> Handlers:
        vocabulary = self._vocabulary
        passes: dict[Kind, Handler] = dict.fromkeys(kinds.VOCABULARY_KINDS, vocabulary.run)
        return Handlers(passes, dict.fromkeys(kinds.Exchange, vocabulary), abandon=(vocabulary.abandon,))

    @property
    def num_tokens(self) -> torch.Tensor:
        """All tokens that count, on every rank."""
        return self._num_tokens + self._vocabulary.num_tokens

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        self._hand_embedding_over(work, again=not keep_graph)
        outputs = super().forward(work, inputs, keep_graph)
        if self._is_last(work):
            [output] = outputs
            assert output is not None
            self._vocabulary.offer(work.microbatch, output)
            self.release(outputs)
        return outputs

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        self._hand_embedding_over(work, again=False)
        return super().recompute(work, inputs)

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        if self._is_last(work):
            [output] = outputs
            assert output is not None
            gradients = [self._vocabulary.output_gradient(work.microbatch, output.dtype)]
        return super().backward(work, inputs, outputs, gradients)

    def _hand_embedding_over(self, work: Pass, again: bool) -> None:
        if self._placement.is_first(self._placement.stage(self._rank, work.chunk)):
            self._vocabulary.arrive(work.microbatch, again)

    def _data(self, work: Pass, keep_graph: bool) -> Iterator[Any] | None:
        return self._vocabulary.batch(work.microbatch)

    def _data_again(self, work: Pass) -> Iterator[Any] | None:
        return self._data(work, keep_graph=True)

    def _gives_loss(self, work: Pass) -> bool:
        return False
