"""Work and memory of a GPT: its shape, and the operations of its layers.

Operations are those of the matrix products, two per multiply-add, of one microbatch on all ranks that share a layer. Biases and
norms, below 0.1 % of them, are left out. ``activations`` has what a rank holds of a microbatch, ``parameters`` its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.hybrid import ATTENTION, EXPERTS, MLP, Hybrid
from megatron.pipeline.planner.shape.latent import Latent
from megatron.pipeline.planner.shape.mixer import Mixer
from megatron.pipeline.planner.shape.precision import Quantized
from megatron.pipeline.planner.shape.trained import WIDE_INPUTS, Trained
from megatron.pipeline.planner.shape.windows import Windows

_WHOLE = ActivationPolicy()
DIFFERING = ("experts", "quantized", "windows", "hybrid", "trained")  # what may differ from layer to layer


class Work(NamedTuple):
    """Operations, or seconds, of one microbatch: forward, backward for the input, backward for the weights."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weight

    def times(self, count: float) -> Work:
        return Work(*(count * operations for operations in self))

    def by(self, times: Work) -> Work:
        return Work(*(one * each for one, each in zip(self, times, strict=True)))

    def plus(self, other: Work) -> Work:
        return Work(*(one + more for one, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Shape:
    """The shape of a GPT, and of its microbatches.

    Attributes:
        layers: transformer layers.
        hidden: width h of the residual stream.
        heads, groups, head_width: attention heads, the key/value heads that they share, and the width of each query.
        ffn: width of the MLP that a token passes; where there are experts, a mean over the layers.
        gated: whether the MLP has two matrices before its activation instead of one.
        seq: tokens s of a sample.
        microbatch: samples b.
        vocabulary: rows V of the embedding and of the output layer, padding included.
        norm: numbers of a norm for each channel: 1 of RMSNorm, 2 of LayerNorm; by default norms are left out.
        biases, qkv_bias: whether all linear layers have biases, and whether queries, keys and values do.
        qk_norm: whether queries and keys are normalised.
        positions: rows of learned position embeddings.
        mtp_layers: layers of multi-token prediction, each with the output layer once more.
        experts: what the MLP is in some layers.
        latent: what queries, keys and values are made from, if not from hidden states.
        policy: how a rank holds its share of the activations.
        quantized: which linears are in fewer than 16 bits, if any.
        windows: how many keys attention reads in every layer, if not all.
        sinks: parameters of attention sinks, one for each head.
        hybrid: what every layer is, if not attention and an MLP or experts.
        gates: width of the gate of attention's output, which is made beside queries.
        trained: what trains, if not all.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head_width: int
    ffn: float
    gated: bool
    seq: int
    microbatch: int
    vocabulary: int
    norm: int = 0
    biases: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    positions: int = 0
    mtp_layers: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    policy: ActivationPolicy = _WHOLE
    quantized: Quantized | None = None
    windows: Windows | None = None
    hybrid: Hybrid | None = None
    sinks: int = 0
    gates: int = 0
    trained: Trained | None = None

    @classmethod
    def plain(cls, layers: int, hidden: int, heads: int, seq: int, vocabulary: int, microbatch: int = 1) -> Shape:
        """GPT-2's and GPT-3's: an MLP of four times the width, and heads that share nothing.

        Raises:
            ValueError: the width is not a multiple of the number of heads.
        """
        if hidden % heads:
            raise ValueError(f"a hidden size of {hidden} is not a multiple of {heads} heads: change one of the two")
        return cls(layers, hidden, heads, heads, hidden // heads, 4 * hidden, False, seq, microbatch, vocabulary)

    @classmethod
    def of(cls, model: ModelDescription) -> Shape:
        """From a training's description, ``padded_vocab_size`` included."""
        experts, latent, hybrid = Experts.of(model), Latent.of(model), Hybrid.of(model)
        shape = cls(
            layers=model.num_layers,
            hidden=model.hidden_size,
            heads=model.num_attention_heads,
            groups=(model.num_query_groups if model.group_query_attention else None) or model.num_attention_heads,
            head_width=model.qk_head_dim + latent.position if latent else model.kv_channels,
            ffn=experts.mean_ffn if experts else model.ffn_hidden_size,
            gated=model.swiglu,
            seq=model.seq_length,
            microbatch=model.micro_batch_size,
            vocabulary=model.padded_vocab_size,
            norm=1 if model.normalization == "RMSNorm" else 2,
            biases=model.add_bias_linear,
            qkv_bias=model.add_qkv_bias or model.add_bias_linear,
            qk_norm=model.qk_layernorm,
            positions=model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0,
            mtp_layers=model.mtp_num_layers or 0,
            experts=experts,
            latent=latent,
            policy=ActivationPolicy.of(model),
            quantized=Quantized.of(model),
            windows=Windows.of(model),
            hybrid=hybrid,
            gates=model.num_attention_heads * model.kv_channels if model.attention_output_gate and not latent else 0,
            sinks=model.num_attention_heads if model.softmax_type == "learnable" else 0,
            trained=Trained.of(model),
        )
        return replace(shape, ffn=shape._mean_ffn(model.ffn_hidden_size)) if hybrid else shape

    def share(self, symbol: str) -> float:
        """Share of the layers with a part of a kind: attention and an MLP, or experts, are in each one unless it is hybrid."""
        if self.hybrid:
            return self.hybrid.share(symbol)
        experts = self.experts.share if self.experts else 0.0
        return {ATTENTION: 1.0, MLP: 1 - experts, EXPERTS: experts}[symbol]

    def symbols(self, layer: int) -> tuple[str, ...]:
        """Parts of one layer, counted from 0."""
        if self.hybrid:
            return tuple(self.hybrid.layers[layer])
        return ATTENTION, EXPERTS if self.experts and self.experts.layers[layer] else MLP

    @property
    def attention(self) -> float:
        """Share of the layers that have attention."""
        return self.share(ATTENTION)

    @property
    def parts(self) -> int:
        """Parts of a layer, each with a norm before it and added to the residual stream."""
        return len(self.hybrid.layers[0]) if self.hybrid else 2

    @property
    def mixers(self) -> list[tuple[float, Mixer]]:
        """Other kinds of layers, each with its share of them."""
        return [(self.hybrid.share(symbol), mixer) for symbol, mixer in self.hybrid.mixers] if self.hybrid else []

    @property
    def mixer(self) -> Mixer:
        """Their mean over all layers."""
        found = Mixer()
        for share, mixer in self.mixers:
            found = Mixer(*(one + share * more for one, more in zip(found, mixer, strict=True)))
        return found

    @property
    def predictor(self) -> Shape:
        """The layers of one step of multi-token prediction: one that is as the last, or those of a hybrid model's pattern."""
        last = self.of_layers(range(self.layers - 1, self.layers))
        if not (self.hybrid and self.hybrid.predictor):
            return replace(last, layers=1)
        symbols = self.hybrid.predictor
        own: dict[str, Any] = {"layers": len(symbols), "hybrid": replace(self.hybrid, layers=symbols)}
        if self.experts:
            own["experts"] = replace(self.experts, layers=tuple(EXPERTS in symbol for symbol in symbols))
        if last.quantized:
            own["quantized"] = replace(last.quantized, layers=last.quantized.layers[-1:] * len(symbols))
        found = replace(last, **own)
        return replace(found, ffn=found._mean_ffn(self.dense_ffn))

    @property
    def dense_ffn(self) -> float:
        """Width of an MLP in the layers that have one."""
        if self.experts:
            return self.experts.dense_ffn
        return self.ffn / self.share(MLP) if self.ffn else 0.0

    def _mean_ffn(self, dense: float) -> float:
        return self.share(MLP) * dense + (self.experts.mean_routed_ffn if self.experts else 0.0)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch: b*s."""
        return self.microbatch * self.seq

    @property
    def queries(self) -> int:
        return self.heads * self.head_width

    @property
    def keys_and_values(self) -> int:
        """Values that attention reads."""
        if self.latent:
            return self.heads * (self.head_width + self.latent.values)
        return 2 * self.groups * self.head_width

    @property
    def projected_keys_and_values(self) -> int:
        """Keys and values that a linear layer makes: the part with the position, where it is one for all heads, is not among
        them.
        """
        return self.keys_and_values - (self.heads * self.latent.position if self.latent else 0)

    @property
    def queries_and_keys(self) -> float:
        """Values that are rotated."""
        return 2 * self.queries if self.latent else self.queries + self.keys_and_values / 2

    @property
    def attended(self) -> int:
        """Values that attention makes."""
        return self.heads * self.latent.values if self.latent else self.queries

    @property
    def latent_weights(self) -> int:
        """Weights that make what queries, keys and values are made from; every rank that shares a layer has all of them."""
        return self.hidden * self.latent.width if self.latent else 0

    @property
    def routed_hidden(self) -> int:
        """Width of the tokens that visit experts."""
        return (self.experts and self.experts.latent) or self.hidden

    @property
    def narrowing_weights(self) -> int:
        """Weights of a layer with experts that make these tokens of hidden states, and hidden states of them."""
        return 2 * self.hidden * self.experts.latent if self.experts and self.experts.latent else 0

    @property
    def cut_attention_weights(self) -> int:
        """The other weights of attention, of which such a rank has a part."""
        if self.latent is None:
            return self.hidden * (2 * self.queries + self.keys_and_values + self.gates)
        return self.widening_weights + self.hidden * self.attended

    @property
    def widening_weights(self) -> int:
        """Those of them that make queries, keys and values from narrow vectors."""
        latent = self.latent
        if latent is None:
            return 0
        return (latent.queries or self.hidden) * self.queries + latent.keys * self.projected_keys_and_values

    @property
    def norms_alone(self) -> float:
        """Norms of a layer that are modules of their own, as a mean over the layers.

        Those of megatron-core's ``gpt_layer_specs.py``: Transformer Engine has a norm within the linear layer that reads it,
        unless two of them do, as in multi-latent attention, or experts.
        """
        if not self.policy.fused_norms:
            return float(self.parts)
        return self.attention * (self.latent is not None) + self.share(EXPERTS)

    @property
    def layer_weights(self) -> float:
        """Weights of a layer's matrices that a token meets: 12h^2 of a plain GPT."""
        attention = self.attention * (self.latent_weights + self.cut_attention_weights)
        return attention + self.hidden * (self.mixer.projected + self.mixer.mixed) + self.mlp_weights + self.expert_weights

    @property
    def mlp_weights(self) -> float:
        """Those of its MLP, as a mean over the layers."""
        return self.matrices * self.hidden * (self.ffn - (self.experts.mean_routed_ffn if self.experts else 0.0))

    @property
    def expert_weights(self) -> float:
        """Those of its experts, as a mean over the layers."""
        if not self.experts:
            return 0.0
        routed, visited = self.experts.mean_routed_ffn, self.experts.mean_visited_ffn
        own = self.matrices * (self.hidden * (routed - visited) + self.routed_hidden * visited)
        return own + self.experts.share * self.narrowing_weights

    @property
    def matrices(self) -> int:
        """Matrices of an MLP, or of an expert."""
        return 3 if self.gated else 2

    @property
    def keys(self) -> float:
        """Keys that a query reads, as a mean over the layers."""
        return self.windows.mean if self.windows else self.seq

    def of_layers(self, numbers: range) -> Shape:
        """The same with means over some layers alone, of all that differs from layer to layer."""
        own: dict[str, Any] = {}
        for name in DIFFERING:
            kinds: Any = getattr(self, name)
            if numbers and kinds and len(set(kinds.layers)) > 1:
                own[name] = replace(kinds, layers=kinds.layers[numbers.start : numbers.stop])
        found = replace(self, **own) if own else self
        return replace(found, ffn=found._mean_ffn(self.dense_ffn)) if own.keys() & {"experts", "hybrid"} else found

    @property
    def passes(self) -> tuple[float, float]:
        """Shares of the layers that run B, and that run W for all of their weights."""
        return (self.trained.backward, self.trained.whole) if self.trained else (1.0, 1.0)

    def trains(self, end: str) -> bool:
        """Tell whether the embedding or the output layer trains."""
        return self.trained is None or end in self.trained.names

    @property
    def adapters(self) -> list[Adapter]:
        """Adapters of a layer; those of experts are as wide as all that a token visits."""
        own, made, some = float(self.latent is None), self.queries + self.keys_and_values + self.gates, self.share(MLP)
        some += self.share(EXPERTS)
        ffn = self.ffn / (some or 1.0)
        rows = [
            Adapter("linear_qkv", self.hidden, made, own * self.attention),
            Adapter("linear_proj", self.attended, self.hidden, self.attention),
            Adapter("linear_fc1", self.hidden, (self.matrices - 1) * ffn, some),
            Adapter("linear_fc2", ffn, self.hidden, some),
        ]
        return [row for row in rows if self.trained and row.target in self.trained.names]

    @property
    def hidden_bytes(self) -> float:
        """Bytes of what stages hand on: 2sbh in 16 bits."""
        return self.policy.number * self.tokens * self.hidden * self.policy.of_whole_layers

    @property
    def attention_share(self) -> float:
        """The share of a layer's F that grows with the square of a sequence: the ``attention`` of ``loads_of``."""
        return attention_work(self).forward / layer_work(self).forward

    def training_operations(self, causal: bool = False) -> float:
        """Operations of one microbatch through the whole model, forwards and backwards, without recomputation.

        Narayanan et al. (appendix) without their activation recomputation: 72blsh^2 (1 + s/6h + V/12lh). Experts are equally
        loaded.
        """
        shape = self
        if shape.experts:
            shape = replace(shape, experts=replace(shape.experts, load=1.0))
            shape = replace(shape, ffn=shape._mean_ffn(shape.dense_ffn))
        return layer_work(shape, causal).times(shape.layers).total + output_work(shape).total

    def output_in_layers(self, recompute: bool = False) -> float:
        """Number of transformer layers that take as long as the output layer: V/(12h + 2s) for a plain GPT.

        Args:
            recompute: whether layers run their forward again before the backward, as Narayanan et al. count: V/(16h + 8s/3).
        """
        layer = layer_work(self)
        return output_work(self).total / (layer.total + (layer.forward if recompute else 0))


class Adapter(NamedTuple):
    """An adapter beside a linear.

    Attributes:
        target: the linear's name.
        inputs, outputs: its widths.
        share: of the layers that have one.
    """

    target: str
    inputs: float
    outputs: float
    share: float

    def held(self, policy: ActivationPolicy) -> tuple[float, float]:
        """Numbers of the linear's input and output that a rank holds for every token."""
        whole, cut = self.share * policy.of_whole_layers, self.share * policy.of_cut_layers
        reads, makes = (whole, cut) if self.target in WIDE_INPUTS else (cut, whole)
        return self.inputs * reads, self.outputs * makes


def layer_work(shape: Shape, causal: bool = False) -> Work:
    """Operations of a transformer layer: F sbh(24h+4s), B sbh(24h+8s), W sbh(24h) for a plain GPT.

    Qi et al., "Zero Bubble Pipeline Parallelism", table 1; together the 72bsh^2(1 + s/6h) of Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters". Attention's two products with all keys have no weights, so no W.

    Args:
        causal: count only the half of those two that no mask hides, instead of the whole as both papers do.
    """
    return linear_work(shape).plus(attention_work(shape, causal))


def linear_work(shape: Shape) -> Work:
    """Operations of a layer's products with weights."""
    products = 2 * shape.tokens * shape.layer_weights
    return Work(products, products, products)


def attention_work(shape: Shape, causal: bool = False) -> Work:
    """Operations of a layer's products of queries, keys and values alone: F 4bs^2h, B 8bs^2h; and of a ``Mixer``.

    An ``Indexer`` learns from its own loss: B has nothing to do for its input.
    """
    share, latent, mixer = shape.attention * (0.5 if causal else 1.0), shape.latent, shape.mixer
    each, scores, weights = 2 * share * shape.keys * (shape.queries + shape.attended), 0.0, 0.0
    if latent and latent.indexer:
        each = 2 * share * latent.indexer.keys * shape.heads * (2 * latent.keys + latent.position)
        ranks = shape.policy.tensor  # each of which does all of it
        scores = ranks * 2 * share * latent.indexer.heads * latent.indexer.width * shape.seq
        weights = ranks * 2 * shape.attention * latent.indexer.weights(shape.hidden, latent.queries)
    forward, backward = each + scores + weights + mixer.forward, 2 * (each + scores) + mixer.backward
    return Work(shape.tokens * forward, shape.tokens * backward, shape.tokens * weights)


def expert_work(shape: Shape) -> Work:
    """Operations of the experts of a layer that some tokens visit."""
    width = shape.experts.mean_visited_ffn if shape.experts else 0.0
    products = 2 * shape.tokens * shape.routed_hidden * shape.matrices * width
    return Work(products, products, products)


def output_work(shape: Shape) -> Work:
    """Operations of the output layer: 2bshV each."""
    product = row_work(shape) * shape.vocabulary
    return Work(product, product, product)


def row_work(shape: Shape) -> float:
    """Operations of one product with one row of the output layer: 2bsh."""
    return 2 * shape.tokens * shape.hidden
