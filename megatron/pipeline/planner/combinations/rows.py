"""All that does not go together, by topic: flags, launch, calls and plans each ask the topics that they know the facts of.

``docs/support.md`` has those of features (``mpipe support --markdown``).
"""

from __future__ import annotations

from functools import partial

from megatron.pipeline.planner.combinations.needs import *  # noqa: F403 - topics, too
from megatron.pipeline.planner.combinations.needs import NEEDS
from megatron.pipeline.planner.combinations.table import Combination as Row
from megatron.pipeline.planner.combinations.table import Facts

_ORDER = "relies on the order of megatron-core's own schedules"
_FUSED = "runs modules of Transformer Engine without the inputs from which W computes their weight gradients"
_WEIGHTS = "shards parameters in a way that does not support delayed weight gradients"
_GRAPHS = f"(CUDA graphs) {_ORDER}"
_ENGINES = "cuda_graph_impl=transformer_engine"
_CAPTURED = f"{_ENGINES} | cuda_graph_impl=local"
_UNTESTED = "is not tested with {other} under schedules of ours"
_ITERATION = " | ".join(f"cuda_graph_{of}=full_iteration" for of in ("scope", "scope_deprecated", "modules"))
_SCOPES = ("cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules")
_LOGITS = "looks for the output layer on every rank, which megatron-core's own pipeline does not have there either"
_KERNELS = "layers launch more kernels"
_LAUNCHES = "the host launches every kernel: slower where passes are so short that it is not ahead of the device"


def _shards(to: Facts) -> int:
    return to.tensor_model_parallel_size or 1


