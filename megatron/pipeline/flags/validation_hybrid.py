"""Flags of layers that a pattern lists, of multi-latent attention, and of what is in place of attention; part of ``validate``."""

from __future__ import annotations

from megatron.pipeline.flags.flags import given
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner import flag_of, hybrid

_KNOWN = (*hybrid.KINDS, hybrid.ATTENTION, hybrid.MLP, hybrid.EXPERTS)


def of_hybrid(args: Settings) -> Settings:
    """Settings with what the pattern of layers says: layers, stages, and layers that predict further.

    Megatron-LM's patterns have a symbol for every layer, ``|`` between stages, and behind each ``/`` the layers that predict one
    token further. Up to release 0.16 shares of attention and of MLPs may stand in the place of a pattern.

    Raises:
        ValueError: a symbol is unknown, the pattern is of another number of layers, or the schedule is ours; says what to change.
    """
    pattern = _pattern(args)
    if pattern is None:
        return args
    args |= {"hybrid_layer_pattern": pattern}
    main, *further = pattern.split("/")
    if unknown := sorted(set(pattern) - {*_KNOWN, "|", "/"}):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} with {' and '.join(unknown)}: known are {' '.join(_KNOWN)} (Mamba-2, gated delta "
            "net, attention, MLP, experts), | between stages, / before layers that predict further"
        )
    if len(set(further)) > 1 or "|" in "".join(further):
        raise ValueError(
            f"--hybrid-layer-pattern {pattern} predicts further by {' and '.join(further)}: give the same symbols behind every /"
        )
    stages = main.split("|")
    layers = sum(map(len, stages))
    if not layers:
        raise ValueError(f"--hybrid-layer-pattern {pattern} has no layers: give some of {' '.join(_KNOWN)} before the first /")
    if "M" in pattern:
        _check_heads(args)
    if args.num_layers not in (None, layers):
        raise ValueError(
            f"--num-layers {args.num_layers}: --hybrid-layer-pattern {pattern} has {layers} layers: leave --num-layers out"
        )
    if hybrid.EXPERTS in pattern and not args.num_experts:
        raise ValueError(f"--hybrid-layer-pattern {pattern} has layers of experts ({hybrid.EXPERTS}): give --num-experts")
    predicting = len(further) or args.mtp_num_layers
    args |= {"num_layers": layers, "mtp_num_layers": predicting}
    if len(stages) > 1:
        rows = ["t" * len(stage) for stage in stages]
        rows[0], rows[-1] = "E" + rows[0], rows[-1] + "m" * (predicting or 0) + "L"
        args |= {"pipeline_model_parallel_layout": "|".join(rows)}
    return args


def check_latent(args: Settings) -> None:
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


def check_attention(args: Settings) -> None:
    """Check what is in place of attention, as megatron-core's ``TransformerConfig`` does.

    Raises:
        ValueError: a size is missing or does not divide; says what to change.
    """
    variant, layers, pattern = args.experimental_attention_variant, args.linear_attention_freq, args.hybrid_layer_pattern or ""
    sizes = {
        hybrid.LINEAR: ("linear_attention_freq",),
        hybrid.SPARSE: ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    }
    if missing := [flag_of(name) for name in sizes.get(variant, ()) if getattr(args, name) is None]:
        raise ValueError(f"--experimental-attention-variant {variant} needs {', '.join(missing)}")
    if variant == hybrid.SPARSE and not args.multi_latent_attention:
        raise ValueError(f"--experimental-attention-variant {hybrid.SPARSE} needs --multi-latent-attention")
    if variant == hybrid.LINEAR and isinstance(layers, list) and len(layers) != args.num_layers:
        raise ValueError(
            f"--linear-attention-freq lists {len(layers)} layers and --num-layers is {args.num_layers}: give as many"
        )
    if variant == hybrid.LINEAR or "G" in pattern:
        keys, values = args.linear_num_key_heads, args.linear_num_value_heads
        ranks = args.tensor_model_parallel_size * args.context_parallel_size
        if values % keys:
            raise ValueError(f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}: change one")
        if keys % ranks:
            raise ValueError(f"--linear-num-key-heads {keys} is not a multiple of {ranks} tensor- and context-parallel ranks")


def _pattern(args: Settings) -> str | None:
    if args.hybrid_layer_pattern:
        return str(args.hybrid_layer_pattern)
    shares = args.hybrid_attention_ratio, args.hybrid_mlp_ratio
    if not (args.is_hybrid_model or any(shares)) or not args.num_layers:
        return None
    if sum(round(share * args.num_layers) for share in shares) > args.num_layers:
        raise ValueError(
            f"--hybrid-attention-ratio {shares[0]:g} and --hybrid-mlp-ratio {shares[1]:g} are more than all "
            f"{args.num_layers} layers: lower one of them"
        )
    symbols = ["M"] * args.num_layers
    for symbol, share in zip(
        (hybrid.ATTENTION, hybrid.MLP), shares, strict=True
    ):  # as evenly as they go, the latter between the former
        free = [layer for layer, other in enumerate(symbols) if other == "M"]
        count = round(share * args.num_layers)
        for index in range(count):
            symbols[free[round((index + 1) * len(free) / (count + 1)) - (symbol == hybrid.ATTENTION)]] = symbol
    return "".join(symbols)


def _check_heads(args: Settings) -> None:
    """Refuse sizes of Mamba-2 that megatron-core's ``MambaMixer`` asserts not to get."""
    heads, size, inner = args.mamba_num_heads, args.mamba_head_dim, 2 * (args.hidden_size or 0)
    if heads is None and inner % size:
        raise ValueError(f"--mamba-head-dim {size} does not divide {inner}, twice --hidden-size: change one of them")
    heads, groups = heads or inner // size, args.mamba_num_groups
    if heads % groups:
        raise ValueError(f"--mamba-num-groups {groups} does not divide {heads} heads of Mamba-2: change it or --mamba-num-heads")
    if groups % (ranks := args.tensor_model_parallel_size):
        raise ValueError(f"--tensor-model-parallel-size {ranks} does not divide --mamba-num-groups {groups}: change one of them")
