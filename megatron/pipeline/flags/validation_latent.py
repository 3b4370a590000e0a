"""Do the flags of multi-latent attention fit together? Part of ``validation.validate``."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.combinations.table import flag_of
from megatron.pipeline.flags.flags import given, neutral
from megatron.pipeline.flags.settings import Role
from megatron.pipeline.flags.support import unsupported


def check_latent(args: Namespace) -> None:
    """Check the widths of multi-latent attention.

    Raises:
        ValueError: one is missing, or the flags contradict each other; says what to change.
    """
    sizes = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    if not args.multi_latent_attention:
        if extra := given(args, "q_lora_rank", *sizes):
            raise ValueError(f"{', '.join(extra)} without --multi-latent-attention: give it")
        return
    if missing := [flag_of(name) for name in sizes if getattr(args, name) is None]:
        raise ValueError(f"--multi-latent-attention needs {', '.join(missing)}")
    if args.group_query_attention:
        raise ValueError("--multi-latent-attention has keys and values for every head: leave --group-query-attention out")
    if args.qk_pos_emb_head_dim % 2:
        raise ValueError(f"--qk-pos-emb-head-dim {args.qk_pos_emb_head_dim}: pairs of channels are rotated: give an even number")


def check_trained(args: Namespace) -> None:
    """Refuse models that ``mpipe`` has predictions of and this project's own training does not have.

    Raises:
        ValueError: one is given; says what trains it.
    """
    if flags := given(args, *neutral(Role.PREDICTED)):
        raise ValueError(unsupported(flags[0]))
    if args.moe_token_dispatcher_type == "flex":
        raise ValueError(unsupported("--moe-token-dispatcher-type"))
