"""Share of a microbatch's activations that a rank holds, and the kernels that decide what is kept."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

from megatron.pipeline.planner.schedule.core.names import STOCK
from megatron.pipeline.planner.shape.precision import HALF

SINGLE = 4  # bytes of a number in float32; HALF: in fp16 or bf16
NOTHING, LAYERS, ITERATION = "none", "layers", "full_iteration"  # what CUDA graphs launch at once
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
        layer_graphs: CUDA graphs launch single layers. For a layer and a microbatch that is held there is one, which keeps the
            gradient of its output: an estimate.
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
    layer_graphs: bool = False
    logits_limit: int | None = None

    @classmethod
    def of(cls, args: Namespace) -> ActivationPolicy:
        """From Megatron-LM's flags after ``validate``; those of kernels may be missing."""
        modules = args.recompute_modules or ("core_attn",)
        fused = getattr(args, "cross_entropy_loss_fusion", False) and getattr(args, "cross_entropy_fusion_impl", "native")
        return cls(
            number=number_bytes(args),
            tensor=args.tensor_model_parallel_size,
            context=args.context_parallel_size,
            sequence_parallel=args.sequence_parallel,
            attention_matrices=not fuses_attention(args),
            wide_softmax=not fuses_softmax(args),
            logits_kept=number_bytes(args) if fused == "te" else SINGLE,
            native_loss=fused == "native",
            deferred_logits=_deferred_logits(args),
            fused_norms=args.transformer_impl != "local",
            hidden_masks=args.hidden_dropout > 0,
            attention_masks=args.attention_dropout > 0,
            recomputed=frozenset(modules if args.recompute_granularity == "selective" else ()),
            offloaded=_offloaded(args),
            recompute_layers=args.recompute_num_layers or 0,
            recompute_first=args.recompute_method == "block",
            layer_graphs=graphs(args) == LAYERS,
            logits_limit=args.vocabulary.logits_limit,
        )

    @property
    def recomputes(self) -> bool:
        """Tell whether B makes anything again, or has it brought back."""
        return bool(self.recomputed or self.offloaded or self.recompute_layers)

    @property
    def of_whole_layers(self) -> float:
        """The share of what tensor-parallel ranks hold each for themselves, unless they cut it along the sequence."""
        return 1 / (self.context * (self.tensor if self.sequence_parallel else 1))

    @property
    def of_cut_layers(self) -> float:
        """The share of what they cut by heads and by the width of the MLP."""
        return 1 / (self.context * self.tensor)


def graphs(args: Namespace) -> str:
    """Parts that CUDA graphs launch at once: ``NOTHING``, ``LAYERS``, or the whole ``ITERATION``."""
    kind = getattr(args, "cuda_graph_impl", "none") or "none"
    if kind in (NOTHING, ITERATION):
        return kind
    return ITERATION if ITERATION in graphed(args) else LAYERS


def graphed(args: Namespace) -> set[str]:
    """Parts of layers that CUDA graphs launch, by the names of ``--cuda-graph-scope``."""
    return {str(getattr(part, "name", part)) for part in getattr(args, "cuda_graph_scope", None) or ()}


def fuses_attention(args: Namespace) -> bool:
    """Tell whether attention is one kernel: megatron-core's own (``local``) is not, nor what ``--attention-backend`` names."""
    backend = getattr(args, "attention_backend", None)
    name = getattr(backend, "name", backend)  # under mpipe launch it is a member of an enumeration
    return args.transformer_impl != "local" and name not in ("unfused", "local")


def fuses_softmax(args: Namespace) -> bool:
    """Tell whether a kernel scales, masks and takes the softmax at once, of attention that is not fused.

    megatron-core's ``fused_softmax.py`` has one for up to 4096 keys; ours of context parallelism has none. Transformer Engine's
    does not depend on ``--no-masked-softmax-fusion``.
    """
    local = args.transformer_impl == "local"
    taken = args.seq_length <= _FUSED_KEYS["local" if local else "transformer_engine"]
    return taken and (not local or bool(args.masked_softmax_fusion and args.context_parallel_size == 1))


def _offloaded(args: Namespace) -> frozenset[str]:
    """Under megatron-core's own schedules: ours leave it out. Attention that is made again has nothing to move."""
    on = getattr(args, "fine_grained_activation_offloading", False) and args.recompute_granularity != "full"
    again = ">core_attn" if args.recompute_granularity and "core_attn" in (args.recompute_modules or ("core_attn",)) else ""
    names = args.offload_modules or () if on and args.pipeline.schedule == STOCK else ()
    return frozenset(f">{name}" for name in names) - {again}


def _deferred_logits(args: Namespace) -> int:
    if not getattr(args, "defer_embedding_wgrad_compute", False):
        return 0
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    return min(args.wgrad_deferral_limit or microbatches, microbatches)


def number_bytes(args: Namespace) -> int:
    """Bytes of a weight and of an activation."""
    return HALF if args.bf16 or args.fp16 else SINGLE
