"""Do the flags of a mixture of experts, and of multi-token prediction, fit together? Part of ``validation.validate``."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.patches import compat

from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner import topics


def of_experts(args: Settings, world_size: int, elsewhere: bool = False) -> Settings:
    """Settings of experts: ``moe_ffn_hidden_size`` and ``expert_tensor_parallel_size``, where they were left open.

    Args:
        elsewhere: as in ``validation.validate``: what trains wrongly, or does nothing, is predicted all the same.

    Raises:
        ValueError: they contradict each other, or the number of ranks; says what to change.
    """
    experts, parallel = args.num_experts, args.expert_model_parallel_size
    if experts is None:
        of_flags(args).refuse(() if elsewhere else topics.WITHOUT_EXPERTS)
        return args
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    args |= {"moe_ffn_hidden_size": args.moe_ffn_hidden_size or args.ffn_hidden_size, "expert_tensor_parallel_size": tensor}
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
    of_flags(args).refuse(topics.EXPERTS, *(() if elsewhere else (topics.WRONG,)))
    if args.add_bias_linear and tensor > 1:
        whole = " or --expert-tensor-parallel-size 1" if parallel > 1 else ""
        raise ValueError(f"experts with biases cannot be cut into {tensor}: give --disable-bias-linear{whole}")
    pattern = args.moe_layer_freq
    if isinstance(pattern, list) and len(pattern) != args.num_layers:
        raise ValueError(f"--moe-layer-freq lists {len(pattern)} layers, but --num-layers is {args.num_layers}")
    _check_router(args, experts)
    return args


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
    if len(kinds) != len(coefficients):
        raise ValueError(
            f"--moe-router-load-balancing-type has {len(kinds)} values and --moe-aux-loss-coeff "
            f"{len(coefficients)}: give equally many"
        )
    if "sinkhorn" in kinds and (len(kinds) > 1 or any(coefficients) or args.moe_expert_capacity_factor):
        raise ValueError(
            "--moe-router-load-balancing-type sinkhorn balances alone: no other kind, no --moe-aux-loss-coeff, no capacity factor"
        )
    if args.add_bias_linear and args.transformer_impl == "local" and args.expert_model_parallel_size == 1:
        # The sum over ranks is then the outputs themselves, and upstream adds the biases to them in place.
        raise ValueError(
            "experts with biases that no ranks share cannot be trained by megatron-core: give --disable-bias-linear, or "
            "--expert-model-parallel-size above 1"
        )
