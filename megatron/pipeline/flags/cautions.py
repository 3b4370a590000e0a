"""Flags of megatron-core's own that do less than they say, under any schedule: what runs warn of at their start."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.flags import flag_of, switched_on

PACKED = ("sft", "dataloader_inter_document_masking")  # sequences whose documents attention keeps apart by their lengths


def cautions(args: Namespace) -> list[str]:
    """Settings that do wrong or nothing, of validated flags, and what to change; ``args`` may lack Megatron-LM's own."""
    found = []
    masked = switched_on(args, "eod_mask_loss", "sft")
    if masked and args.context_parallel_size > 1 and not args.calculate_per_token_loss:
        found.append(
            f"{flag_of(masked)} with --context-parallel-size {args.context_parallel_size}: every context-parallel rank takes the "
            "mean over its own tokens that count, and the loss is the mean of these means: give --calculate-per-token-loss"
        )
    if args.reset_attention_mask and args.transformer_impl == "transformer_engine":
        found.append(
            "--reset-attention-mask has no effect: Transformer Engine's causal attention takes no other mask, and goes across "
            "documents: give --transformer-impl local"
        )
    elif args.reset_attention_mask and not getattr(args, "create_attention_mask_in_dataloader", True):
        found.append(
            "--reset-attention-mask has no effect with --no-create-attention-mask-in-dataloader, and attention goes across "
            "documents: leave the latter out"
        )
    return found
