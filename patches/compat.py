"""Every name of megatron-core and megatron.training that this package relies on and that is no stable interface: in one table.

A name is in the table if it is private, if a patch replaces it, if it is a helper inside upstream's schedules or optimizers, or
if a release between 0.16 and 0.19 lacks it. ``patches.install`` checks all names once. Code takes a name by ``get``, and a module
whose names it replaces by ``module``.

To support another release: add it to ``RELEASES``, correct the rows, and change the code that takes the rows' names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch

from megatron.pipeline.planner import minor

RELEASES = ("0.16", "0.17", "0.18", "0.19")  # scripts/check_core_versions.py trains with these
TORCH = ((2, 11), (2, 15))  # the first and the last release of torch that trained what docs/versions.md says
_NEWEST = RELEASES[-1] if sys.version_info >= (3, 12) else RELEASES[0]  # 0.17 and later ask for Python 3.12
_PIP = f"pip install 'megatron-core~={_NEWEST}.0'"
ADVICE = f"install a release that megatron.pipeline is tested with ({', '.join(RELEASES)}): {_PIP}"

logger = logging.getLogger(__name__)


class Name(NamedTuple):
    """One name of upstream.

    Attributes:
        purpose: what this package uses it for.
        releases: the first and the last minor release that has it, of 0.16 to 0.19; 0.20 is upstream's main branch.
        required: whether ``check`` refuses a release without it, from the first to the last that has it.
    """

    purpose: str
    releases: str = "0.16-0.19"
    required: bool = True


NAMES: dict[str, dict[str, Name]] = {
    "megatron.core.tensor_parallel.random": {
        "_MODEL_PARALLEL_RNG_TRACKER_NAME": Name("seeding: the random stream of tensor-parallel ranks"),
        "get_data_parallel_rng_tracker_name": Name("seeding: the random stream of data-parallel ranks"),
        "get_expert_parallel_rng_tracker_name": Name("seeding: the random stream of experts"),
        "CudaRNGStatesTracker.fork": Name("CPU backend: one generator for all streams"),
        "_get_cuda_rng_state": Name("CPU backend: replaced"),
        "_set_cuda_rng_state": Name("CPU backend: replaced"),
    },
    "megatron.core.tensor_parallel.cross_entropy": {
        "vocab_parallel_cross_entropy": Name("wrapped: own loops that smooth labels"),
    },
    "megatron.core.tensor_parallel.layers": {
        "_initialize_affine_weight_cpu": Name("initial weights of the output layer on a CPU"),
        "LinearWithGradAccumulationAndAsyncCommunication.backward": Name("replaced by SplitLinear"),
        "linear_with_grad_accumulation_and_async_allreduce": Name("looks the replaced function up when called"),
        "ColumnParallelLinear": Name("gets the hook by which DDP learns of delayed gradients"),
        "RowParallelLinear": Name("gets the hook by which DDP learns of delayed gradients"),
    },
    "megatron.core.distributed.finalize_model_grads": {
        "_get_main_grad_attr": Name("the attribute that holds the gradient of a tied weight"),
        "finalize_model_grads": Name("wrapped: own loops under a V"),
    },
    "megatron.core.distributed.distributed_data_parallel": {
        "DistributedDataParallel.__init__": Name("buckets on every rank and chunk: wrapped"),
        "ProcessGroupCollection.setup_process_groups_for_ddp": Name("replaced while DDP is built"),
    },
    "megatron.core.rerun_state_machine": {
        "RerunStateMachine.validate_result": Name("reads whether losses and gradients are numbers: once per iteration"),
    },
    "megatron.core.dist_checkpointing.strategies.fully_parallel": {
        "FullyParallelSaveStrategyWrapper.apply_saving_parallelization": Name("two copies of a weight on a rank: wrapped"),
        "distribute_main_replicas_with_precomputed_distribution": Name("which copies a rank writes: wrapped"),
        "_sharded_tensor_shard_id": Name("which part of which weight a copy is"),
    },
    "megatron.core.models.gpt.gpt_layer_specs": {
        "get_gpt_decoder_block_spec": Name("the layers of a stage"),
        "get_gpt_decoder_layer_specs": Name("all layers of the model"),
    },
    "megatron.core.models.common.language_module.language_module": {
        "LanguageModule.__init__": Name("a model's configuration, before its layers: wrapped"),
        "LanguageModule.setup_embeddings_and_output_layer": Name("replaced while models are built"),
        "LanguageModule.shared_embedding_or_output_weight": Name("the tied weight of a stage"),
    },
    "megatron.core.transformer.moe.experts": {
        "GroupedMLP": Name("local grouped experts, removed in 0.17", "0.16-0.16"),
        "GroupedMLP.forward": Name("grouped experts whose backward splits: wrapped", "0.16-0.16"),
        "gg.ops": Name("the package grouped_gemm as this module sees it: replaced", "0.16-0.16"),
        "gg.assert_grouped_gemm_is_available": Name("replaced", "0.16-0.16"),
    },
    "megatron.core.transformer.moe.moe_utils": {
        "RouterGatingLinearFunction.forward": Name("reads te_general_gemm, which is defined with Transformer Engine only"),
        "get_moe_layer_wise_logging_tracker": Name("auxiliary losses that an earlier model left"),
        "get_moe_metrics_tracker": Name("the same, as an object", "0.18-0.19", required=False),
        "track_moe_metrics": Name("auxiliary losses of ranks without experts: wrapped up to 0.17"),
    },
    "megatron.core.transformer.moe.moe_logging": {
        "set_moe_metrics_tracker": Name("auxiliary losses that an earlier model left", "0.18-0.19", required=False),
        "MoEMetricsTracker": Name("auxiliary losses that an earlier model left", "0.18-0.19", required=False),
    },
    "megatron.core.transformer.moe.token_dispatcher": {"maybe_move_tensor_to_cpu": Name("CPU backend: replaced")},
    "megatron.core.transformer.multi_token_prediction": {
        "MTPLossLoggingHelper.tracker": Name("losses of multi-token prediction, for logs"),
        "HAVE_TE": Name("whether Transformer Engine is there"),
        "is_inference_column_parallel_linear": Name("replaced without Transformer Engine", "0.20-0.20", required=False),
    },
    "megatron.core.transformer.transformer_block": {
        "TransformerBlock.forward": Name("recomputation behind a frozen embedding: wrapped"),
        "TransformerBlock._get_layer": Name("uniform recomputation whose last unit is shorter: wrapped"),
    },
    "megatron.core.transformer.cuda_graphs": {
        "TECudaGraphHelper.create_cudagraphs": Name("CUDA graphs by slot: wrapped"),
        "TECudaGraphHelper._start_capturing": Name("CUDA graphs by slot: before all captures"),
        "TECudaGraphHelper._finish_capturing": Name("CUDA graphs by slot: behind all captures"),
        "TECudaGraphHelper._get_cuda_graph_input_data": Name("CUDA graphs by slot: the inputs of a capture"),
        "get_num_microbatches": Name("CUDA graphs by slot: replaced during captures"),
        "convert_schedule_table_to_order": Name("CUDA graphs by slot: replaced during captures"),
        "is_graph_capturing": Name("CUDA graphs by slot: linears leave nothing to W while they are captured"),
        "CudaGraphManager.__call__": Name("CUDA graphs by slot: wrapped"),
        "CudaGraphManager.get_cudagraph_runner": Name("CUDA graphs by slot: wrapped"),
        "_CudagraphGlobalRecord.cudagraph_created": Name("CUDA graphs by slot: whether managers have their graphs"),
        "_GraphStatus": Name("CUDA graphs by slot: runners of an iteration that was taken back"),
        "create_cudagraphs": Name("CUDA graphs by slot: captures what managers have recorded"),
        "alloc_tensor_from_graph_mempool": Name("CUDA graphs by slot: replaced during captures", "0.19-0.20"),
    },
    "megatron.core.transformer.pipeline_parallel_layer_layout": {
        "PipelineParallelLayerLayout.parse_str_to_list": Name("--pipeline-model-parallel-layout"),
        "PipelineParallelLayerLayout.validate_layer_layout": Name("--pipeline-model-parallel-layout"),
    },
    "megatron.core.pipeline_parallel.schedules": {
        "get_forward_backward_func": Name("looks the next three functions up when called"),
        "forward_backward_no_pipelining": Name("replaced by our schedule"),
        "forward_backward_pipelining_with_interleaving": Name("replaced by our schedule"),
        "forward_backward_pipelining_without_interleaving": Name("replaced by our schedule"),
        "forward_step": Name("F; measured under stock"),
        "forward_step_calc_loss": Name("the loss, where the vocabulary is sharded"),
        "backward_step": Name("B; measured under stock"),
        "set_current_microbatch": Name("wrapped: the chunk gets the number, too"),
        "get_tensor_shapes": Name("the shapes of messages"),
        "deallocate_output_tensor": Name("frees an output after it was sent"),
        "check_first_val_step": Name("whether FP8 weights are cached"),
        "get_model_type": Name("patches/schedules.py: older releases' backward_step asks for it"),
        "clear_embedding_activation_buffer": Name("deferred embedding gradients"),
        "finish_embedding_wgrad_compute": Name("deferred embedding gradients"),
    },
    "megatron.core.pipeline_parallel.utils": {
        "set_streams": Name("the streams of layer plans"),
        "is_vp_first_stage": Name("wrapped: own loops under a V"),
        "is_vp_last_stage": Name("wrapped: own loops under a V"),
        "is_pp_last_stage": Name("wrapped: own loops under a V"),
    },
    "megatron.core.parallel_state": {
        "is_pipeline_first_stage": Name("wrapped: own loops under a V"),
        "is_pipeline_last_stage": Name("wrapped: own loops under a V"),
    },
    "megatron.core.transformer.transformer_config": {"TransformerConfig.__post_init__": Name("wrapped: own loops under a V")},
    "megatron.core.models.gpt.gpt_model": {
        "GPTModel.build_schedule_plan": Name("a forward cut into parts of layers"),
        "GPTModel._preprocess": Name("seeding: comes first in a forward and in a plan"),
    },
    "megatron.core.models.hybrid.hybrid_model": {
        "HybridModel": Name("models whose layers are letters", "0.18-0.19"),
        "HybridModel.__init__": Name("the letters of a chunk: wrapped", "0.18-0.19"),
    },
    "megatron.core.models.hybrid.hybrid_block": {
        "HybridStack.forward": Name("recomputation behind a frozen embedding: wrapped", "0.18-0.19"),
    },
    "megatron.core.models.hybrid.hybrid_layer_allocation": {
        "select_pipeline_segment": Name("replaced while a model is built on a placement", "0.18-0.19"),
        "parse_hybrid_pattern": Name("the letters that a release knows", "0.18-0.19"),
    },
    "megatron.core.models.hybrid.hybrid_layer_specs": {
        "hybrid_stack_spec": Name("CPU backend: the modules of letters, imported late", "0.18-0.19"),
    },
    "megatron.core.transformer.transformer_layer": {
        "TransformerLayer._forward_attention": Name("seeding: comes first in a forward and in a plan"),
    },
    "megatron.core.process_groups_config": {
        "ProcessGroupCollection": Name("the groups of one iteration"),
        "MultiModuleProcessGroupCollection": Name("several modules in one pipeline: refused", "0.17-0.19", required=False),
    },
    "megatron.core.optimizer_param_scheduler": {"get_canonical_lr_for_logging": Name("the learning rate, for logs")},
    "megatron.core.optimizer.optimizer": {
        "MegatronOptimizer.get_grads_for_grad_norm": Name("post-validation: one part of a step", "0.19-0.19"),
        "MegatronOptimizer.get_grad_stats_parallel_group": Name("post-validation: the ranks that share a norm"),
        "MixedPrecisionOptimizer.step_with_ready_grads": Name("post-validation: one part of a step"),
        "Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads": Name("post-validation: one part of a step"),
        "Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling": Name("post-validation: one part of a step"),
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params": Name("post-validation: one part of a step"),
        "FP32Optimizer.prepare_grads": Name("post-validation: one part of a step"),
        "ChainedOptimizer.step_with_ready_grads": Name("post-validation: one part of a step"),
    },
    "megatron.core.optimizer.clip_grads": {
        "multi_tensor_applier": Name("post-validation: the gradient norm"),
        "l2_norm_impl": Name("post-validation: the gradient norm"),
        "clip_grad_by_total_norm_fp32": Name("post-validation: clipping"),
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "DistributedOptimizer.step_with_ready_grads": Name("gathers behind the step: wrapped"),
        "DistributedOptimizer._copy_main_params_to_model_params": Name("gathers behind the step: of each bucket"),
        "DistributedOptimizer.sharded_state_dict": Name("checkpoints of torch's optimizers: wrapped"),
        "DistributedOptimizer._set_main_param_and_optimizer_states": Name("checkpoints of torch's optimizers: wrapped"),
        "DistributedOptimizer.compute_full_param_layout": Name("buckets on every rank: wrapped", "0.18-0.19", required=False),
        "DistributedOptimizer.sharded_param_state_fully_reshardable": Name("checkpoints: wrapped"),
        "DistributedOptimizer.load_parameter_state_from_fully_reshardable": Name("checkpoints: wrapped"),
    },
    "megatron.core.optimizer.layer_wise_optimizer": {
        "LayerWiseDistributedOptimizer.compute_full_param_layout": Name("buckets: wrapped", "0.18-0.19", required=False),
    },
    "megatron.core.dist_checkpointing.strategies.filesystem_async": {
        "_get_write_results_queue": Name("the writers' process ends with its rank: replaced", "0.16-0.16"),
        "get_write_results_queue": Name("the same, from 0.17 on", "0.17-0.19", required=False),
    },
    "megatron.core.dist_checkpointing.serialization": {
        "save": Name("wrapped in own loops and Megatron-LM's: failures in one line"),
        "load": Name("wrapped in own loops and Megatron-LM's: failures in one line"),
    },
    "megatron.core.num_microbatches_calculator": {
        "StepBatchsizeNumMicroBatchesCalculator": Name("a growing batch size, as steps", "0.18-0.19", required=False),
    },
    "megatron.core.tokenizers": {"MegatronTokenizer": Name("tokenizers other than ByteLevelTokenizer", required=False)},
    "megatron.core.utils": {
        "get_batch_on_this_tp_rank": Name("wrapped: which part of a batch a rank needs", "0.18-0.19", required=False),
    },
    "megatron.core.datasets.utils": {"compile_helpers": Name("replaced where pip has compiled the helpers")},
    "megatron.training.arguments": {
        "add_megatron_arguments": Name("wrapped: adds our flags"),
        "core_transformer_config_from_args": Name("wrapped: the placement cuts the model"),
        "validate_args": Name("wrapped where initialize.py (to 0.17) or this module calls it: the placement decides chunks"),
    },
    "megatron.training.global_vars": {"set_global_variables": Name("wrapped where it is called: plans after it")},
    "megatron.training.models.dist_utils": {
        "unimodal_build_distributed_models": Name("wrapped, as get_model is: builds from a configuration", "0.18-0.19"),
    },
    "megatron.training.checkpointing": {
        "_load_base_checkpoint": Name("wrapped: what was read is compared with the placement"),
        "load_checkpoint": Name("wrapped: failures in one line"),
    },
    "megatron.training.training": {
        "pretrain": Name("wrapped: at its end another run may save"),
        "get_model": Name("wrapped: chunks where the placement has them"),
        "train": Name("wrapped: the watchdog, metrics and traces"),
        "train_step": Name("wrapped: times an iteration"),
        "save_checkpoint": Name("wrapped: one run saves into a directory"),
        "checkpoint_and_decide_exit": Name("wrapped: not with a step ahead"),
        "logical_and_across_model_parallel_group": Name("wrapped: with a step ahead every rank knows"),
        "reduce_max_stat_across_model_parallel_group": Name("wrapped: with a step ahead every rank knows"),
        "update_seqlen_stats_from_cu_seqlens": Name("CPU backend: its sums are set", "0.18-0.19"),
        "_TRAIN_START_TIME": Name("post-validation: --exit-duration-in-mins", required=False),
        "get_signal_handler": Name("post-validation: --exit-signal-handler", required=False),
        "get_args": Name("upstream's flags"),
        "Float16Module": Name("replaced while models are built"),
        "finalize_model_grads": Name("replaced: the first and the last stage may be on any rank"),
        "get_forward_backward_func": Name("fetches the schedule"),
    },
    "megatron.training.utils": {
        "get_batch_on_this_tp_rank": Name("wrapped: which part of a batch a rank needs", "0.16-0.17"),
        "is_first_or_last_pipeline_stage": Name("wrapped: which ranks read data"),
    },
    "megatron.legacy.fused_kernels": {"load": Name("CPU backend: replaced", "0.16-0.16")},
}


def refuse_older_releases() -> None:
    """Refuse a megatron-core older than the first supported release.

    Raises:
        RuntimeError: says what is installed, what is supported, and what to install.
    """
    if minor(version()) < minor(RELEASES[0]):
        supported = f"megatron.pipeline supports {RELEASES[0]} to {RELEASES[-1]}"
        raise RuntimeError(f"megatron-core {version()} is installed, and {supported}: {_PIP}")


def check(names: Mapping[str, Mapping[str, Name]] = NAMES) -> None:
    """Import the modules of megatron.core that are in the table, and check that the required names are there.

    On rank 0, log one warning if the release is not tested, and one if torch's is not.

    Raises:
        RuntimeError: megatron-core is missing, or names are: one message with all of them and what they are for.
    """
    installed, missing, checked = version(), [], 0
    for path, rows in names.items():
        required = {symbol: row.purpose for symbol, row in rows.items() if _required(row)}
        if not required or not path.startswith("megatron.core."):
            continue
        loaded = importlib.import_module(path)
        lacks = [symbol for symbol in required if not _has(loaded, symbol)]
        missing += [f"{path}.{symbol} ({required[symbol]})" for symbol in lacks]
        checked += len(required)
    if missing:
        raise RuntimeError(f"megatron-core {installed} lacks what megatron.pipeline relies on: {'; '.join(missing)}; {ADVICE}")
    if os.environ.get("RANK", "0") != "0":
        return
    if not is_tested(installed):
        _warn(
            f"megatron-core {installed}, but with the releases {', '.join(RELEASES)}; it goes on, because all {checked} names "
            "that it relies on are there"
        )
    if not TORCH[0] <= minor(torch.__version__) <= TORCH[1]:
        first, last = (".".join(map(str, release)) for release in TORCH)
        _warn(f"torch {torch.__version__}, but with {first} to {last}")


@functools.cache  # once, also where patches are installed again
def _warn(untested: str) -> None:
    logger.warning("WARNING: megatron.pipeline is not tested with %s", untested)


def get(path: str, symbol: str) -> Any:
    """A name of upstream that is in the table.

    Args:
        path: dotted name of the module.
        symbol: in it, with dots for attributes of classes.
    """
    assert symbol in NAMES[path], "every name that is no stable interface has a row"
    return attrgetter(symbol)(importlib.import_module(path))


def module(path: str) -> Any:
    """A module of upstream with names in the table, for a patch to replace them.

    Raises:
        RuntimeError: a required one of these names is missing.
    """
    loaded = importlib.import_module(path)
    for symbol, row in NAMES[path].items():
        if _required(row) and not _has(loaded, symbol):
            raise RuntimeError(f"megatron-core {version()} has no {path}.{symbol} ({row.purpose}); {ADVICE}")
    return loaded


def optional(path: str, symbol: str) -> Any | None:
    """A name of upstream that is in the table and that some releases lack; None where this one does."""
    return get(path, symbol) if _has(importlib.import_module(path), symbol) else None


def has_module(path: str) -> bool:
    """Tell whether this release has a module of the table."""
    assert path in NAMES, "every module that some releases lack has a row"
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # nor the package that it would be in
        return False


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method of a class, or a function in all loaded modules that have it, as ``from`` imports copy it.

    By one that calls ``replacement`` with the original and all arguments. What a module has replaced it does not replace again.
    """
    original = getattr(owner, name)
    if original.__module__ == replacement.__module__:
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return replacement(original, *args, **options)

    wrapped.__module__ = replacement.__module__
    # A copy of the table, which other threads' imports change; None stands for a module whose import is forbidden.
    loaded = [module for module in list(sys.modules.values()) if getattr(module, "__dict__", {}).get(name) is original]
    for place in (owner, *loaded):
        setattr(place, name, wrapped)


