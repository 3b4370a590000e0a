"""Flags of megatron-core's own that do less than they say, under any schedule: what runs warn of at their start.

Most are silent: losses fall, and are not those of another layout. ``mpipe check`` shows by how much.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from megatron.pipeline.patches import compat

from megatron.pipeline.flags.flags import flag_of, switched_on

PACKED = ("sft", "dataloader_inter_document_masking")  # sequences whose documents attention keeps apart by their lengths
_READ = "0.19"  # the last release whose sources were read for this table


class Caution(NamedTuple):
    """A combination of flags that does wrong or nothing.

    Attributes:
        meets: tells whether flags are such.
        words: about them, with the names of flags in braces for their values, and those that ``_facts`` adds.
        since, mended: the first releases of megatron-core with the error, and without it again; None where there is none yet.
    """

    meets: Callable[[Any], object]
    words: str
    since: str = "0.0"
    mended: str | None = None


def cautions(args: Namespace) -> list[str]:
    """Settings that do wrong or nothing, of validated flags, and what to change; ``args`` may lack Megatron-LM's own."""
    facts = _Facts(args)
    found = [one for one in CAUTIONS if compat.is_from(one.since) and not (one.mended and compat.is_from(one.mended))]
    return [one.words.format_map(facts) + _release(one) for one in found if one.meets(facts)]


class _Facts(dict[str, Any]):
    """Flags by name, as attributes and as items; one that ``args`` lack is None."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(vars(args))
        masked = switched_on(args, "eod_mask_loss", "sft")
        self |= {"masked": masked and flag_of(masked), "balancing": self._balancing(), "replicas": self.data_parallel_size or 1}
        tensor, experts = self.tensor_model_parallel_size, self.expert_model_parallel_size
        self |= {"cut": tensor * self.context_parallel_size, "cut_norm": tensor > 1 and self.clip_grad}
        self["cut_experts"] = experts > 1 or (self.expert_tensor_parallel_size or tensor) > 1

    def __getattr__(self, name: str) -> Any:
        return self.get(name)

    def _balancing(self) -> str:
        """The flags of the experts' own losses, with their values."""
        kinds, weights = (_listed(self.get(f"moe_{name}")) for name in ("router_load_balancing_type", "aux_loss_coeff"))
        losses = [f"--moe-router-load-balancing-type {kind}" for kind, weight in zip(kinds, weights, strict=False) if weight]
        return " and ".join(losses + ([f"--moe-z-loss-coeff {self.moe_z_loss_coeff}"] if self.moe_z_loss_coeff else []))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _release(one: Caution) -> str:
    if one.mended is None:
        return f" (not mended up to megatron-core {_READ})"
    return f" (mended in megatron-core {one.mended})" if one.mended else ""


def _has_engine(least: tuple[int, int]) -> bool:
    try:
        return tuple(map(int, version("transformer-engine").split(".")[:2])) >= least
    except PackageNotFoundError:
        return False


_NO_ERROR = ""  # in place of a release that mends it: upstream means it so
# fmt: off
CAUTIONS = (
    Caution(
        lambda to: to.masked and to.context_parallel_size > 1 and not to.calculate_per_token_loss,
        "{masked} with --context-parallel-size {context_parallel_size}: every context-parallel rank takes the mean over its own "
        "tokens that count, and the loss is the mean of these means: give --calculate-per-token-loss",
    ),
    Caution(
        lambda to: to.mtp_num_layers and to.context_parallel_size > 1 and not to.calculate_per_token_loss,
        "--mtp-num-layers {mtp_num_layers} with --context-parallel-size {context_parallel_size}: the losses of further tokens "
        "are means over each context-parallel rank's own tokens, and the rank with the sequence's end has fewer: its own "
        "weigh more than without context parallelism",
    ),
    Caution(
        lambda to: (to.mtp_num_layers and to.calculate_per_token_loss
                    and (to.context_parallel_size > 1 or (to.masked and to.replicas > 1))),
        "--mtp-num-layers {mtp_num_layers} with --calculate-per-token-loss on {replicas} data-parallel x {context_parallel_size} "
        "context-parallel ranks: every rank weighs the losses of further tokens by its own number of tokens that count, and "
        "these numbers differ: another number of ranks is another loss",
        since="0.17",
    ),
    Caution(
        lambda to: to.num_experts and to.balancing and to.calculate_per_token_loss and to.cut > 1,
        "{balancing} with --calculate-per-token-loss on {tensor_model_parallel_size} tensor x {context_parallel_size} context "
        "parallel ranks: these losses of the router count {cut} times too little: multiply their coefficients by {cut}",
        mended="0.19",
    ),
    Caution(
        lambda to: to.num_experts and to.calculate_per_token_loss and to.micro_batch_size > 1 and " seq_aux_loss" in to.balancing,
        "--moe-router-load-balancing-type seq_aux_loss with --calculate-per-token-loss and --micro-batch-size "
        "{micro_batch_size}: this loss counts {micro_batch_size} times too little: multiply its coefficient by "
        "{micro_batch_size}",
        since="0.16",
        mended="0.19",
    ),
    Caution(
        lambda to: to.softmax_type == "learnable" and to.cut_norm,
        "--softmax-type learnable with --tensor-model-parallel-size {tensor_model_parallel_size}: the gradient norm, by which "
        "--clip-grad {clip_grad} clips, has the attention sinks of the first tensor-parallel rank alone",
    ),
    Caution(
        lambda to: (to.num_experts and to.add_bias_linear and to.sequence_parallel and to.transformer_impl != "transformer_engine"
                    and to.expert_tensor_parallel_size == 1 < to.tensor_model_parallel_size),
        "experts with biases, --tensor-model-parallel-size {tensor_model_parallel_size} and --expert-tensor-parallel-size 1: the "
        "gradients of the last biases of experts on different tensor-parallel ranks are added up: give --disable-bias-linear",
    ),
    Caution(
        lambda to: (to.moe_grouped_gemm and to.transformer_impl == "transformer_engine" and to.cut_norm and to.cut_experts
                    and _has_engine((2, 13))),
        "--moe-grouped-gemm with --tensor-model-parallel-size {tensor_model_parallel_size} and Transformer Engine 2.13 or newer: "
        "the gradient norm, by which --clip-grad {clip_grad} clips, lacks the experts that are not on the first tensor-parallel "
        "rank",
        since="0.17",
        mended="0.19",
    ),
    Caution(
        lambda to: to.reset_attention_mask and to.transformer_impl == "transformer_engine",
        "--reset-attention-mask has no effect: Transformer Engine's causal attention takes no other mask, and goes across "
        "documents: give --transformer-impl local",
        mended=_NO_ERROR,
    ),
    Caution(
        lambda to: (to.reset_attention_mask and to.transformer_impl != "transformer_engine"
                    and to.create_attention_mask_in_dataloader is False),
        "--reset-attention-mask has no effect with --no-create-attention-mask-in-dataloader, and attention goes across "
        "documents: leave the latter out",
        mended=_NO_ERROR,
    ),
)
# fmt: on
