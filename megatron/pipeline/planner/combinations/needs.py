"""Flags that need others: Megatron-LM's own, ours of details, and options of ``mpipe plan``; and what files of schedules need."""

from __future__ import annotations

from functools import partial

from megatron.pipeline.planner.combinations.table import Combination

_needs = partial(Combination, instead="")  # the reason says what to give

# Of Megatron-LM's flags, which its own validation does not read here: of every training, and of one that runs here.
UPSTREAM = (
    _needs("use_distributed_optimizer", "optimizer=sgd", "needs --optimizer adam, not {optimizer}"),
    _needs("overlap_param_gather", "no use_distributed_optimizer | no overlap_grad_reduce",
           "needs --use-distributed-optimizer and --overlap-grad-reduce"),
    Combination("swiglu", "squared_relu", "and {other} are two activations", "give one"),
    Combination("bf16", "fp16", "and {other} contradict each other", "give one"),
    _needs("fp16_lm_cross_entropy", "no fp16", "needs --fp16"),
    _needs("recompute_granularity=full", "no recompute_method | no recompute_num_layers",
           "needs --recompute-method and --recompute-num-layers"),
    _needs("recompute_method | recompute_num_layers", "no recompute_granularity=full", "needs --recompute-granularity full"),
    _needs("recompute_modules", "no recompute_granularity=selective", "needs --recompute-granularity selective"),
    _needs("recompute_modules=moe_act", "no moe_grouped_gemm",
           "needs --moe-grouped-gemm: megatron-core recomputes grouped experts alone"),
    _needs("recompute_modules=mlp", "add_bias_linear", "needs --disable-bias-linear: megatron-core's checkpoint makes a bias "
           "that an MLP hands on a part of the graph of every later microbatch, and recomputes without end"),
    _needs("recompute_modules=mla_up_proj", "no multi_latent_attention", "needs --multi-latent-attention"),
)  # fmt: skip
TRAINED = (
    Combination("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler", "and {other} contradict each other",
                "give one"),
    _needs("lr_decay_style=WSD", "no lr_wsd_decay_iters", "needs --lr-wsd-decay-iters"),
    _needs("save_interval", "no save", "needs --save DIR"),
    _needs("finetune | exit_on_missing_checkpoint", "no load", "needs --load DIR"),
    _needs("valid_data_path | test_data_path", "no train_data_path", "needs --train-data-path"),
)  # fmt: skip
_OF_EXPERTS = (
    "expert_model_parallel_size>1 | expert_tensor_parallel_size | moe_ffn_hidden_size | moe_shared_expert_intermediate_size"
    " | moe_grouped_gemm | overlap_moe_expert_parallel_comm"
)
WITHOUT_EXPERTS = (Combination(_OF_EXPERTS, "no num_experts", "without experts", "give --num-experts"),)
EXPERTS = (
    _needs("num_experts", "tensor_model_parallel_size>1", "with {other} needs --sequence-parallel",
           when=lambda to: not to.sequence_parallel),
    _needs("moe_grouped_gemm", "transformer_impl=local", "with {other} needs --bf16 and --disable-bias-linear",
           when=lambda to: to.add_bias_linear or not to.bf16),
    _needs("moe_router_enable_expert_bias", "moe_router_score_function=softmax", "needs --moe-router-score-function sigmoid"),
    _needs("moe_pad_expert_input_to_capacity", "no moe_expert_capacity_factor", "needs --moe-expert-capacity-factor"),
    _needs("moe_shared_expert_intermediate_size", "add_bias_linear",
           "needs --disable-bias-linear: megatron-core's have no biases"),
)  # fmt: skip