def is_tested(version: str) -> bool:
    """Tell whether a version of megatron-core is a tested release, of any commit. A release candidate is not."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+\w+)?", version)
    return release is not None and release[1] in RELEASES


@functools.cache
def version() -> str:
    """The version of megatron-core that is installed.

    Raises:
        RuntimeError: there is none.
    """
    try:
        import megatron.core
    except ImportError as error:
        raise RuntimeError(f"megatron-core cannot be imported ({error}): {_PIP}") from error
    return str(megatron.core.__version__)


def is_from(release: str) -> bool:
    """Tell whether the installed megatron-core is of a release such as ``0.17``, or of a later one."""
    return minor(version()) >= minor(release)


def has_patterns() -> bool:
    """Tell whether megatron-core has ``HybridModel``, whose layers are letters of a pattern; up to 0.17 it is another class."""
    return has_module("megatron.core.models.hybrid.hybrid_model")


def has_local_grouped_experts() -> bool:
    """Tell whether experts in one grouped product work without Transformer Engine; the class for it was removed in 0.17."""
    return optional("megatron.core.transformer.moe.experts", "GroupedMLP") is not None


def ramps_up_by_steps() -> bool:
    """Tell whether megatron-core takes a growing batch size as steps; from 0.18 on it ignores --rampup-batch-size."""
    return optional("megatron.core.num_microbatches_calculator", "StepBatchsizeNumMicroBatchesCalculator") is not None


def _required(row: Name) -> bool:
    """Tell whether the installed release must have a name; one that the newest tested release has, all later ones must have."""
    first, _, last = row.releases.partition("-")
    return row.required and minor(version()) >= minor(first) and (last == RELEASES[-1] or minor(version()) <= minor(last))


def _has(loaded: ModuleType, symbol: str) -> bool:
    try:
        attrgetter(symbol)(loaded)
    except AttributeError:
        return False
    return True