_excluded = partial(Row, other="ours", instead="leave it out, or take --pipeline-schedule stock")
YAML = (_excluded("yaml_cfg", reason="replaces all flags, ours too", instead="give flags, or a --config file of flags"),)
# Models whose layers are letters, as older releases have them.
HYBRID = (
    _excluded("hybrid_override_pattern", reason="is what releases before 0.18 call --hybrid-layer-pattern, whose "
        "layers our schedules place from 0.19 on"),
    _excluded("mtp_hybrid_override_pattern",
        reason="is what older releases have for the letters behind each / of --hybrid-layer-pattern"),
)  # fmt: skip
# Settings of megatron-core and Megatron-LM that every schedule of ours excludes.
EXCLUDED = (
    _excluded("use_torch_fsdp2", reason=_WEIGHTS),
    _excluded("use_megatron_fsdp", reason=_WEIGHTS),
    _excluded("use_legacy_models", reason="builds models that are not megatron-core's"),
    *YAML,
    _excluded("delay_wgrad_compute", reason="delays weight gradients within megatron-core's own schedules; ours do so anyway",
        price="none, W passes are that"),
    _excluded("overlap_param_gather_with_optimizer_step", reason=_ORDER,
        price="none, each bucket of weights is gathered behind its own step"),
    _excluded("hybrid_context_parallel", reason=_ORDER),
    _excluded("fine_grained_activation_offloading", reason=f"{_ORDER}; --offload full moves activations as the schedule says",
        price="these activations stay in the device's memory, unless --offload is given"),
    _excluded("defer_embedding_wgrad_compute", reason=_ORDER, price="none, the output layer's weight gradients are W passes"),
    _excluded("init_model_with_meta_device", reason="builds the model without the weights that the placement cuts"),
    _excluded("overlap_p2p_comm_warmup_flush", reason=_ORDER,
        price="none, messages run beside passes from the first to the last"),
    _excluded("use_transformer_engine_op_fuser", reason=_FUSED, price=_KERNELS),
    _excluded("use_grouped_gemm_for_dense_mlp", reason=_FUSED, price=_KERNELS),
    _excluded("use_grouped_gemm_for_shared_expert", reason=_FUSED, price=_KERNELS),
    _excluded("inprocess_restart", reason="restarts ranks that fail within their processes, which our watchdog ends",
        price="a rank that fails ends all, and the training has to be started again from its last checkpoint"),
    *HYBRID,
    _excluded("moe_load_factor>1", reason="is for predictions: routers say where tokens go", instead="leave it out"),
    _excluded("moe_paged_stash", reason=_ORDER, price="experts' activations take memory as tokens come"),
    _excluded("overlap_dispatch_backward_with_experts_wgrad",
        reason="delays the experts' weight gradients on a stream of its own; W delays them as the schedule says",
        price="tokens' way back is hidden by --overlap-moe-expert-parallel-comm alone"),
    _excluded("tp_comm_overlap",
        reason="leaves inputs and output gradients of linears in buffers that later layers overwrite before W reads them",
        price="tensor-parallel ranks exchange activations before and behind products, not within them"),
    _excluded("fp4", reason="is not tested with delayed weight gradients (--fp8-format is)"),
    _excluded("fp8_output_proj", reason="computes the output layer in FP8, which is tested neither with delayed weight gradients "
        "nor with --vocab-parallel"),
    # Upstream's own numbers are those of tensor-parallel ranks: nothing is sharded again. It computes the sizes from them.
    _excluded("tensor_parallel_num_weight_shards", reason=_WEIGHTS,
        when=lambda to: to.tensor_parallel_num_weight_shards > _shards(to)),
    _excluded("expert_tensor_parallel_num_weight_shards", reason=_WEIGHTS,
        when=lambda to: to.expert_tensor_parallel_num_weight_shards > (to.expert_tensor_parallel_size or _shards(to))),
    _excluded("gtp_weight_remat_size>1", reason=_WEIGHTS, when=lambda to: not to.tensor_parallel_num_weight_shards),
    _excluded("expert_gtp_weight_remat_size>1", reason=_WEIGHTS, when=lambda to: not to.expert_tensor_parallel_num_weight_shards),
    _excluded("mlp_chunks_for_training>1",
        reason="uses a weight several times in one layer, and W computes one gradient of a weight",
        price="an MLP's activations of a whole microbatch are there at once"),
    _excluded("experimental_attention_variant=dsa",
        reason="uses the weight of a linear without its forward, and W would never compute that weight's gradient"),
    _excluded("optimizer_cuda_graph", reason=_GRAPHS, price=_LAUNCHES),
    _excluded("cuda_graph_impl", reason=f"{_GRAPHS} where an iteration is one; transformer_engine and local, of layers, do not",
        price=_LAUNCHES, details=_SCOPES,
        when=lambda to: to.cuda_graph_impl not in ("transformer_engine", "local") or to.met(_ITERATION)),
    Row(_CAPTURED, "fp8 | fp4 | recompute_granularity | overlap_moe_expert_parallel_comm | cuda_graph_scope=moe | "
        "cuda_graph_modules=moe | variable_seq_lengths | pipeline_model_parallel_size=1", _UNTESTED, when=lambda to: to.ours,
        price=_LAUNCHES, details=_SCOPES),
    Row(_ENGINES, "add_bias_linear | add_qkv_bias", _UNTESTED, when=lambda to: to.ours, price=_LAUNCHES, details=_SCOPES),
    Row("cuda_graph_impl=local", "mtp_num_layers", _UNTESTED, when=lambda to: to.ours, price=_LAUNCHES, details=_SCOPES),
    Row(_CAPTURED, "num_experts", "captures whole layers, and how many tokens visit {other} is read by the host",
        when=lambda to: to.ours and not any(getattr(to, scope) for scope in _SCOPES), price=_LAUNCHES,
        instead="add --cuda-graph-scope attn moe_router (from 0.18 on --cuda-graph-modules)"),
    _excluded("enable_cuda_graph", reason=_GRAPHS, price=_LAUNCHES),
    _excluded("external_cuda_graph", reason=_GRAPHS, price=_LAUNCHES),
    _excluded("logits_load_dir", reason=_LOGITS),
    _excluded("logits_save_dir", reason=_LOGITS),
    _excluded("export_kd_teacher_load", reason="adds a teacher's stages to the student's, which the placement does not cut"),
    _excluded("freeze_all_layers", reason="leaves nothing to train, and megatron-core 0.19 builds models without it"),
    _excluded("perform_rl_step", reason="generates text with megatron-core's own pipeline, which does not know our placements"),
)  # fmt: skip

_CHUNKS = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "pipeline_model_parallel_layout")
# Numbers of chunks, where the family has its own.
CHUNKS = (
    Row(" | ".join(_CHUNKS), "fixed_chunks", "{asks}", "leave it out", details=_CHUNKS,
        price="layers are spread evenly over the {stages_there} stages of {pipeline_schedule}"),
)  # fmt: skip

