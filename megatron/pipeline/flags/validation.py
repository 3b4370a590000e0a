"""Do the flags fit together? ``validate`` answers before any process group exists, with settings that have what follows."""

from __future__ import annotations

import importlib.util
import math
from argparse import Namespace
from collections.abc import Sequence

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.flags import CHUNK_FLAGS
from megatron.pipeline.flags.settings import PROFILE, Settings, flat
from megatron.pipeline.flags.validation_experts import check_grouped_experts, of_experts
from megatron.pipeline.flags.validation_files import check_outputs, of_data
from megatron.pipeline.flags.validation_hybrid import check_attention, check_latent, chunks_of_pattern, of_hybrid, of_letter_costs
from megatron.pipeline.flags.validation_rehearsal import of_rehearsal
from megatron.pipeline.model import te_linear
from megatron.pipeline.planner import STOCK, flag_of, reading, topics, written_costs


def validate(args: Namespace, world_size: int, elsewhere: bool = False) -> Settings:
    """Check the flags against each other and against the number of ranks.

    Returns:
        The flags with what was left open (``ffn_hidden_size``, ``kv_channels``, ``global_batch_size``, ...) and what follows:
        ``data_parallel_size``, ``chunks`` (per rank, None for the schedule's own number).

    Args:
        elsewhere: the training is predicted for machines with GPUs and all packages, not run here.

    Raises:
        ValueError: the flags contradict each other; the message has the numbers and what to change.
    """
    args = of_hybrid(Settings.of(args))
    _check_required(args, () if elsewhere else ("train_iters", "lr"))
    with reading.NamedErrors("--trained"):
        written_costs.read_trained(args.trained, args.num_layers)
    settings = _of_platform(args, elsewhere)
    settings = _of_parallel_sizes(settings, world_size)
    settings = _of_model(settings)
    settings = of_experts(settings, world_size, elsewhere)
    settings = _of_batch(settings)
    if settings.recompute_activations:
        settings |= {"recompute_granularity": settings.recompute_granularity or "selective"}
    of_flags(settings).refuse(topics.UPSTREAM)
    settings = of_new_flags(_of_precision(settings))
    of_flags(settings).refuse(topics.MODELS)
    if elsewhere:
        return settings
    of_flags(settings).refuse(topics.TRAINED)
    settings = of_data(_of_learning_rate(settings))
    check_packages(settings)
    return settings


def of_new_flags(args: Settings) -> Settings:
    """Settings of the flags that Megatron-LM does not have; its own are complete.

    Raises:
        ValueError: they contradict each other, or some of its own.
    """
    of_flags(args).refuse(topics.GROUPS, topics.SCHEDULES, topics.FLAGS, topics.QUANTIZED, topics.DETAILS)
    steps = {"post_validation_when": args.steps.when or "measured", "post_validation_copy": args.steps.copy or "device"}
    costs = {"pipeline_costs": PROFILE} if args.offloading.profile else {}
    settings = of_letter_costs(_of_timeouts(of_rehearsal(args | steps | costs)))
    check_outputs(settings)
    return settings


def check_packages(args: Namespace) -> None:
    """Refuse what the packages that are installed here cannot train.

    Raises:
        ValueError: says which one, and what to change.
    """
    if args.transformer_impl == "transformer_engine" and args.pipeline.schedule != STOCK:
        te_linear.check_version()
    discarding = sorted(set(args.recompute_modules or ()) & {"layernorm", "moe_act"})
    if discarding and not has_transformer_engine():
        raise ValueError(
            f"--recompute-modules {' '.join(discarding)} needs the package transformer-engine, which is not here: megatron-core "
            "discards and restores outputs by its means"
        )
    check_grouped_experts(args)


def batch_sizes(args: Namespace) -> list[int]:
    """Every global batch size that the training goes through, in order: one, or those of the ramp-up."""
    if args.rampup_batch_size is None:
        return [args.global_batch_size]
    start, step, _ = args.rampup_batch_size
    return [*range(start, args.global_batch_size, step), args.global_batch_size]


def batch_size_steps(args: Namespace) -> list[tuple[int, int]]:
    """The ramp-up of ``batch_sizes`` as megatron-core did it before 0.18: from how many consumed samples on, which batch size."""
    sizes = batch_sizes(args)
    if len(sizes) == 1:
        return [(0, sizes[0])]
    each = args.rampup_batch_size[2] / (len(sizes) - 1)  # samples for a step, not rounded
    if not each:
        return [(0, sizes[0]), (1, sizes[-1])]
    steps = []
    for step, size in enumerate(sizes):
        samples = math.ceil(step * each)
        samples += int(samples / each) < step  # where the division rounds
        steps.append((samples, size))
    return steps


def missing(args: Namespace, *further: str) -> list[str]:
    """The flags that every training needs and these lack, with others that are needed."""
    required = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", *further)
    return [flag_of(name) for name in required if getattr(args, name) is None]


