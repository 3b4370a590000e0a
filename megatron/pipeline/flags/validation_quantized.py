"""Which of megatron-core's FP8 and FP4 goes with delayed weight gradients? For the flags of ``mpipe launch``; ours has none yet.

docs/versions.md has the table of recipes. What the schedule decides as well is ``te_linear.check_quantized``'s to say.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.flags import PROFILE
from megatron.pipeline.model import te_linear
from megatron.pipeline.schedule.core.names import OFF, STOCK

RECIPES = {"fp8": ("delayed", "tensorwise", "mxfp8", "blockwise"), "fp4": ("nvfp4",)}


def check_quantized(args: Namespace) -> None:
    """Refuse what no test has shown to work where W computes weight gradients; ``args`` may lack Megatron-LM's flags.

    Raises:
        ValueError: says what was given, what would work, and what to change.
    """
    kind = te_linear.quantized_to(args)
    if kind is None or args.pipeline_schedule == STOCK:
        return
    given, recipe = f"--{kind}-format {getattr(args, kind)}", getattr(args, f"{kind}_recipe", None)
    layers = getattr(args, "transformer_impl", None)
    if layers == "local":
        raise ValueError(
            f"{given} with --transformer-impl local: megatron-core's own layers would ignore it and train in --bf16: give "
            f"--transformer-impl transformer_engine, or leave --{kind}-format out"
        )
    if recipe is not None and recipe not in RECIPES[kind]:
        why = "delayed weight gradients were not tested with it"
        if recipe == "custom":
            why = "Transformer Engine's products of tensors in Python lose the weight gradients that they are to add to main_grad"
        raise ValueError(
            f"--{kind}-recipe {recipe}: {why}: give --{kind}-recipe {' or '.join(RECIPES[kind])}, or --pipeline-schedule {STOCK}"
        )
    if getattr(args, "reuse_grad_buf_for_mxfp8_param_ag", False):
        raise ValueError(
            "--reuse-grad-buf-for-mxfp8-param-ag gathers weights into the memory of gradients, which W fills late: leave it out "
            "(weights that are gathered then take memory of their own, as megatron-core warns)"
        )
    if getattr(args, "fp4_param_gather", False):
        raise ValueError(
            "--fp4-param-gather: no test has delayed the gradients of weights that are kept in FP4: leave it out, or take "
            "--fp8-format with --fp8-param-gather"
        )
    profiles = args.pipeline_costs == PROFILE or args.offload_profile
    te_linear.check_quantized(args, args.offload != OFF, profiles, args.post_validation, reruns=False)  # its schedule says that