_COUNTED = "account_for_embedding_in_pipeline_split | account_for_loss_in_pipeline_split"
_ALONE = "and --pipeline-model-parallel-size is 1"
_1F1B = "take 1f1b, which otherwise runs the same passes, or another one, or leave {flag} out"
_ANOTHER = "take another schedule, or leave {flag} out"
_EXPERTS = "overlap_moe_expert_parallel_comm"
GROUPS = (
    Row("microbatch_group_size_per_vp_stage | group", "no grouped",
        "sets groups of microbatches, and {pipeline_schedule} has its own or none", "leave it out, or take {grouping} or stock",
        price="none, {pipeline_schedule} orders microbatches itself"),
    Row("asked_splits>1", "splits=1", "cuts microbatches into slices, and {pipeline_schedule} does not", "leave it out"),
)  # fmt: skip
# Patterns of layers, before it is asked what their letters need.
LETTERS = (
    Row("hybrid_layer_pattern", "ours", "with D uses the weight of a linear without its forward, and W would never compute that "
        "weight's gradient", "take --pipeline-schedule stock", lambda to: "D" in str(to.hybrid_layer_pattern)),
    Row("hybrid_layer_pattern", f"pipeline_model_parallel_layout | {_COUNTED}",
        "says where every layer goes, by | or by what letters take, and {other} would, too"),
    Row(_EXPERTS, "hybrid_layer_pattern", "runs megatron-core's plans of layers, which it has for GPTModel alone"),
)  # fmt: skip
# Our features, and what a schedule is or has.
SCHEDULES = (
    Row("hybrid_layer_pattern", "no num_experts", "has layers of experts (E)", "give --num-experts",
        when=lambda to: "E" in str(to.hybrid_layer_pattern)),
    Row("post_validation", "no ours", "needs a schedule that says where a step must stand, and megatron-core's own does not",
        "take 1f1b, which runs the same passes, or another one, or leave {flag} out"),
    Row("vocab_parallel", "pipeline_model_parallel_size=1", f"spreads the vocabulary over pipeline ranks, {_ALONE}",
        "raise it, or leave {flag} out"),
    Row("vocab_parallel", "no ours", "needs a schedule that can have its passes, and megatron-core's own cannot", _1F1B),
    Row("vocab_parallel", "splits>1",
        "needs the losses of whole sequences, and the schedule cuts them into {splits} slices", _ANOTHER),
    Row("offload", "no ours", "needs a schedule that says when to copy, and megatron-core's own does not", _1F1B),
    Row("offload", "splits>1",
        "moves whole microbatches, and the schedule cuts them into {splits} slices, which share their memory", _ANOTHER),
    Row("pipeline_memory_limit", "no ours", "is for schedules of ours: megatron-core's own takes no limit",
        "take another schedule, such as v-auto, or leave {flag} out"),
    Row(_EXPERTS, "splits>1", "runs whole microbatches through whole layers, and the schedule cuts them into {splits} slices",
        _ANOTHER),
    Row(_EXPERTS, "vocab_parallel", "runs whole layers of one rank, and {other} takes a part of them to others"),
    Row(_EXPERTS, "offload | copies", "frees tensors itself, and {other} moves them"),
    Row(_CAPTURED, "reruns | splits>1 | offload | copies | vocab_parallel | post_validation | pipeline_costs=profile",
        _UNTESTED, when=lambda to: to.ours),
    Row(_ENGINES, "ours", "needs transformer-engine 2.11 or newer, whose graphs have W", "update it, or leave {flag} out",
        when=lambda to: to.engine and to.engine < (2, 11)),
    Row("offload | copies", "fp8", "with FP8: it would move Transformer Engine's FP8 weights with every microbatch",
        "leave --offload out and recompute activations (--recompute-granularity), or train in --bf16"),
    Row("post_validation", "fp8", "with FP8: it takes steps back, and would leave Transformer Engine's scales as they are",
        "leave --post-validation out, or train in --bf16"),
    Row("fp8_recipe=delayed", "reruns", "with {other}: their scales would be those of later microbatches",
        "give --fp8-recipe tensorwise, mxfp8 or blockwise, or a schedule without R and --recompute-granularity",
        lambda to: to.fp8),
)  # fmt: skip
CALLS = (
    Row("adjust_tensor_shapes_fn", "chunks>1", "works with one chunk per rank only, as in megatron-core"),
    # One batch of messages then has several between the same two ranks, which upstream's parser refuses and its core does not.
    Row("chunks>1", "no overlap_p2p_comm",
        "on 2 pipeline ranks without overlap_p2p_comm: megatron-core's own schedule mixes up messages, and trains garbage",
        "set it, and batch_p2p_comm=False", lambda to: not to.ours and to.pipeline_model_parallel_size == 2),
    Row("collect_non_loss_data", "splits>1", "needs whole sequences", "choose a schedule without slices"),
    Row("collect_non_loss_data", "vocab_parallel", "needs logits of the whole vocabulary on one rank",
        "train without --vocab-parallel"),
)  # fmt: skip

