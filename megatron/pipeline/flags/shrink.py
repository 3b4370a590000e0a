"""The same training of a smaller model, for ``mpipe check``: every flag that can go wrong stays, and sizes go."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Sequence

from megatron.core.transformer.enums import LayerType

from megatron.pipeline.flags.flags import CHUNK_FLAGS, Role, neutral
from megatron.pipeline.shape.experts import have_experts

_LETTERS = {LayerType.embedding: "E", LayerType.decoder: "t", LayerType.mtp: "m", LayerType.loss: "L"}
_SPREAD = Role.LAYOUT, Role.CHUNKS, Role.SCHEDULE, Role.DETAILS  # of the flags that may differ from the reference's
_HEAD, _WIDTH, _TOKENS, _ROWS, _EXPERTS = 8, 32, 32, 120, 4  # a head's channels, and the least of the other sizes
_SETTINGS = (  # which say how many layers a stage has
    *CHUNK_FLAGS, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "layer_redistribution",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip


def comparable(args: Namespace, iterations: int, gpus: bool) -> tuple[Namespace, list[str]]:
    """A short training without files, in float32 where that can be; and words for what was set aside.

    Args:
        args: parsed flags.
        gpus: whether every rank will have one.
    """
    args = copy.deepcopy(args)
    vars(args).update(neutral(Role.FILES, Role.LENGTH))
    vars(args).update(rehearse=False, rehearse_hop=None, rehearse_park=False, rehearse_replicas=None)
    vars(args).update(train_iters=iterations, eval_iters=0, log_interval=1, num_workers=0, timing_log_level=0)
    aside = []
    if (args.bf16 or args.fp16) and not args.overlap_moe_expert_parallel_comm:  # whose layer plans need 16 bits
        vars(args).update(bf16=False, fp16=False, fp16_lm_cross_entropy=False)
        aside.append("float32 in place of 16 bits")
    if not gpus and (args.transformer_impl == "transformer_engine" or args.distributed_backend == "nccl"):
        args.transformer_impl = args.distributed_backend = None
        aside.append("megatron-core's own layers, without Transformer Engine, which needs a GPU for every rank")
    if args.moe_grouped_gemm and args.transformer_impl != "transformer_engine" and not args.bf16:
        args.moe_grouped_gemm = False
        aside.append("experts one after another, not grouped")
    return args, aside


def reference(args: Namespace, layout: Namespace) -> Namespace:
    """The same training in another layout and under another schedule, with a vocabulary that is padded alike.

    Args:
        args: parsed flags; their vocabulary is padded for both.
        layout: parsed flags, of which only those of layout and schedule count.
    """
    other = copy.deepcopy(args)
    vars(other).update({name: getattr(layout, name) for name in neutral(*_SPREAD)})
    sizes = args.tensor_model_parallel_size, other.tensor_model_parallel_size
    rows = math.lcm(*(args.make_vocab_size_divisible_by * size for size in sizes))
    args.make_vocab_size_divisible_by, other.make_vocab_size_divisible_by = rows // sizes[0], rows // sizes[1]
    return other


def fewer_microbatches(args: Namespace, replicas: int) -> None:
    """As many microbatches as fill the pipeline twice, of two samples at most; where a file of a schedule allows it."""
    samples = args.micro_batch_size
    args.micro_batch_size = min(samples, 2)
    if args.global_batch_size:
        several = args.global_batch_size // (samples * replicas)
        if not args.pipeline_schedule.startswith("file:"):
            group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
            several = min(several, 2 * math.lcm(group, args.pipeline_model_parallel_size))
        args.global_batch_size = several * args.micro_batch_size * replicas


def shrunk(args: Namespace, whole: Namespace, stages: Sequence[Sequence[LayerType]], slices: int) -> Namespace:
    """The same training with fewer layers of the same kinds in each stage, narrower, of shorter sequences and fewer tokens.

    Args:
        args: parsed flags.
        whole: the same flags after ``validate``, which has completed them.
        stages: the layers of every stage, in the model's order.
        slices: of a sequence, which the schedule passes on one by one.
    """
    small, has_experts = copy.deepcopy(args), have_experts(whole)
    kept, at, rows = list[int](), 0, list[str]()
    for stage in stages:
        numbers = range(at, at := at + stage.count(LayerType.decoder))
        first = {has_experts[number]: number for number in reversed(numbers)}  # one of each kind
        kept += sorted(first.values())
        letters = [_LETTERS[kind] for kind in stage if kind is not LayerType.decoder]
        rows.append("".join(sorted([*letters, *"t" * len(first)], key="EtmL".index)))
    vars(small).update(
        {name: value for name, value in neutral(Role.CHUNKS, Role.LAYOUT, Role.SCHEDULE).items() if name in _SETTINGS}
    )
    small.num_layers, small.pipeline_model_parallel_layout = len(kept), "|".join(rows) if len(rows) > 1 else None
    if small.num_experts and small.moe_layer_freq != 1:
        small.moe_layer_freq = [int(has_experts[number]) for number in kept]
    small.recompute_num_layers = small.recompute_num_layers and 1
    _narrow(small, whole)
    unit = slices * whole.context_parallel_size * 2 * whole.tensor_model_parallel_size
    small.seq_length = min(args.seq_length, -(-_TOKENS // unit) * unit)
    small.max_position_embeddings = None
    small.vocab_size, small.make_vocab_size_divisible_by = _ROWS, _HEAD
    return small


def _narrow(small: Namespace, whole: Namespace) -> None:
    """Few heads, narrow layers and few experts, which tensor and expert parallelism divide as they divide the many."""
    tensor, heads = whole.tensor_model_parallel_size, whole.num_attention_heads
    groups = whole.num_query_groups if whole.group_query_attention else heads
    small.num_query_groups = min(groups, max(tensor, 2)) if whole.group_query_attention else whole.num_query_groups
    small.num_attention_heads = (
        small.num_query_groups * min(2, heads // groups) if whole.group_query_attention else min(heads, 2 * tensor)
    )
    small.kv_channels = min(whole.kv_channels, _HEAD)
    narrow = math.lcm(small.num_attention_heads * small.kv_channels, _WIDTH)
    small.hidden_size = min(whole.hidden_size, narrow)
    small.ffn_hidden_size = min(whole.ffn_hidden_size, 2 * narrow)
    if not whole.num_experts:
        return
    small.moe_ffn_hidden_size = min(whole.moe_ffn_hidden_size, narrow)
    if whole.moe_shared_expert_intermediate_size:
        small.moe_shared_expert_intermediate_size = min(whole.moe_shared_expert_intermediate_size, narrow)
    experts = math.lcm(whole.expert_model_parallel_size, _EXPERTS)
    if experts < whole.num_experts:
        small.num_experts, small.moe_router_topk = experts, min(whole.moe_router_topk, 2)
        if whole.moe_router_num_groups:
            small.moe_router_num_groups, small.moe_router_group_topk = 2, 1
