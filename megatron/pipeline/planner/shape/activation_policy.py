"""Share of a microbatch's activations that a rank holds, and the kernels that decide what is kept."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.pipeline.planner.shape.description import HALF, SINGLE, ModelDescription

NOTHING, ITERATION = "none", "full_iteration"
LAUNCHED = frozenset(("attn", "mlp", "mamba", "moe_router", "moe_preprocess", "moe"))  # by CUDA graphs: their modules
_FUSED_KEYS = {"local": 4096, "transformer_engine": 16384}  # the most that the kernels of softmax take


@dataclass(frozen=True)
class ActivationPolicy:
    """Policy by which a rank holds its share of the activations. By default it holds all of them, in 16 bits, under fused
    attention.

    Attributes:
        number: bytes of a number.
        tensor, context: ranks that share each layer, and ranks that share each sequence.
        sequence_parallel: norms and dropout are cut along the sequence over the former as well.
        attention_matrices: attention is not fused and keeps what it makes of every query and key.
        wide_softmax: that attention's softmax is not fused either: it keeps its probabilities in float32, and a copy in 16 bits.
        logits_kept: bytes of each logit that cross entropy keeps.
        native_loss: it is megatron-core's fused one, whose compiled steps write nothing in place.
        deferred_logits: microbatches whose gradients of logits wait for the output layer's W.
        fused_norms: a norm is one module with the linear layer behind it, where one layer reads it: Transformer Engine's.
        hidden_masks, attention_masks: there is dropout of hidden states, and of attention probabilities.
        recomputed: what B makes again in every layer, by the names of ``--recompute-modules``.
        offloaded: modules whose activations are in host memory between F and B, by the names of ``--offload-modules`` with ``>``
            before each.
        recompute_layers: layers of a unit of which F keeps the input alone; 0 where no whole layers are made again.
        recompute_first: recompute only this number of first layers of a chunk, each a unit of its own.
        graphed: parts of layers that CUDA graphs launch, by the names of ``--cuda-graph-scope``; or the whole ``ITERATION``.
        weights_in_b: the graphs are megatron-core's, whose B has the weight gradients of the layers.
        logits_limit: bytes in float32 above which a shard of a spread vocabulary does not keep its logits.
    """

    number: int = HALF
    tensor: int = 1
    context: int = 1
    sequence_parallel: bool = False
    attention_matrices: bool = False
    wide_softmax: bool = False
    logits_kept: int = SINGLE
    native_loss: bool = False
    deferred_logits: int = 0
    fused_norms: bool = False
    hidden_masks: bool = True
    attention_masks: bool = True
    recomputed: frozenset[str] = frozenset()
    offloaded: frozenset[str] = frozenset()
    recompute_layers: int = 0
    recompute_first: bool = False
    graphed: frozenset[str] = frozenset()
    weights_in_b: bool = False
    logits_limit: int | None = None

    @classmethod
    def of(cls, model: ModelDescription) -> ActivationPolicy:
        """From a training's description."""
        modules, graphed = model.recompute_modules or ("core_attn",), _graphed(model)
        fused = model.cross_entropy_loss_fusion and model.cross_entropy_fusion_impl
        return cls(
            number=model.number,
            tensor=model.tensor_model_parallel_size,
            context=model.context_parallel_size,
            sequence_parallel=model.sequence_parallel,
            attention_matrices=not _fuses_attention(model),
            wide_softmax=not _fuses_softmax(model),
            logits_kept=model.number if fused == "te" else SINGLE,
            native_loss=fused == "native",
            deferred_logits=_deferred_logits(model),
            fused_norms=model.transformer_impl != "local",
            hidden_masks=model.hidden_dropout > 0,
            attention_masks=model.attention_dropout > 0,
            recomputed=frozenset(modules if model.recompute_granularity == "selective" else ()),
            offloaded=_offloaded(model),
            recompute_layers=model.recompute_num_layers or 0,
            recompute_first=model.recompute_method == "block",
            graphed=graphed,
            weights_in_b=model.cuda_graph_impl == "local" and ITERATION not in graphed and not model.num_experts,
            logits_limit=model.logits_limit,
        )

    @property
    def recomputes(self) -> bool:
        """Tell whether B makes anything again, or has it brought back."""
        return bool(self.recomputed or self.offloaded or self.recompute_layers)

    @property
    def layer_graphs(self) -> bool:
        """Tell whether CUDA graphs launch single layers, or parts of them."""
        return bool(self.graphed) and ITERATION not in self.graphed

    @property
    def of_whole_layers(self) -> float:
        """The share of what tensor-parallel ranks hold each for themselves, unless they cut it along the sequence."""
        return 1 / (self.context * (self.tensor if self.sequence_parallel else 1))

    @property
    def of_cut_layers(self) -> float:
        """The share of what they cut by heads and by the width of the MLP."""
        return 1 / (self.context * self.tensor)


def _graphed(model: ModelDescription) -> frozenset[str]:
    if model.cuda_graph_impl == NOTHING:
        return frozenset()
    whole = ITERATION in (model.cuda_graph_impl, *model.cuda_graph_scope)
    return frozenset((ITERATION,)) if whole else model.cuda_graph_scope or LAUNCHED


def _fuses_attention(model: ModelDescription) -> bool:
    """Tell whether attention is one kernel: megatron-core's own (``local``) is not, nor what ``--attention-backend`` names."""
    return model.transformer_impl != "local" and model.attention_backend not in ("unfused", "local")


def _fuses_softmax(model: ModelDescription) -> bool:
    """Tell whether a kernel scales, masks and takes the softmax at once, of attention that is not fused.

    megatron-core's ``fused_softmax.py`` has one for up to 4096 keys; ours of context parallelism has none. Transformer Engine's
    does not depend on ``--no-masked-softmax-fusion``.
    """
    local = model.transformer_impl == "local"
    taken = model.seq_length <= _FUSED_KEYS["local" if local else "transformer_engine"]
    return taken and (not local or (model.masked_softmax_fusion and model.context_parallel_size == 1))


def _offloaded(model: ModelDescription) -> frozenset[str]:
    """Under megatron-core's own schedules: ours leave it out. Attention that is made again has nothing to move."""
    on = model.fine_grained_activation_offloading and model.recompute_granularity != "full"
    again = ">core_attn" if model.recompute_granularity and "core_attn" in (model.recompute_modules or ("core_attn",)) else ""
    names = model.offload_modules or () if on and model.is_stock else ()
    return frozenset(f">{name}" for name in names) - {again}


def _deferred_logits(model: ModelDescription) -> int:
    if not model.defer_embedding_wgrad_compute:
        return 0
    microbatches = model.global_batch_size // (model.micro_batch_size * model.data_parallel_size)
    return min(model.wgrad_deferral_limit or microbatches, microbatches)