_whole = partial(
    Row,
    other="splits>1",
    reason="needs whole sequences, and the schedule cuts every microbatch into {splits} slices",
    instead="leave it out, or choose a schedule without slices",
)
SLICES = (
    _whole("context_parallel_size>1"),
    _whole("transformer_impl=transformer_engine", instead="use local, or choose a schedule without slices"),
    _whole("mtp_num_layers"),
    # Means over the tokens that a router sees at once: a slice is not a microbatch.
    _whole("moe_aux_loss_coeff"),
    _whole("moe_z_loss_coeff"),
    _whole("moe_expert_capacity_factor"),
    _whole("moe_router_load_balancing_type=sinkhorn"),
    _whole("experimental_attention_variant"),  # linear attention has a state that each token leaves to the next
    _whole("hybrid_layer_pattern"),
)

_ENDS = "decoder_first_pipeline_num_layers | decoder_last_pipeline_num_layers"
VOCABULARY = (
    Row("vocab_logits_limit | vocab_mask_padding | label_smoothing | z_loss", "no vocab_parallel",
        ": only the output layer of --vocab-parallel can do that, megatron-core's own cannot",
        "give --vocab-parallel 2, or leave {flag} out"),
    Row("vocab_parallel", "mtp_num_layers", "cannot be combined with {other}, whose layers need the whole output layer several "
        "times on the last stage"),
    Row("vocab_parallel", "use_mup", "computes logits in shards, and {other} needs megatron-core's output layer"),
    Row("vocab_parallel", "fp16_lm_cross_entropy", "computes the loss in float32", "leave --fp16-lm-cross-entropy out"),
    Row("layer_redistribution", "vocab_parallel",
        "makes up for vocabulary layers on the first and the last stage, and {other} leaves none there"),
)  # fmt: skip
WATCH = (
    Row("pipeline_watch=replan", "offload", "needs to know what copies take", "add --offload-profile, or --pipeline-costs FILE",
        when=lambda to: not (to.pipeline_costs or to.offload_profile)),
    Row("pipeline_watch=replan", "pipeline_schedule", "plans again, and {other} is one order",
        "take a family's schedule, or --pipeline-watch report", when=lambda to: str(to.pipeline_schedule).startswith("file:")),
    Row("pipeline_watch=report | pipeline_watch=replan", "rehearse", "times ranks that run side by side, and {other} has them in "
        "turns"),
    Row("pipeline_watch=report | pipeline_watch=replan", "pipeline_schedule=stock", "reads what schedules of ours record",
        "take one of these, or leave --pipeline-watch out"),
)  # fmt: skip
FLAGS = (
    Row("recompute_fused_backward", "no recompute_granularity", "needs --recompute-granularity full or selective",
        "give one, or leave {flag} out"),
    Row("post_validation_when | post_validation_copy", "no post_validation",
        "says how --post-validation works, which is not given", "give it, or leave {flag} out"),
    Row("pipeline_plan=every-batch", "post_validation",
        "swaps plans between two iterations, and {other} begins one within the one before"),
    Row("pipeline_plan=every-batch", "rehearse", "swaps plans for lengths, and {other} has batches of equal ones"),
    *WATCH,
    Row("pipeline_packing", "pipeline_schedule=stock", "packs for schedules of ours", "take one, or leave {flag} out"),
    Row("pipeline_packing", "no sft", "packs sequences of --sft, which is not given", "give it, or leave {flag} out",
        when=lambda to: not to.dataloader_inter_document_masking),
    Row("pipeline_packing", "micro_batch_size>1", "makes microbatches of one row", "give --micro-batch-size 1"),
    Row("pipeline_packing", "post_validation | rampup_batch_size | step_batch_size_schedule | iterations_to_skip",
        "reads each batch while the one before it trains, and {other} begins it, skips it, or changes its size"),
    Row("pipeline_packing", "pipeline_schedule", "packs into other numbers of microbatches, and {other}, a file, is for one",
        "take a family's schedule, or leave {flag} out", when=lambda to: str(to.pipeline_schedule).startswith("file:")),
    *VOCABULARY,
    Row("layer_redistribution", "pipeline_model_parallel_size=1", f"moves layers between pipeline ranks, {_ALONE}",
        "raise it, or leave {flag} out"),
    Row("layer_redistribution", "num_layers_per_virtual_pipeline_stage",
        "chooses the number of layers of every stage, and {other} would fix it",
        "leave one of the two out; --num-virtual-stages-per-pipeline-rank gives the number of chunks"),
    Row("layer_redistribution", f"pipeline_model_parallel_layout | hybrid_layer_pattern | {_ENDS} | {_COUNTED}",
        "chooses the number of layers of every stage, and {other} would fix some"),
    Row("offload_profile", "pipeline_costs",
        "measures what passes and copies cost, and {other} says it", when=lambda to: to.pipeline_costs != "profile"),
    Row("timing_log_level>1", "pipeline_costs=profile | offload_profile",
        "waits for the whole GPU before and after every pass, also for messages on their way, and {other} would take that for "
        "the pass", "take --timing-log-level 1, or profile in a run without it"),
    Row("rehearse", "pipeline_costs=profile | offload_profile",
        "measures what passes cost, and writes it to {rehearse_dir}/costs.json",
        "leave {other} out, and give --pipeline-costs with that file in a second run"),
    Row("rehearse", "save", "trains a few iterations, and {other} would keep them"),
)  # fmt: skip

