"""Facts that the table of combinations is asked about, of flags; and what runs warn of at their start."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from megatron.pipeline.patches import compat

from megatron.pipeline.flags.settings import flat
from megatron.pipeline.model import te_linear
from megatron.pipeline.planner import STOCK, Facts, Found, families, topics

PACKED = ("sft", "dataloader_inter_document_masking")  # sequences whose documents attention keeps apart by their lengths
_READ = "0.19"  # the last release whose sources were read for the cautions


def of_flags(args: Namespace, **known: Any) -> Facts:
    """Facts of flags and of what is installed here.

    Args:
        args: flags; they may lack Megatron-LM's own.
        known: more, such as the number of slices of a schedule.
    """
    values = flat(args)
    to = Facts(values | families.facts(values.get("pipeline_schedule", STOCK)))
    to["chunks"] = to.chunks or getattr(families.FAMILIES.get(to.pipeline_schedule), "chunks", None)
    to |= {"core": compat.version(), "gpu": torch.cuda.is_available()}
    to |= {"engine": te_linear.release(), "oldest_engine": te_linear.OLDEST}
    tensor, context = to.tensor_model_parallel_size or 1, to.context_parallel_size or 1
    to |= {"balancing": _balancing(to), "replicas": to.data_parallel_size or 1, "cut": tensor * context}
    to["stages"] = (to.pipeline_model_parallel_size or 1) * (to.virtual_pipeline_model_parallel_size or 1)
    to["cut_experts"] = (to.expert_model_parallel_size or 1) > 1 or (to.expert_tensor_parallel_size or tensor) > 1
    return Facts(to, **known)


def cautions(args: Namespace) -> list[str]:
    """Settings that do wrong or nothing, of validated flags, and what to change; ``args`` may lack Megatron-LM's own."""
    return cautions_of(of_flags(args))


def cautions_of(facts: Facts) -> list[str]:
    """The same of facts, as of a loop that has no flags."""
    return [f"{one}{_release(one)}" for one in facts.found(topics.CAUTIONS)]


def _balancing(to: Facts) -> str:
    """The flags of the experts' own losses, with their values."""
    kinds, weights = (_listed(to[f"moe_{name}"]) for name in ("router_load_balancing_type", "aux_loss_coeff"))
    losses = [f"--moe-router-load-balancing-type {kind}" for kind, weight in zip(kinds, weights, strict=False) if weight]
    return " and ".join(losses + ([f"--moe-z-loss-coeff {to.moe_z_loss_coeff}"] if to.moe_z_loss_coeff else []))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _release(one: Found) -> str:
    mended = one.row.mended
    if mended is None:
        return f" (not mended up to megatron-core {_READ})"
    return f" (mended in megatron-core {mended})" if mended else ""
