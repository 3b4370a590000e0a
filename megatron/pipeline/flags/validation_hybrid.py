"""Flags of layers that a pattern lists, of multi-latent attention, and of what is in place of attention; part of ``validate``."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.flags import given
from megatron.pipeline.flags.settings import PROFILE, Settings
from megatron.pipeline.planner import balance, document, flag_of, hybrid, reading, topics


def of_hybrid(args: Settings) -> Settings:
    """Settings with what the pattern of layers says: layers, layers that predict further, and which attention there is.

    Up to release 0.16 shares of attention and of MLPs may stand in the place of a pattern.

    Raises:
        ValueError: as ``Pattern.of``, or the pattern does not go with other flags; says what to change.
    """
    pattern = pattern_of(args)
    if pattern is None:
        return args
    of_flags(args).refuse(topics.LETTERS)
    found = read_pattern(pattern)
    layers, predicting = len(found.letters), len(found.predictors) or args.mtp_num_layers
    if "M" in pattern:
        _check_heads(args)
    if args.num_layers not in (None, layers):
        raise ValueError(
            f"--num-layers {args.num_layers}: --hybrid-layer-pattern {pattern} has {layers} layers: leave --num-layers out"
        )
    args |= {"hybrid_layer_pattern": pattern, "num_layers": layers, "mtp_num_layers": predicting}
    if hybrid.LATENT in pattern or hybrid.INDEXED in pattern:
        args |= {"multi_latent_attention": True}
    return args | ({"experimental_attention_variant": hybrid.SPARSE} if hybrid.INDEXED in pattern else {})


def read_pattern(text: str) -> hybrid.Pattern:
    """Letters and stages of a ``--hybrid-layer-pattern``.

    Raises:
        ValueError: as ``Pattern.of``, with the flag.
    """
    with reading.NamedErrors("--hybrid-layer-pattern"):
        return hybrid.Pattern.of(text)


def chunks_of_pattern(text: str, schedule: str, ranks: int) -> int | None:
    """Chunks per rank that a ``--hybrid-layer-pattern`` asks for; raises what ``read_pattern`` and ``Pattern.chunks`` do."""
    with reading.NamedErrors("--hybrid-layer-pattern"):
        return hybrid.Pattern.of(text).chunks(schedule, ranks)


def of_letter_costs(args: Settings) -> Settings:
    """Settings with costs of letters, if ``--pipeline-costs`` names a file of them; ``model/layout.py`` balances stages by these.

    Raises:
        ValueError: the file cannot be read, or is of another pattern; says what to change.
    """
    file, pattern = args.pipeline.costs, getattr(args, "hybrid_layer_pattern", None)
    if file in (None, PROFILE):
        return args
    with reading.NamedErrors("--pipeline-costs"):
        costs = document.read_costs(file)
    if costs.pattern and not pattern:
        raise ValueError(
            f"--pipeline-costs {file} is of the letters {costs.pattern}, and this model has none: give costs of stages"
        )
    if costs.pattern and pattern:
        with reading.NamedErrors(f"--pipeline-costs {file} for --hybrid-layer-pattern"):
            balance.Model.by_layer(costs, read_pattern(pattern))
    return args | {"letter_costs": costs if costs.pattern else None}


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


def pattern_of(args: Namespace) -> str | None:
    """Pattern of the layers: as it is given, or made of shares; None for a GPT.

    Raises:
        ValueError: shares are more than all.
    """
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