_overlap = partial(Row, _EXPERTS)
# Flags of models in parts: plans of layers, predictions of further tokens.
MODELS = (
    _overlap("no num_experts", "needs experts", "give --num-experts and --expert-model-parallel-size 2 or more"),
    _overlap("expert_model_parallel_size=1", "needs experts on several ranks", "give --expert-model-parallel-size 2 or more"),
    _overlap("moe_token_dispatcher_type=allgather", "needs all-to-alls, and has {other}", "give alltoall"),
    _overlap("no bf16", "needs --bf16 or --fp16", "give one", lambda to: not to.fp16),
    _overlap("recompute_granularity=full", "runs layers in parts, and {other} recomputes them whole", "take selective"),
    _overlap("recompute_modules=moe", "runs experts in parts, and {other} recomputes them whole", "leave moe out"),
    _overlap("moe_shared_expert_overlap", "overlaps all-to-alls, and {other} does so in another way"),
    _overlap("mtp_num_layers>1", "has layers for one further token, and {other} has more", "give 1"),
    _overlap("mtp_num_layers", "with {other} needs a pipeline", "raise --pipeline-model-parallel-size",
             lambda to: to.pipeline_model_parallel_size == 1),
    _overlap("num_experts", "needs experts in the last layer: after a dense one megatron-core's plans leave the final norm out",
             "change --moe-layer-freq", lambda to: not (
                 to.moe_layer_freq[-1] if isinstance(to.moe_layer_freq, list) else (to.num_layers - 1) % to.moe_layer_freq == 0)),
    _overlap("fp8_recipe=delayed", "enters FP8 layer by layer, and {other} enters it once", "give another recipe",
             lambda to: to.fp8),
    _overlap("fp4", "runs megatron-core's plans of layers, which do not enter FP4 and would train in --bf16",
             "give --fp8-format, or leave --fp4-format out"),
    _overlap("sft | dataloader_inter_document_masking", "does not hand packed sequences on", "leave {other} out"),
    _overlap("no ours", "under --pipeline-schedule stock needs several chunks per rank",
             "give --num-virtual-stages-per-pipeline-rank, or take another schedule",
             lambda to: to.pipeline_model_parallel_size > 1 and not to.chunks),
    Row("mtp_num_layers", "no untie_embeddings_and_output_weights", "would train unused weights",
        "give --untie-embeddings-and-output-weights, or leave {flag} out"),
    Row("mtp_num_layers", "position_embedding_type=learned_absolute", "does not go with {other}",
        "give --position-embedding-type rope or none"),
    Row("mtp_num_layers", "recompute_num_layers>1", "does not go with {other}", "give --recompute-num-layers 1",
        lambda to: to.recompute_granularity == "full" and to.recompute_method == "uniform"),
)  # fmt: skip

RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")
_RECIPE = f"give --fp8-recipe {' or '.join(RECIPES)}, or --pipeline-schedule stock"
_REUSES = "reuse_grad_buf_for_mxfp8_param_ag"


