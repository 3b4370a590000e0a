"""The same training of a smaller model, for ``mpipe check``: every flag that can go wrong stays, and sizes go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from megatron.core.transformer.enums import LayerType

from megatron.pipeline.flags.flags import CHUNK_FLAGS, LETTERS, neutral
from megatron.pipeline.flags.settings import Flags, Role, Settings
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner import hybrid

_SPREAD = Role.LAYOUT, Role.CHUNKS, Role.SCHEDULE, Role.DETAILS  # of the flags that may differ from the reference's
_HEAD, _WIDTH, _TOKENS, _ROWS, _EXPERTS = 8, 32, 32, 120, 4  # a head's channels, and the least of the other sizes
_SETTINGS = (  # which say how many layers a stage has
    *CHUNK_FLAGS, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "layer_redistribution",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def comparable(args: Flags, iterations: int, gpus: bool) -> tuple[Flags, list[str]]:
    """A short training without files, in float32 where that can be; and words for what was set aside.

    Args:
        args: parsed flags.
        gpus: whether every rank will have one.
    """
    args |= neutral(Role.FILES, Role.LENGTH)
    args |= {"rehearse": False, "rehearse_hop": None}
    args |= {"train_iters": iterations, "eval_iters": 0, "log_interval": 1, "num_workers": 0, "timing_log_level": 0}
    aside = []
    if (args.bf16 or args.fp16) and not args.overlap_moe_expert_parallel_comm:  # whose layer plans need 16 bits
        args |= {"bf16": False, "fp16": False, "fp16_lm_cross_entropy": False}
        aside.append("float32 in place of 16 bits")
    if not gpus and (args.transformer_impl == "transformer_engine" or args.distributed_backend == "nccl"):
        args |= {"transformer_impl": None, "distributed_backend": None}
        aside.append("megatron-core's own layers, without Transformer Engine, which needs a GPU for every rank")
    if args.moe_grouped_gemm and args.transformer_impl != "transformer_engine" and not args.bf16:
        args |= {"moe_grouped_gemm": False}
        aside.append("experts one after another, not grouped")
    return args, aside


def with_reference(args: Flags, layout: Flags) -> tuple[Flags, Flags]:
    """A training, and the same in another layout and under another schedule, with vocabularies that are padded alike.

    Args:
        args: parsed flags.
        layout: parsed flags, of which only those of layout and schedule count.
    """
    other = args | {name: getattr(layout, name) for name in neutral(*_SPREAD)}
    sizes = args.tensor_model_parallel_size, other.tensor_model_parallel_size
    rows = math.lcm(*(args.make_vocab_size_divisible_by * size for size in sizes))
    padded = ({"make_vocab_size_divisible_by": rows // size} for size in sizes)
    return args | next(padded), other | next(padded)


def fewer_microbatches(args: Flags, replicas: int) -> Flags:
    """As many microbatches as fill the pipeline twice, of two samples at most; where a file of a schedule allows it."""
    samples, fewer = args.micro_batch_size, min(args.micro_batch_size, 2)
    if args.global_batch_size:
        several = args.global_batch_size // (samples * replicas)
        if not args.pipeline_schedule.startswith("file:"):
            group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
            several = min(several, 2 * math.lcm(group, args.pipeline_model_parallel_size))
        args |= {"global_batch_size": several * fewer * replicas}
    return args | {"micro_batch_size": fewer}


def fewer_ranks(args: Flags) -> Flags:
    """Two ranks in place of an even number that share each layer: each is a process."""
    names = ("tensor_model_parallel_size", "expert_tensor_parallel_size")
    return args | {name: 2 for name in names if (size := getattr(args, name) or 1) > 2 and size % 2 == 0}


def shrunk(args: Flags, whole: Settings, stages: Sequence[Sequence[LayerType]], slices: int) -> Flags:
    """The same training with fewer layers of the same kinds in each stage, narrower, of shorter sequences and fewer tokens.

    Args:
        args: parsed flags.
        whole: the same flags after ``validate``, which has completed them.
        stages: the layers of every stage, in the model's order.
        slices: of a sequence, which the schedule passes on one by one.
    """
    has_experts = hybrid.have_experts(describe(whole))
    kept, rows = list[int](), list[str]()
    counts = [stage.count(LayerType.decoder) for stage in stages]
    for stage, count, end in zip(stages, counts, accumulate(counts), strict=True):
        first = {has_experts[number]: number for number in reversed(range(end - count, end))}  # one of each kind
        kept += sorted(first.values())
        letters = [LETTERS[kind.name] for kind in stage if kind is not LayerType.decoder]
        rows.append("".join(sorted([*letters, *"t" * len(first)], key="EtmL".index)))
    evenly = {name: value for name, value in neutral(Role.CHUNKS, Role.LAYOUT, Role.SCHEDULE).items() if name in _SETTINGS}
    unit = slices * whole.context_parallel_size * 2 * whole.tensor_model_parallel_size
    by_layer = bool(args.num_experts and args.moe_layer_freq != 1)
    return (
        args
        | evenly
        | _narrow(whole)
        | {
            "num_layers": len(kept),
            "pipeline_model_parallel_layout": "|".join(rows) if len(rows) > 1 else None,
            "moe_layer_freq": [int(has_experts[number]) for number in kept] if by_layer else args.moe_layer_freq,
            "recompute_num_layers": args.recompute_num_layers and 1,
            "seq_length": min(args.seq_length, -(-_TOKENS // unit) * unit),
            "max_position_embeddings": None,
            "vocab_size": _ROWS,
            "make_vocab_size_divisible_by": _HEAD,
        }
    )


def _narrow(whole: Settings) -> dict[str, int]:
    """Few heads, narrow layers and few experts, which tensor and expert parallelism divide as they divide the many."""
    tensor, heads = whole.tensor_model_parallel_size, whole.num_attention_heads
    groups = whole.num_query_groups if whole.group_query_attention else heads
    shared = min(groups, max(tensor, 2)) if whole.group_query_attention else whole.num_query_groups
    fewer = shared * min(2, heads // groups) if whole.group_query_attention else min(heads, 2 * tensor)
    head = min(whole.kv_channels, _HEAD)
    narrow = math.lcm(fewer * head, _WIDTH)
    sizes = {"num_attention_heads": fewer, "num_query_groups": shared, "kv_channels": head}
    sizes |= {"hidden_size": min(whole.hidden_size, narrow), "ffn_hidden_size": min(whole.ffn_hidden_size, 2 * narrow)}
    if not whole.num_experts:
        return sizes
    sizes["moe_ffn_hidden_size"] = min(whole.moe_ffn_hidden_size, narrow)
    if whole.moe_shared_expert_intermediate_size:
        sizes["moe_shared_expert_intermediate_size"] = min(whole.moe_shared_expert_intermediate_size, narrow)
    experts = math.lcm(whole.expert_model_parallel_size, _EXPERTS)
    if experts < whole.num_experts:
        sizes |= {"num_experts": experts, "moe_router_topk": min(whole.moe_router_topk, 2)}
        if whole.moe_router_num_groups:
            sizes |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    return sizes
