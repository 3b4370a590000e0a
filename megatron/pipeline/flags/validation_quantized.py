"""FP8 of megatron-core with delayed weight gradients: what is refused. For the flags of ``mpipe launch``; ours has none yet.

docs/versions.md has the table of recipes. What the schedule decides as well is ``te_linear.check_quantized``'s to say.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.flags import switched_on
from megatron.pipeline.model import te_linear
from megatron.pipeline.schedule.core.names import OFF, STOCK

RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")


def check_quantized(args: Namespace) -> None:
    """Refuse what no test has shown to work where W computes weight gradients; ``args`` may lack Megatron-LM's flags.

    Raises:
        ValueError: says what was given, what would work, and what to change.
    """
    if not getattr(args, "fp8", None) or args.pipeline_schedule == STOCK:
        return
    recipe = getattr(args, "fp8_recipe", None)
    if getattr(args, "transformer_impl", None) == "local":
        if not te_linear.is_installed():  # layers are then local without the flag, too
            raise ValueError(
                f"--fp8-format {args.fp8} needs Transformer Engine, which is not installed: pip install "
                f"'transformer-engine[pytorch]>={te_linear.OLDEST}', or leave --fp8-format out"
            )
        raise ValueError(
            f"--fp8-format {args.fp8} with --transformer-impl local: megatron-core's own layers would ignore it and train in "
            "--bf16: give --transformer-impl transformer_engine, or leave --fp8-format out"
        )
    if recipe is not None and recipe not in RECIPES:
        why = "delayed weight gradients were not tested with it"
        if recipe == "custom":
            why = "Transformer Engine's products of tensors in Python lose the weight gradients that they are to add to main_grad"
        raise ValueError(
            f"--fp8-recipe {recipe}: {why}: give --fp8-recipe {' or '.join(RECIPES)}, or --pipeline-schedule {STOCK}"
        )
    te_linear.check_quantized(args, args.offload != OFF, args.post_validation, reruns=False)  # its schedule says that
    _check_gathered(args, recipe == "mxfp8")


def _check_gathered(args: Namespace, in_mxfp8: bool) -> None:
    """Refuse weights in FP8 that cannot be gathered as flags say."""
    reuses = switched_on(args, "reuse_grad_buf_for_mxfp8_param_ag")
    gathers = switched_on(args, "use_distributed_optimizer") and switched_on(args, "fp8_param_gather")
    if gathers and in_mxfp8 and not reuses:
        raise ValueError(
            "--fp8-param-gather with --fp8-recipe mxfp8: Transformer Engine cannot keep such weights where they are gathered: "
            "give --reuse-grad-buf-for-mxfp8-param-ag as well, or leave --fp8-param-gather out"
        )
    if reuses and not (gathers and in_mxfp8):
        raise ValueError(
            "--reuse-grad-buf-for-mxfp8-param-ag gathers weights in 16 bits, which only --fp8-recipe mxfp8 with "
            "--fp8-param-gather and --use-distributed-optimizer rounds afterwards: give these, or leave it out"
        )