def _gathers(to: Facts) -> bool:
    return bool(to.fp8_param_gather and to.use_distributed_optimizer and to.fp8_recipe == "mxfp8")


QUANTIZED = (
    Row("fp8", "transformer_impl=local", "needs Transformer Engine, which is not installed",
        "pip install 'transformer-engine[pytorch]>={oldest_engine}', or leave {flag} out", lambda to: not to.engine and to.ours),
    Row("fp8", "transformer_impl=local", "with {other}: megatron-core's own layers would ignore it and train in --bf16",
        "give --transformer-impl transformer_engine, or leave {flag} out", lambda to: to.ours),
    Row("fp8_recipe=custom", "ours", "loses weight gradients: Transformer Engine's products of tensors in Python do not add them "
        "to main_grad", _RECIPE, lambda to: to.fp8),
    Row("fp8_recipe", "ours", "is not tested with delayed weight gradients", _RECIPE,
        lambda to: to.fp8 and to.fp8_recipe not in RECIPES),
    Row("fp8_param_gather", "fp8_recipe=mxfp8",
        "with {other}: Transformer Engine cannot keep such weights where they are gathered",
        "give --reuse-grad-buf-for-mxfp8-param-ag as well, or leave {flag} out",
        lambda to: to.fp8 and to.ours and _gathers(to) and not to[_REUSES]),
    Row(_REUSES, "ours", "gathers weights in 16 bits, which only --fp8-recipe mxfp8 with --fp8-param-gather and "
        "--use-distributed-optimizer rounds afterwards", "give these, or leave it out", lambda to: to.fp8 and not _gathers(to)),
)  # fmt: skip

# Of Megatron-LM's scripts, whose own validation refuses it without a word.
STARTED = (
    Row("save", "no save_interval", "without --save-interval: Megatron-LM's scripts need both",
        "give --save-interval N, such as 1000, or leave {flag} out"),
)  # fmt: skip

