"""Layers that are measured: those of a model at several tensor-parallel sizes and microbatch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape

_VOCABULARY = 128  # rows of a vocabulary that is not measured


@dataclass(frozen=True)
class Size:
    """A layer of the model as one of ``tensor`` ranks has it, for ``microbatch`` samples at once."""

    tensor: int
    microbatch: int

    def __str__(self) -> str:
        return f"1/{self.tensor} of a layer, {self.microbatch} {'sample' if self.microbatch == 1 else 'samples'}"


def dense(args: Settings) -> Settings:
    """The same model with one MLP, as wide as those that a token passes on average, in the place of experts.

    Args:
        args: after ``validate``.
    """
    experts = Experts.of(args)
    if experts is None:
        return args
    widths = ("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "expert_tensor_parallel_size")
    one = {"ffn_hidden_size": round(experts.mean_ffn), "moe_grouped_gemm": False, "moe_layer_freq": 1}
    return args | dict.fromkeys(widths) | one


def candidates(args: Settings, tensors: Sequence[int], microbatches: Sequence[int]) -> list[Size]:
    """All sizes of the model that can be built.

    Args:
        args: flags of a dense model after ``validate``.

    Raises:
        ValueError: no tensor-parallel size divides the model.
    """
    fitting = [tensor for tensor in tensors if not any(width % tensor for width in _cut(args).values())]
    if not fitting:
        widths = ", ".join(f"{width} of --{name.replace('_', '-')}" for name, width in _cut(args).items())
        raise ValueError(f"--tensor {','.join(map(str, tensors))}: none of these divides {widths}; 1 always does")
    return [Size(tensor, microbatch) for tensor in sorted(set(fitting)) for microbatch in sorted(set(microbatches))]


def shape(args: Settings, size: Size) -> Shape:
    """The model whose layer is measured, cut over ``size.tensor`` ranks."""
    sizes = {"tensor_model_parallel_size": size.tensor, "micro_batch_size": size.microbatch, "padded_vocab_size": _VOCABULARY}
    return Shape.of(args | sizes)


def layer_flags(args: Settings, size: Size) -> Settings:
    """A model of one layer that is by itself what one of the ranks has: as wide a residual stream, fewer heads, a smaller MLP."""
    cut = {name: width // size.tensor for name, width in _cut(args).items()}
    return args | cut | {"num_layers": 1, "micro_batch_size": size.microbatch, "padded_vocab_size": _VOCABULARY}


def _cut(args: Settings) -> dict[str, int]:
    """Sizes that tensor-parallel ranks share, by the names of flags."""
    names = ("num_attention_heads", *(["num_query_groups"] if args.group_query_attention else []), "ffn_hidden_size")
    return {name: getattr(args, name) for name in names}