_OFFLOAD = "give --offload selective or full, or leave it out"
_OF_OFFLOAD = "offload_profile | offload_host_memory | offload_min_size | offload_cpu_bandwidth"
DETAILS = (
    Combination(_OF_OFFLOAD, "no offload", ": there is nothing to offload",
                "give --offload full or selective, or leave {flag} out",
                lambda to: not str(to.pipeline_schedule).startswith("file:")),  # a file may have copies of its own
    Combination("offload_cpu_bandwidth", "gpu", "is for machines without a GPU, whose own bandwidth counts", "leave it out"),
    Combination("offload_host_memory", "no pipeline_costs", ": how much fits is known once activations have been measured",
                "give --offload-profile, or --pipeline-costs FILE with what a run before has measured",
                lambda to: to.met("offload") and not to.offload_profile),
    Combination("pipeline_costs_cache", "no pipeline_costs=profile", "is where --pipeline-costs profile writes",
                "give both, or neither", lambda to: not to.offload_profile),
    Combination("rehearse_hop", "no rehearse", "is for a rehearsal",
                "add --rehearse, or leave it out"),
    Combination("rehearse_dir", "no rehearse", "is for a rehearsal", "add --rehearse, or leave it out",
                lambda to: to.rehearse_dir != "runs/rehearsal"),
)  # fmt: skip

# Options of every command that plans; costs are those of ``--cost`` by what they are of.
OPTIONS = (
    Combination("host_memory_limit", "no offload", "is for what --offload moves", _OFFLOAD),
    Combination("attention | order", "no lengths", "is of microbatches of unequal lengths", "give --lengths, or leave it out"),
    Combination("grad_bytes | param_bytes | replica_link", "no replicas", "is of data-parallel replicas",
                "give --replicas, or leave it out"),
    Combination("balance", "trained", "moves layers that are alike", "give it a pattern, with --costs of mpipe costs "
                "--by-layer --trained .., and leave it out here"),
    Combination("bucket_costs", "replicas", "and {other} say the same", "leave out one of them"),
    Combination("replicas", "no grad_bytes", "needs the bytes of a rank's gradients", "give --grad-bytes, such as 4GiB"),
)  # fmt: skip
# The same of schedules of families, which have nothing but what the options say.
PLANNED = (
    Combination("copy_costs", "no offload", "is of copies to host memory", _OFFLOAD),
    Combination("norm_costs", "no bucket_costs", "is of what ranks do between iterations",
                "give RS, OPT or AG too, or leave it out", lambda to: not (to.costs or to.replicas or to.step_costs)),
    Combination("vocab_cost", "no vocab_parallel", "is of a spread vocabulary",
                "give --vocab-parallel 1, 2 or interlaced, or leave it out"),
)  # fmt: skip

_ORDERS = "are orders of whole microbatches by their lengths, and {pipeline_schedule} has"
_batches = partial(Combination, "every_batch", instead="leave that out, or plan once")
EVERY_BATCH = (
    _batches("no searches", f"{_ORDERS} an order that no lengths change", instead="take {searching}, or plan once"),
    _batches("splits>1", f"{_ORDERS} slices here"),
    _batches("vocab_parallel", f"{_ORDERS} a spread vocabulary here"),
    _batches("offload", f"{_ORDERS} copies to host memory here"),
    _batches("overlap_moe_expert_parallel_comm", f"{_ORDERS} overlapped passes here"),
)

# What a file's schedule has, and what is asked for on top of it; and what a file in torch's CSV can have.
FILES = (
    Combination("vocab_parallel", "file_vocabulary", "is asked for, and {pipeline_schedule} spreads the vocabulary as "
                "{file_vocabulary}", "give one of the two", lambda to: to.file_vocabulary != to.vocab_parallel),
    Combination("vocab_parallel", "copies", "has passes that come before copies to host memory, which {pipeline_schedule} has "
                "already", "plan it with both (mpipe plan --vocab-parallel {vocab_parallel} --offload ..), or leave {flag} out",
                lambda to: not to.file_vocabulary),
    Combination("offload", "copies", "adds copies, and those of {pipeline_schedule} run as they are", "leave {flag} out"),
)  # fmt: skip
_csv = partial(Combination, "torch_csv", instead="write it as JSON, or plan it without")
TORCH_CSV = (
    _csv("splits>1", "knows whole microbatches only, and {pipeline_schedule} cuts each into {splits} slices"),
    _csv("vocab_parallel", "has no passes for the vocabulary, which {pipeline_schedule} spreads over all ranks"),
    _csv("unwritten", "has no kind for passes {unwritten}, which {pipeline_schedule} has"),
)
NEEDS = (*UPSTREAM, *TRAINED, *WITHOUT_EXPERTS, *EXPERTS, *DETAILS, *OPTIONS, *PLANNED, *EVERY_BATCH, *FILES, *TORCH_CSV)