_SPREAD = (*_CHUNKS[::2], *_COUNTED.split(" | "), *(f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")))


def _is_uneven(to: Facts) -> bool:
    spread = to.hybrid_layer_pattern or any(to[name] for name in _SPREAD)
    stages = (to.pipeline_model_parallel_size or 1) * (to.num_virtual_stages_per_pipeline_rank or 1)
    return not spread and to.num_layers % stages != 0


_BEHIND_STEPS = "acts on weights behind a step, when forwards of the next iteration have begun"
_trainer = partial(Row, other="launch", instead="use the pretrain_gpt.py of megatron.pipeline, or leave {flag} out")
_ahead = partial(Row, other="post_validation", instead="leave it out, or leave --post-validation out")
_MASKS = "with {other}: Megatron-LM's models would draw other"
# Megatron-LM's own scripts, under mpipe launch.
LAUNCHED = (
    Row("hybrid_layer_pattern", "launch", "lists the layers of a class that our schedules place from megatron-core 0.19 on",
        "install it, or take --pipeline-schedule stock", lambda to: to.ours and not to.is_from("0.19")),
    Row("cuda_graph_impl=local", "ours", "needs megatron-core 0.19, whose graphs keep an input until B",
        "install it, or take transformer_engine", lambda to: not to.is_from("0.19")),
    _trainer("rehearse", reason="with more ranks than GPUs has process groups of its own, and the script makes its own here",
             instead="use the pretrain_gpt.py of megatron.pipeline, or start as many ranks as there are GPUs",
             when=lambda to: to.crowded),
    Row("num_layers", "no ours", "do not split evenly over the stages, as Megatron-LM asks where no flag spreads them",
        "give a multiple of the stages, or --pipeline-model-parallel-layout", _is_uneven),
    _ahead("log_num_zeros_in_grad", reason="counts what a step ahead does not wait for"),
    _ahead("qk_clip", reason=_BEHIND_STEPS),
    _ahead("log_max_attention_logit", reason="reads behind a step what forwards of the next iteration have begun to write"),
    _ahead("moe_expert_rank_capacity_factor", reason="may run an iteration again"),
    _ahead("optimizer_cpu_offload", reason="steps on the CPU, in a way that no copy here rolls back"),
    _ahead("use_precision_aware_optimizer", reason="keeps parameters in a form that no copy here rolls back"),
    _ahead("optimizer", reason="with --post-validation, which rolls back steps of adam and sgd",
           instead="take one of them, or leave --post-validation out", when=lambda to: to.optimizer not in ("adam", "sgd")),
    *(Row(flag, "reruns | splits>1", f"{_MASKS} {drawn}", "leave it out, or take another schedule")
      for flag, drawn in (("moe_input_jitter_eps", "jitter"), ("moe_router_force_load_balancing", "logits"))),
    Row("hidden_dropout | attention_dropout", "reruns | splits>1", f"{_MASKS} dropout masks", "give --attention-dropout 0 "
        "--hidden-dropout 0, another schedule, or use the pretrain_gpt.py of megatron.pipeline"),
)  # fmt: skip

_TELLS = (
    ": Megatron-LM's script tells documents to the first and the last of {stages} stages alone, and the layers of "
    "all others attend across them; schedules of ours tell all"
)
# Under megatron-core's own schedules, of flags that upstream has validated.
DOCUMENTS = (
    Row("reset_attention_mask", "no ours", _TELLS, "", lambda to: to.stages > 2),
    Row("sft | dataloader_inter_document_masking", "no ours", _TELLS, "", lambda to: to.stages > 2, mended="0.17"),
)

_MIXED = "with {other}: Megatron-LM {core}"
_UNMIXED = "leave it and --fp8-param-gather out, or take release 0.19 or later"
# Trained wrongly by some releases of megatron-core, under any schedule.
WRONG = (
    Row("sft", "tensor_model_parallel_size>1",
        f"{_MIXED} does not tell all tensor-parallel ranks where packed sequences begin",
        "give --tensor-model-parallel-size 1, or take release 0.17 or later", mended="0.17"),
    Row(_REUSES, "overlap_param_gather",
        f"{_MIXED} adds weights to the gradients of the iteration behind each evaluation and checkpoint", _UNMIXED,
        mended="0.19"),
    Row(_REUSES, "num_experts",
        f"{_MIXED} takes gradients of experts for their weights, which the step of dense layers gathers with its own", _UNMIXED,
        mended="0.19"),
    # It reduces the gradients of experts that no expert-parallel ranks share as those of dense layers: over the ranks that have
    # the same dense shard. Only if both are cut alike are these the ranks with the same expert shard. With fewer parts copies of
    # one expert drift apart, and with more parts gradients of different shards are added.
    Row("expert_tensor_parallel_size", "num_experts",
        "with --tensor-model-parallel-size {tensor_model_parallel_size} and --expert-model-parallel-size 1: megatron-core would "
        "reduce the experts' gradients over the wrong ranks",
        "give --expert-tensor-parallel-size {tensor_model_parallel_size}, or --expert-model-parallel-size above 1",
        lambda to: (to.expert_model_parallel_size == 1 and to.expert_tensor_parallel_size != to.tensor_model_parallel_size
                    and not (to.launch and to.is_from("0.19")))),
)  # fmt: skip

_WHOLE_STEPS = (
    "optimizer_cpu_offload | use_precision_aware_optimizer | fp8_param_gather | fp4_param_gather | "
    f"{_REUSES} | overlap_param_gather_with_optimizer_step"
)
# Optimizers that step all of a rank's weights at once, and not one bucket after another, each gathered behind its own step.
AT_ONCE = (
    Row(_WHOLE_STEPS, "overlap_param_gather", "with {other}: a rank steps all weights before it gathers the first ones, and not "
        "each bucket's behind its own step", "", lambda to: to.use_distributed_optimizer),
)  # fmt: skip

_PER_TOKEN = "calculate_per_token_loss"
_MEANT = ""  # in place of a release that mends it: upstream means it so
# Flags of megatron-core's own that do less than they say, under any schedule: what runs warn of at their start. Most are silent:
# losses fall, and are not those of another layout. ``mpipe check`` shows by how much.
CAUTIONS = (
    Row("eod_mask_loss | sft", "context_parallel_size>1",
        "with {other}: every context-parallel rank takes the mean over its own tokens that count, and the loss is the mean of "
        "these means", "give --calculate-per-token-loss", lambda to: not to.calculate_per_token_loss, mended=None),
    Row("mtp_num_layers", "context_parallel_size>1",
        "with {other}: the losses of further tokens are means over each context-parallel rank's own tokens, and the rank with "
        "the sequence's end has fewer: its own weigh more than without context parallelism", "",
        lambda to: not to.calculate_per_token_loss, mended=None),
    Row("mtp_num_layers", _PER_TOKEN,
        "with {other} on {replicas} data-parallel x {context_parallel_size} context-parallel ranks: every rank weighs the losses "
        "of further tokens by its own number of tokens that count, and these numbers differ: another number of ranks is another "
        "loss", "", lambda to: to.context_parallel_size > 1 or ((to.eod_mask_loss or to.sft) and to.replicas > 1),
        since="0.17", mended=None),
    Row("balancing", _PER_TOKEN,
        "with {other} on {tensor_model_parallel_size} tensor x {context_parallel_size} context parallel ranks: these losses of "
        "the router count {cut} times too little", "multiply their coefficients by {cut}",
        lambda to: to.num_experts and to.cut > 1, mended="0.19"),
    Row("moe_router_load_balancing_type=seq_aux_loss", "micro_batch_size>1",
        "with --calculate-per-token-loss and {other}: this loss counts {micro_batch_size} times too little",
        "multiply its coefficient by {micro_batch_size}",
        lambda to: to.num_experts and to.calculate_per_token_loss and " seq_aux_loss" in to.balancing,
        since="0.16", mended="0.19"),
    Row("moe_router_force_load_balancing", "chunks>1",
        "draws the router's logits by pipeline rank: with {other} layers get others than with one, and losses differ a little",
        "compare losses without it", mended=_MEANT),
    Row("softmax_type=learnable", "tensor_model_parallel_size>1",
        "with {other}: the gradient norm, by which --clip-grad {clip_grad} clips, has the attention sinks of the first "
        "tensor-parallel rank alone", "", lambda to: to.clip_grad, mended=None),
    Row("experimental_attention_variant=gated_delta_net", "tensor_model_parallel_size>1",
        "with {other} and without --sequence-parallel: the gradient of the norm behind this attention is that of each "
        "tensor-parallel rank's own heads, and copies of the norm drift apart", "give --sequence-parallel",
        lambda to: not to.sequence_parallel, mended=None),
    Row("add_bias_linear", "num_experts",
        "of experts with --tensor-model-parallel-size {tensor_model_parallel_size} and --expert-tensor-parallel-size 1: the "
        "gradients of the last biases of experts on different tensor-parallel ranks are added up", "give --disable-bias-linear",
        lambda to: (to.sequence_parallel and to.transformer_impl != "transformer_engine"
                    and to.expert_tensor_parallel_size == 1 < to.tensor_model_parallel_size), mended=None),
    Row("moe_grouped_gemm", "tensor_model_parallel_size>1",
        "with {other} and Transformer Engine 2.13 or newer: the gradient norm, by which --clip-grad {clip_grad} clips, lacks the "
        "experts that are not on the first tensor-parallel rank", "",
        lambda to: (to.transformer_impl == "transformer_engine" and to.clip_grad and to.cut_experts
                    and to.engine and to.engine >= (2, 13)), since="0.17", mended="0.19"),
    Row("smoothed_loss", "tensor_model_parallel_size>1",
        "with {other}: every tensor-parallel rank smooths over its own rows of the vocabulary, and ranks get different losses",
        "compute this loss of gathered logits", mended=None),
    Row("gathered_logits", "tensor_model_parallel_size>1",
        "with {other}: a loss that the model computes from labels sums over the vocabulary {tensor_model_parallel_size} times, "
        "and its gradients are of other probabilities", "build the model with parallel_output=True, or give it no labels",
        mended=None),
    Row("reset_attention_mask", "transformer_impl=transformer_engine",
        "has no effect: Transformer Engine's causal attention takes no other mask, and goes across documents",
        "give --transformer-impl local", mended=_MEANT),
    Row("reset_attention_mask", "no create_attention_mask_in_dataloader",
        "has no effect with --no-create-attention-mask-in-dataloader, and attention goes across documents",
        "leave the latter out",
        lambda to: to.transformer_impl != "transformer_engine", mended=_MEANT),
    Row("freeze_all_layers", "no ours", "has no effect: all layers train", "freeze them by a hook of the model", since="0.19",
        mended="0.20"),
)  # fmt: skip

# Those of docs/support.md; the table of features has the others.
OF_FEATURES = (*LETTERS, *SCHEDULES, *GROUPS, *FLAGS, *CALLS, *SLICES, *MODELS, *QUANTIZED, *LAUNCHED, *WRONG, *NEEDS)