def _check_required(args: Namespace, further: Sequence[str]) -> None:
    if lacking := missing(args, *further):
        model = ", or the model's config.json by --model" if args.num_layers is None else ""
        raise ValueError(f"missing {', '.join(lacking)}: give them on the command line or in the --config file{model}")


def has_transformer_engine() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def _of_platform(args: Settings, elsewhere: bool) -> Settings:
    """Choose the backend and the layers that the machine has, and refuse those it lacks."""
    cuda, engine = elsewhere or torch.cuda.is_available(), elsewhere or has_transformer_engine()
    args |= {
        "distributed_backend": args.distributed_backend or ("nccl" if cuda else "gloo"),
        "transformer_impl": args.transformer_impl or ("transformer_engine" if cuda and engine else "local"),
    }
    if args.distributed_backend == "nccl" and not cuda:
        raise ValueError("--distributed-backend nccl needs a CUDA device and there is none: use gloo")
    if args.transformer_impl == "transformer_engine" and not (cuda and engine):
        lacking = "a CUDA device" if not cuda else "the package transformer-engine"
        raise ValueError(f"--transformer-impl transformer_engine needs {lacking}, which is not here: use local")
    return args


def _of_parallel_sizes(args: Settings, world_size: int) -> Settings:
    tensor, pipeline, context = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size)
    model = tensor * pipeline * context
    if world_size % model:
        raise ValueError(
            f"{world_size} ranks cannot be split into models of {tensor} x {pipeline} x {context} = {model} ranks "
            f"(tensor x pipeline x context): start a multiple of {model} ranks or change a parallel size"
        )
    chunks = chunks_per_rank(args)
    shards_sequence = args.sequence_parallel and tensor > 1
    return args | {"data_parallel_size": world_size // model, "chunks": chunks, "sequence_parallel": shards_sequence}


def chunks_per_rank(args: Namespace) -> int | None:
    """Chunks per rank, from whichever of Megatron's flags were given; None to leave them to the schedule.

    Raises:
        ValueError: they say different numbers, or the numbers do not divide.
    """
    layers, chunks, layout = (getattr(args, name) for name in CHUNK_FLAGS)
    ranks, pattern = args.pipeline_model_parallel_size, getattr(args, "hybrid_layer_pattern", None)
    said = [
        None if layers is None else _chunks_of_layers(args, layers, ranks),
        int(chunks) if chunks else None,
        _chunks_of_layout(layout, ranks) if layout else None,
        chunks_of_pattern(pattern, flat(args)["pipeline_schedule"], ranks) if pattern else None,
    ]
    names = (*CHUNK_FLAGS, "hybrid_layer_pattern")
    numbers = {flag_of(name): number for name, number in zip(names, said, strict=True) if number is not None}
    if len(set(numbers.values())) > 1:
        words = " and ".join(f"{flag} ({number})" for flag, number in numbers.items())
        raise ValueError(f"{words} each say how many chunks a rank has: give one")
    return next(iter(numbers.values()), None)


def _chunks_of_layers(args: Namespace, layers: int, ranks: int) -> int:
    ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    counting = [name for name in ends if getattr(args, name, False)]  # as a layer each
    counted = args.num_layers + len(counting)
    if counted % (ranks * layers):
        also = "".join(f" and {flag_of(name)}" for name in counting) + (f" ({counted})" if counting else "")
        raise ValueError(
            f"--num-layers {args.num_layers}{also} is not a multiple of {ranks} pipeline ranks x "
            f"{layers} layers of --num-layers-per-virtual-pipeline-stage = {ranks * layers}"
        )
    return int(counted // (ranks * layers))


def _chunks_of_layout(text: str, ranks: int) -> int:
    try:
        stages = len(PipelineParallelLayerLayout.parse_str_to_list(text))
    except AssertionError as error:
        raise ValueError(f"--pipeline-model-parallel-layout {text}: {error}") from None
    return _chunks(stages, ranks, f"--pipeline-model-parallel-layout {text}")


def _chunks(stages: int, ranks: int, given: str) -> int:
    if stages % ranks:
        raise ValueError(
            f"{given} has {stages} stages, which {ranks} pipeline ranks cannot share evenly: give a multiple of {ranks} stages"
        )
    return stages // ranks


def _of_model(args: Settings) -> Settings:
    hidden, heads, tensor = args.hidden_size, args.num_attention_heads, args.tensor_model_parallel_size
    if args.ffn_hidden_size is None:
        args |= {"ffn_hidden_size": int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden}
    if args.kv_channels is None:
        if hidden % heads:
            raise ValueError(
                f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}: change one, or give --kv-channels"
            )
        args |= {"kv_channels": hidden // heads}
    check_latent(args)
    check_attention(args)
    if not args.multi_latent_attention:
        check_rotary(args)
    groups = args.num_query_groups if args.group_query_attention else heads
    if heads % groups:
        raise ValueError(f"--num-attention-heads {heads} is not a multiple of --num-query-groups {groups}")
    cut = {"--num-attention-heads": heads, "--num-query-groups": groups, "--ffn-hidden-size": args.ffn_hidden_size}
    for flag, size in cut.items():
        if size % tensor:
            raise ValueError(f"{flag} {size} is not a multiple of --tensor-model-parallel-size {tensor}")
    longest = args.max_position_embeddings or args.seq_length
    if longest < args.seq_length:
        raise ValueError(f"--max-position-embeddings {longest} is less than --seq-length {args.seq_length}")
    parts = tensor if args.sequence_parallel else 1
    parts *= 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    if args.seq_length % parts:
        raise ValueError(
            f"--seq-length {args.seq_length} must be a multiple of {parts} with this sequence and context parallelism"
        )
    fuses_rope = args.apply_rope_fusion and args.position_embedding_type == "rope"
    return args | {"max_position_embeddings": longest, "apply_rope_fusion": fuses_rope}


def check_rotary(args: Namespace) -> None:
    """Refuse heads that rotary embeddings cannot turn.

    Raises:
        ValueError: all channels of a head are to be rotated, and their number is odd.
    """
    if args.position_embedding_type == "rope" and args.rotary_percent == 1 and args.kv_channels % 2:
        raise ValueError(
            f"--position-embedding-type rope rotates pairs of channels, and a head has {args.kv_channels} (--kv-channels, or "
            f"--hidden-size / --num-attention-heads): give an even --kv-channels, such as {args.kv_channels + 1}"
        )


def _of_batch(args: Settings) -> Settings:
    unit = args.micro_batch_size * args.data_parallel_size
    args |= {"global_batch_size": args.global_batch_size or unit}
    if args.rampup_batch_size is not None:
        start, step, _ = args.rampup_batch_size
        if start >= args.global_batch_size or (args.global_batch_size - start) % step:
            raise ValueError(
                f"--rampup-batch-size starts at {start}: steps of {step} do not lead to --global-batch-size "
                f"{args.global_batch_size}"
            )
    for size in batch_sizes(args):
        if size % unit:
            below = size // unit * unit
            raise ValueError(
                f"a global batch of {size} samples is {size / unit:g} microbatches: --micro-batch-size "
                f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {unit} must divide it; "
                f"use {f'{below} or ' if below else ''}{below + unit}"
            )
    return args


def _of_learning_rate(args: Settings) -> Settings:
    args |= {"lr_decay_iters": args.lr_decay_iters or args.train_iters}
    if args.min_lr < 0 or args.min_lr > args.lr:
        raise ValueError(f"--min-lr {args.min_lr} must be from 0 to --lr {args.lr}")
    if args.lr_warmup_init > args.lr:
        raise ValueError(f"--lr-warmup-init {args.lr_warmup_init} is above --lr {args.lr}")
    if args.lr_warmup_fraction is not None:
        if args.lr_warmup_iters:
            raise ValueError("give --lr-warmup-fraction or --lr-warmup-iters, not both")
        args |= {"lr_warmup_iters": args.lr_warmup_fraction * args.lr_decay_iters}
    if args.lr_warmup_iters >= args.lr_decay_iters:
        raise ValueError(
            f"the warm-up of {args.lr_warmup_iters:g} iterations must be shorter than --lr-decay-iters {args.lr_decay_iters}"
        )
    if args.weight_decay_incr_style == "constant":
        if args.start_weight_decay is not None or args.end_weight_decay is not None:
            raise ValueError("--start-weight-decay and --end-weight-decay need --weight-decay-incr-style linear or cosine")
        args |= {"start_weight_decay": args.weight_decay, "end_weight_decay": args.weight_decay}
    elif args.start_weight_decay is None or args.end_weight_decay is None:
        raise ValueError(
            f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and --end-weight-decay"
        )
    return args


def _of_precision(args: Settings) -> Settings:
    if args.bf16:
        args |= {"accumulate_allreduce_grads_in_fp32": not args.grad_reduce_in_bf16}
    if args.fp16 and args.loss_scale is None:
        args |= {"check_for_nan_in_loss_and_grad": False}  # a dynamic loss scale learns from gradients that overflow
    return args


def _of_timeouts(args: Settings) -> Settings:
    """The hang report must come before the communication backend gives up without one."""
    backend = 60 * args.distributed_timeout_minutes
    timeout = min(300.0, backend / 2) if args.pipeline.timeout is None else args.pipeline.timeout
    if timeout >= backend:
        raise ValueError(
            f"--pipeline-timeout {timeout:g} seconds must be less than --distributed-timeout-minutes "
            f"{args.distributed_timeout_minutes:g} = {backend:g} seconds, when the backend gives up: lower it or raise the other"
        )
    return args | {"pipeline_timeout": timeout}
