"""A rank's shard of the vocabulary in its model: initial weights that are megatron-core's, and checkpoints in its layout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ReplicaId, ShardedTensorFactory
from megatron.core.transformer import TransformerConfig

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.model import seeding
from megatron.pipeline.model.adapter import adapter_of
from megatron.pipeline.model.stage import Stage
from megatron.pipeline.model.vocabulary.input import EmbeddingShard, ReceivedEmbedding
from megatron.pipeline.model.vocabulary.loss import LossSettings
from megatron.pipeline.model.vocabulary.output import OutputShard
from megatron.pipeline.model.vocabulary.tied import TiedGradient
from megatron.pipeline.planner import Shards

Initialize = Callable[[torch.Tensor], Any]


class VocabularyShard(torch.nn.Module):
    """This rank's rows of the embedding and of the output layer; one and the same where they are tied.

    Attributes:
        shards: how the vocabulary is cut.
        index: which shard this is.
        loss: settings of the loss.
        tied: where embedding and output layer are one matrix, what adds up its gradient.
    """

    def __init__(self, shards: Shards, index: int, loss: LossSettings, embedding: EmbeddingShard, output: OutputShard) -> None:
        super().__init__()
        self.shards, self.index, self.loss = shards, index, loss
        self.embedding, self.output, self.tied = embedding, output, output.tied

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, ShardedTensorFactory]:
        """megatron-core's interface to checkpoints: the rows that it has as well, under its names and in its shapes.

        Args:
            prefix: of this module's parameters in the state of the model.
            sharded_offsets: none; the first and the last stage exist once.
            metadata: with ``dp_cp_group``, the ranks that have the same shard.
        """
        assert not sharded_offsets and metadata is not None
        outer = prefix.removesuffix("vocabulary.")
        keys = {"embedding.weight": "embedding.word_embeddings.weight", "output.weight": "output_layer.weight"}
        return {
            prefix + name: ShardedTensorFactory(
                outer + keys[name],
                weight,
                partial(_store, self.shards, self.index),
                partial(_restore, self.shards),
                (0, 0, metadata["dp_cp_group"].rank()),
            )
            for name, weight in self.named_parameters()
        }


def _store(shards: Shards, index: int, key: str, weight: torch.Tensor, replica_id: ReplicaId, flattened_range: None) -> Any:
    """The part of a checkpoint that a shard's weight is, or a state of the optimizer for it."""
    stored = shards.stored(index)
    if not stored:
        return LocalNonpersistentObject(weight[:0])
    return ShardedTensor(
        key,
        weight.detach()[:stored],
        weight.dtype,
        (stored, weight.size(1)),
        (shards.stock_rows, weight.size(1)),
        (shards.own(index).start, 0),
        None,  # the shards with all of their rows stored, and the last, are no regular grid
        replica_id,
        allow_shape_mismatch=True,  # another tensor-parallel size pads the vocabulary to other sizes
    )


def _restore(shards: Shards, stored: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_store``, with zeros in the rows that no checkpoint has."""
    return torch.nn.functional.pad(stored, (0, 0, 0, shards.rows - stored.size(0)))


def shard_vocabulary(args: Namespace, config: TransformerConfig, models: Sequence[Any], stages: Sequence[Stage]) -> None:
    """Give a rank's first chunk its shard of the vocabulary, as ``vocabulary``, with the initial weights of our own models.

    ``ReceivedEmbedding`` replaces the word embeddings of the first stage. The last stage loses its output layer: it returns
    hidden states, after the final norm.

    Args:
        args: flags by name: ``vocab_size``, ``padded_vocab_size``, ``vocab_mask_padding``, ``vocab_logits_limit``,
            ``label_smoothing``, ``z_loss``, ``untie_embeddings_and_output_weights``, ``position_embedding_type`` and ``seed``.
        config: of the model.
        models: this rank's models, one for each chunk.
        stages: what these are.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    shards = Shards.of(args.vocab_size, args.padded_vocab_size, ranks * group.size(), args.vocabulary.masks_padding)
    index = parallel_state.get_pipeline_model_parallel_rank() * group.size() + group.rank()
    initial = partial(_initial_weight, config, shards, index, seeding.weight_base(args.seed))

    embedding = initial(seeding.EMBEDDING, config.embedding_init_method)
    for model, stage in zip(models, stages, strict=True):
        adapter_of(model).remove_vocabulary(args, model, stage, ReceivedEmbedding())
    tied = None if args.untie_embeddings_and_output_weights else TiedGradient()
    output = embedding if tied else initial(seeding.output_layer(config), config.init_method)

    loss = LossSettings(args.vocabulary.label_smoothing, args.vocabulary.z_loss)
    reduce_scatter = config.sequence_parallel and args.position_embedding_type != "learned_absolute"
    models[0].vocabulary = VocabularyShard(
        shards,
        index,
        loss,
        EmbeddingShard(embedding, shards, index, group, reduce_scatter, tied),
        OutputShard(output, shards, index, loss, group, config.sequence_parallel, args.vocabulary.logits_limit, tied),
    )


def _initial_weight(
    config: TransformerConfig, shards: Shards, index: int, base: int, layer: int, initialize: Initialize
) -> torch.nn.Parameter:
    """A shard of what megatron-core's tensor-parallel ranks would draw together; zeros in rows that they do not have.

    While it draws, it needs memory for all rows on the CPU, or on a GPU for those that one of these ranks would have.
    """
    own = shards.own(index)
    seeding.seed_layer(base, layer)
    if config.use_cpu_initialization:
        weight = torch.zeros(shards.rows, config.hidden_size, dtype=config.params_dtype)
        drawn = torch.empty(shards.stock_rows, config.hidden_size, dtype=torch.float32)
        initialize(drawn)
        weight[: shards.stored(index)] = drawn[own.start : own.stop]
    else:
        weight = torch.zeros(shards.rows, config.hidden_size, dtype=config.params_dtype, device=this_device())
        part = shards.stock_rows // config.tensor_model_parallel_size
        for rank in range(config.tensor_model_parallel_size):
            start, stop = max(own.start, rank * part), min(own.stop, (rank + 1) * part)
            if start < stop:
                seeding.seed_layer(base, layer, rank)
                drawn = weight.new_empty(part, config.hidden_size)
                with tensor_parallel.get_cuda_rng_tracker().fork():
                    initialize(drawn)
                weight[start - own.start : stop - own.start] = drawn[start - rank * part : stop - rank * part]
    parameter: Any = torch.nn.Parameter(weight)
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
    tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    parameter.is_embedding_or_output_parameter = True
    return parameter
