"""Facts about one kind of model that the pipeline needs: one adapter for each kind, and nothing anywhere else.

``GPT`` is the adapter of megatron-core's GPTModel and its subclasses, and ``PATTERN`` that of HybridModel. One of another kind
names its own adapter in the attribute ``pipeline_adapter``; ``tests/model/test_adapter.py`` has one.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import LayerType
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat

from megatron.pipeline.model import seeding
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.model.layer_spec import block_spec, prediction_spec
from megatron.pipeline.model.stage import Stage

__all__ = ["GPT", "GPTAdapter", "ModelAdapter", "adapter_of"]


class ModelAdapter(Protocol):
    """One kind of model."""

    @property
    def called_as(self) -> type:
        """The class whose ``forward`` has the signature by which user code calls the model."""

    @property
    def by_token(self) -> Sequence[str]:
        """Names of inputs of shape [batch, sequence, ...]: a slice of a microbatch gets its part of them."""

    @property
    def whole(self) -> Sequence[str]:
        """Names of inputs that every slice gets whole. Other inputs but ``attention_mask`` are refused under slices."""

    @property
    def positions(self) -> tuple[type, ...]:
        """Types of modules that make position embeddings. A slice gives them its ``offset``."""

    @property
    def attention(self) -> tuple[type, ...]:
        """Types of modules called with query, key, value and mask. A slice gives them the keys and values before it."""

    def build(self, args: Namespace, config: TransformerConfig, stage: Stage) -> torch.nn.Module:
        """Build one stage, with weights that depend on ``args.seed`` and the layer, and not on the placement."""

    def layers(self, args: Namespace, numbers: Sequence[int]) -> list[list[LayerType]]:
        """The kinds of layers of every stage.

        Args:
            numbers: of transformer layers, by stage.
        """

    def last_stage_in_layers(self, args: Namespace) -> float:
        """Work of the last stage in addition to its transformer layers, in units of one such layer."""

    def shared_weight(self, model: Any) -> torch.nn.Parameter | None:
        """The first or the last stage's copy of a weight that both have; None if the model has no such weight.

        The last stage's copy starts with zeros: ``BoundaryModules.tie`` replaces both by their sum.
        """

    def extra_uses(self, model: Any) -> dict[torch.nn.Parameter, int]:
        """Weights that one forward of their module's model uses more than once, and how many times more."""

    def remove_vocabulary(self, args: Namespace, model: Any, stage: Stage, embedding: torch.nn.Module) -> None:
        """Put ``embedding`` in place of the first stage's word embeddings, and remove the last stage's output layer."""


def adapter_of(model: Any) -> ModelAdapter:
    """The adapter of a model, wrapped or not.

    Raises:
        ValueError: it has none.
    """
    model = unwrap_model(model)
    if (adapter := _adapter(model)) is None:
        raise ValueError(
            f"{type(model).__name__} is no GPTModel or HybridModel: give it an attribute pipeline_adapter (model/adapter.py)"
        )
    return adapter


def has_adapter(model: Any) -> bool:
    """Tell whether ``adapter_of`` finds one; a part of a model, such as a single linear, needs none."""
    return _adapter(model) is not None


def _adapter(model: Any) -> ModelAdapter | None:
    built_in = (each for each in (GPT, PATTERN) if each and isinstance(model, each.called_as))
    return getattr(model, "pipeline_adapter", next(built_in, None))


def signature(model: Any) -> inspect.Signature:
    """The signature by which user code calls a model, with ``self``."""
    called_as: Any = adapter_of(model).called_as
    return inspect.signature(called_as.forward)


