"""FP8 of megatron-core with delayed weight gradients: what is refused. For the flags of ``mpipe launch``; ours has none yet.

docs/versions.md has the table of recipes. What the schedule decides as well is ``te_linear.check_quantized``'s to say.
"""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.flags import PROFILE
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
    profiles = args.pipeline_costs == PROFILE or args.offload_profile
    te_linear.check_quantized(args, args.offload != OFF, profiles, args.post_validation, reruns=False)  # its schedule says that
