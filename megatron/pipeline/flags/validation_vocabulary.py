"""Do the flags about the vocabulary layers fit the others? Part of ``validation.validate``."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.flags import flag_of, given
from megatron.pipeline.schedule.core.names import OFF, STOCK


def check_vocabulary(args: Namespace) -> None:
    """Check vocabulary parallelism, and the redistribution of layers that is its alternative.

    Raises:
        ValueError: another flag contradicts them, or makes them impossible; says what to change.
    """
    if args.layer_redistribution:
        _check_redistribution(args)
    if args.vocab_parallel == OFF:
        _check_alone(args)
    else:
        _check_parallel(args)


def _check_alone(args: Namespace) -> None:
    if alone := " and ".join(given(args, "vocab_logits_limit", "vocab_mask_padding", "label_smoothing", "z_loss")):
        raise ValueError(
            f"{alone}: only the output layer of --vocab-parallel can do that, megatron-core's own cannot: give "
            f"--vocab-parallel 2, or leave {alone} out"
        )


def _check_parallel(args: Namespace) -> None:
    flag = f"--vocab-parallel {args.vocab_parallel}"
    if args.pipeline_model_parallel_size == 1:
        raise ValueError(
            f"{flag} spreads the vocabulary over pipeline ranks, and --pipeline-model-parallel-size is 1: raise it, or leave "
            "--vocab-parallel out"
        )
    if args.pipeline_schedule == STOCK:
        raise ValueError(
            f"{flag} needs a schedule that can have its passes, and megatron-core's own cannot: take 1f1b, which otherwise runs "
            "the same passes, or another one, or leave --vocab-parallel out"
        )
    if args.mtp_num_layers:
        raise ValueError(
            f"{flag} cannot be combined with --mtp-num-layers {args.mtp_num_layers}, whose layers need the whole output layer "
            "several times on the last stage: leave one of the two out"
        )
    whole = ("use_mup", "logits_load_dir", "logits_save_dir", "export_kd_teacher_load")  # flags of Megatron-LM's own script
    if needs := [flag_of(name) for name in whole if getattr(args, name, None)]:
        raise ValueError(
            f"{flag} computes logits in shards, and {needs[0]} needs megatron-core's output layer: leave one of the two out"
        )
    if args.fp16_lm_cross_entropy:
        raise ValueError(f"{flag} computes the loss in float32: leave --fp16-lm-cross-entropy out")


def _check_redistribution(args: Namespace) -> None:
    if args.vocab_parallel != OFF:
        raise ValueError(
            f"--layer-redistribution makes up for vocabulary layers on the first and the last stage, and --vocab-parallel "
            f"{args.vocab_parallel} leaves none there: give one of the two"
        )
    if args.pipeline_model_parallel_size == 1:
        raise ValueError(
            "--layer-redistribution moves layers between pipeline ranks, and --pipeline-model-parallel-size is 1: raise it, or "
            "leave --layer-redistribution out"
        )
    layouts = ("pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage")
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    counted = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if others := given(args, *layouts, *ends, *counted):
        raise ValueError(
            f"--layer-redistribution chooses the number of layers of every stage, and {' and '.join(others)} would fix some: "
            f"leave out {'them' if len(others) > 1 else others[0]}, or --layer-redistribution"
            + ("; --num-virtual-stages-per-pipeline-rank gives the number of chunks" if "per-virtual" in "".join(others) else "")
        )