class GPTAdapter:
    """megatron-core's GPTModel; and HybridModel, which has the same ends, and letters for layers.

    Args:
        called_as: which of the two. GPTModel alone can be built.
    """

    def __init__(self, called_as: type = GPTModel) -> None:
        self.called_as = called_as

    by_token = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
    whole = ("runtime_gather_output",)
    positions = (RotaryEmbedding,)
    attention = (DotProductAttention,)

    def build(self, args: Namespace, config: TransformerConfig, stage: Stage) -> torch.nn.Module:
        """Build one stage; with vocabulary parallelism its vocabulary is as small as can be, for ``remove_vocabulary``."""
        sharded = args.vocabulary.spread
        tied = not args.untie_embeddings_and_output_weights and not sharded
        model = seeding.SeededGPTModel(
            config=config,
            transformer_layer_spec=block_spec(args, config, stage.vp_stage),
            mtp_block_spec=prediction_spec(args, config, stage.vp_stage),
            vocab_size=config.tensor_model_parallel_size if sharded else args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=stage.first,
            post_process=stage.last,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=tied,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            vp_stage=stage.vp_stage,
            seed=args.seed,
        )
        if stage.last and not tied and not sharded:
            _initialize_output_layer(model.output_layer, config, args.seed)
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return model

    def layers(self, args: Namespace, numbers: Sequence[int]) -> list[list[LayerType]]:
        """Embedding, transformer layers, layers of multi-token prediction, and the output layer with the loss."""
        rows = [[LayerType.decoder] * number for number in numbers]
        rows[0].insert(0, LayerType.embedding)
        rows[-1] += [LayerType.mtp] * (args.mtp_num_layers or 0) + [LayerType.loss]
        return rows

    def last_stage_in_layers(self, args: Namespace) -> float:
        """The output layer, by its operations, and each layer of ``--mtp-num-layers`` with the output layer once more.

        The embedding on the first stage only looks up. Transformer layers that differ count as their mean.
        """
        output, further = shape_of(args).output_in_layers(args.recompute_granularity == "full"), args.mtp_num_layers or 0
        return output + further * (1 + output)

    def shared_weight(self, model: Any) -> torch.nn.Parameter | None:
        """The word embeddings, where the output layer is tied to them or multi-token prediction looks tokens up again."""
        if not (model.config.mtp_num_layers or model.share_embeddings_and_output_weights):
            return None
        weight: torch.nn.Parameter | None = model.shared_embedding_or_output_weight()
        return weight

    def extra_uses(self, model: Any) -> dict[torch.nn.Parameter, int]:
        """The output layer, once more for each layer of multi-token prediction."""
        output, times = getattr(model, "output_layer", None), model.config.mtp_num_layers
        return {output.weight: times} if output is not None and output.weight is not None and times else {}

    def remove_vocabulary(self, args: Namespace, model: Any, stage: Stage, embedding: torch.nn.Module) -> None:
        """Make the last stage return its hidden states, after the final norm."""
        if stage.first:
            _initialize_positions(model.embedding, model.config)
            model.embedding.word_embeddings = embedding
        if stage.last:
            del model.output_layer
        model.vocab_size = args.padded_vocab_size
        model.post_process = model.share_embeddings_and_output_weights = False


_HYBRID = "megatron.core.models.hybrid.hybrid_model"
GPT: ModelAdapter = GPTAdapter()
PATTERN: ModelAdapter | None = GPTAdapter(compat.get(_HYBRID, "HybridModel")) if compat.has_patterns() else None


def _initialize_output_layer(output_layer: Any, config: TransformerConfig, seed: int) -> None:
    """Draw the output weights from a seed of their own, independent of the layers before them on this stage."""
    seeding.seed_layer(seeding.weight_base(seed), seeding.output_layer(config))
    weight, group = output_layer.weight, output_layer.tp_group
    if not config.use_cpu_initialization:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            config.init_method(weight)
        return
    compat.get("megatron.core.tensor_parallel.layers", "_initialize_affine_weight_cpu")(
        weight,
        output_layer.output_size,
        output_layer.input_size,
        output_layer.output_size_per_partition,
        partition_dim=0,
        init_method=config.init_method,
        params_dtype=config.params_dtype,
        rank=group.rank(),
        world_size=group.size(),
        skip_set_tensor_parallel_attributes=True,
    )


def _initialize_positions(embedding: Any, config: TransformerConfig) -> None:
    """Draw the position embeddings as megatron-core does, from where drawing the word embeddings has left the random stream."""
    if embedding.add_position_embedding and config.perform_initialization:
        embedding.position_embeddings.reset_parameters()
        config.embedding_init_method(embedding.position_embeddings.weight)
