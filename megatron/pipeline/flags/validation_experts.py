"""Do the flags of a mixture of experts, and of multi-token prediction, fit together? Part of ``validation.validate``."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.patches import compat

from megatron.pipeline.flags.cautions import PACKED
from megatron.pipeline.flags.flags import flag_of, given, switched_on
from megatron.pipeline.schedule.core.names import OFF, STOCK


def check_experts(args: Namespace, world_size: int, elsewhere: bool = False) -> None:
    """Check the experts' flags; sets ``moe_ffn_hidden_size`` and ``expert_tensor_parallel_size`` where they were left open.

    Args:
        elsewhere: as in ``validation.validate``: what trains wrongly, or does nothing, is predicted all the same.

    Raises:
        ValueError: they contradict each other, or the number of ranks; says what to change.
    """
    experts, parallel = args.num_experts, args.expert_model_parallel_size
    if experts is None and elsewhere:
        return
    if experts is None:
        sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_ffn_hidden_size")
        if flags := given(
            args, *sizes, "moe_shared_expert_intermediate_size", "moe_grouped_gemm", "overlap_moe_expert_parallel_comm"
        ):
            raise ValueError(f"{', '.join(flags)} without experts: give --num-experts")
        return
    args.moe_ffn_hidden_size = args.moe_ffn_hidden_size or args.ffn_hidden_size
    tensor = args.expert_tensor_parallel_size = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    unit = tensor * parallel * args.pipeline_model_parallel_size
    if experts % parallel:
        raise ValueError(f"--num-experts {experts} is not a multiple of --expert-model-parallel-size {parallel}")
    if world_size % unit:
        raise ValueError(
            f"{world_size} ranks cannot share experts over {tensor} x {parallel} x {args.pipeline_model_parallel_size} = {unit} "
            f"ranks (expert tensor x expert x pipeline): start a multiple of {unit} ranks or change a parallel size"
        )
    if args.moe_ffn_hidden_size % tensor:
        raise ValueError(
            f"--moe-ffn-hidden-size {args.moe_ffn_hidden_size} is not a multiple of --expert-tensor-parallel-size {tensor}"
        )
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise ValueError("experts with --tensor-model-parallel-size above 1 need --sequence-parallel")
    if drift := experts_drift(args):
        raise ValueError(drift)
    if args.add_bias_linear and tensor > 1:
        whole = " or --expert-tensor-parallel-size 1" if parallel > 1 else ""
        raise ValueError(f"experts with biases cannot be cut into {tensor}: give --disable-bias-linear{whole}")
    if args.moe_grouped_gemm and args.transformer_impl == "local" and (args.add_bias_linear or not args.bf16):
        raise ValueError("--moe-grouped-gemm with --transformer-impl local needs --bf16 and --disable-bias-linear")
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise ValueError(f"--moe-layer-freq lists {len(pattern)} layers, but --num-layers is {args.num_layers}")
    _check_router(args, experts)


def check_grouped_experts(args: Namespace) -> None:
    """Refuse grouped experts that the installed megatron-core does not have.

    Raises:
        ValueError: says what to change.
    """
    if args.moe_grouped_gemm and args.transformer_impl == "local" and not compat.has_local_grouped_experts():
        raise ValueError(
            f"--moe-grouped-gemm with --transformer-impl local needs megatron-core 0.16 or older, and {compat.version()} is "
            "installed: leave --moe-grouped-gemm out, or take --transformer-impl transformer_engine"
        )


def experts_drift(args: Namespace) -> str | None:
    """Why megatron-core (up to 0.18) would train experts wrongly, and what to change; None where it does not.

    It reduces the gradients of experts that no expert-parallel ranks share as those of dense layers: over the ranks that have the
    same dense shard. Only if both are cut alike are these the ranks with the same expert shard. With fewer parts copies of one
    expert drift apart, and with more parts gradients of different shards are added.
    """
    tensor, dense = args.expert_tensor_parallel_size, args.tensor_model_parallel_size
    if args.num_experts is None or args.expert_model_parallel_size > 1 or tensor in (None, dense):
        return None
    return (
        f"--expert-tensor-parallel-size {tensor} with --tensor-model-parallel-size {dense} and --expert-model-parallel-size 1: "
        f"megatron-core would reduce the experts' gradients over the wrong ranks; give --expert-tensor-parallel-size {dense}, or "
        "--expert-model-parallel-size above 1"
    )


def _check_router(args: Namespace, experts: int) -> None:
    topk, groups, chosen = args.moe_router_topk, args.moe_router_num_groups, args.moe_router_group_topk
    kinds, coefficients = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    if topk > experts:
        raise ValueError(f"--moe-router-topk {topk} is more than --num-experts {experts}")
    softmax = args.moe_router_score_function == "softmax"
    if topk == 1 and softmax and not args.moe_router_pre_softmax and "sinkhorn" not in kinds:
        raise ValueError("--moe-router-topk 1 gives every token the weight 1: give --moe-router-pre-softmax as well")
    if bool(groups) != bool(chosen):
        raise ValueError("--moe-router-num-groups and --moe-router-group-topk belong together: give both")
    if groups and (experts % groups or chosen > groups or topk % chosen):
        raise ValueError(
            f"a token takes {topk} of {experts} experts from {chosen} of {groups} groups: --moe-router-num-groups must divide "
            "--num-experts, and --moe-router-group-topk must divide --moe-router-topk and be at most the number of groups"
        )
    if args.moe_router_enable_expert_bias and softmax:
        raise ValueError("--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid")
    if len(kinds) != len(coefficients):
        raise ValueError(
            f"--moe-router-load-balancing-type has {len(kinds)} values and --moe-aux-loss-coeff "
            f"{len(coefficients)}: give equally many"
        )
    if "sinkhorn" in kinds and (len(kinds) > 1 or any(coefficients) or args.moe_expert_capacity_factor):
        raise ValueError(
            "--moe-router-load-balancing-type sinkhorn balances alone: no other kind, no --moe-aux-loss-coeff, no capacity factor"
        )
    if args.moe_pad_expert_input_to_capacity and not args.moe_expert_capacity_factor:
        raise ValueError("--moe-pad-expert-input-to-capacity needs --moe-expert-capacity-factor")
    if args.add_bias_linear and args.moe_shared_expert_intermediate_size:
        raise ValueError("--moe-shared-expert-intermediate-size needs --disable-bias-linear: megatron-core's have no biases")
    if args.add_bias_linear and args.transformer_impl == "local" and args.expert_model_parallel_size == 1:
        # The sum over ranks is then the outputs themselves, and upstream adds the biases to them in place.
        raise ValueError(
            "experts with biases that no ranks share cannot be trained by megatron-core: give --disable-bias-linear, or "
            "--expert-model-parallel-size above 1"
        )


def check_overlap(args: Namespace) -> None:
    """Check what ``--overlap-moe-expert-parallel-comm`` is combined with: its layer plans are megatron-core's.

    Raises:
        ValueError: another flag excludes it, or one that it needs is missing; says what to change.
    """
    if not args.overlap_moe_expert_parallel_comm:
        return
    several_ranks = args.pipeline_model_parallel_size > 1
    further, dispatcher = args.mtp_num_layers or 0, args.moe_token_dispatcher_type
    modules = args.recompute_modules or ()
    packed = switched_on(args, *PACKED)
    wrong = {
        "needs experts: give --num-experts and --expert-model-parallel-size 2 or more": args.num_experts is None,
        "needs experts on several ranks: give --expert-model-parallel-size 2 or more": args.expert_model_parallel_size == 1,
        f"needs all-to-alls, and --moe-token-dispatcher-type is {dispatcher}: give alltoall": dispatcher == "allgather",
        "needs --bf16 or --fp16": not (args.bf16 or args.fp16),
        "runs layers in parts, and --recompute-granularity full recomputes them whole: take selective": (
            args.recompute_granularity == "full"
        ),
        "runs experts in parts, and --recompute-modules moe recomputes them whole: leave moe out": "moe" in modules,
        "overlaps all-to-alls, and --moe-shared-expert-overlap does so in another way: leave one of the two out": getattr(
            args, "moe_shared_expert_overlap", False
        ),
        f"has layers for one further token, and --mtp-num-layers is {further}: give 1": further > 1,
        "with --mtp-num-layers needs a pipeline: raise --pipeline-model-parallel-size": bool(further) and not several_ranks,
        "needs experts in the last layer: after a dense one megatron-core's plans leave the final norm out: change "
        "--moe-layer-freq": args.num_experts is not None and not _last_layer_has_experts(args),
        "enters FP8 layer by layer, and --fp8-recipe delayed enters it once: give another recipe": (
            getattr(args, "fp8", None) is not None and args.fp8_recipe == "delayed"
        ),
        "runs megatron-core's plans of layers, which do not enter FP4 and would train in --bf16: give --fp8-format, or leave "
        "--fp4-format out": bool(getattr(args, "fp4", None)),
        f"does not hand packed sequences on: leave {packed and flag_of(packed)} out": packed is not None,
        f"runs whole layers of one rank, and --vocab-parallel {args.vocab_parallel} takes a part of them to others: leave one of "
        "the two out": args.vocab_parallel != OFF,
        f"frees tensors itself, and --offload {args.offload} moves them: leave one of the two out": args.offload != OFF,
        "under --pipeline-schedule stock needs several chunks per rank: give --num-virtual-stages-per-pipeline-rank, or take "
        "another schedule": args.pipeline_schedule == STOCK and several_ranks and not args.chunks,
    }
    if reason := next((reason for reason, is_so in wrong.items() if is_so), None):
        raise ValueError(f"--overlap-moe-expert-parallel-comm {reason}")


def _last_layer_has_experts(args: Namespace) -> bool:
    pattern = args.moe_layer_freq
    return bool(pattern[-1] if isinstance(pattern, list) else (args.num_layers - 1) % pattern == 0)


def check_prediction(args: Namespace) -> None:
    """Check multi-token prediction against what megatron-core can do.

    Raises:
        ValueError: another flag makes it impossible.
    """
    if args.mtp_num_layers is None:
        return
    if not args.untie_embeddings_and_output_weights:
        raise ValueError("--mtp-num-layers needs --untie-embeddings-and-output-weights: upstream would train unused weights")
    if args.position_embedding_type == "learned_absolute":
        raise ValueError("--mtp-num-layers needs --position-embedding-type rope or none, not learned_absolute")
    if args.recompute_granularity == "full" and args.recompute_method == "uniform" and args.recompute_num_layers > 1:
        raise ValueError(f"--mtp-num-layers needs --recompute-num-layers 1, not {args.recompute_num_layers}")
