"""megatron.training, as ``mpipe launch`` runs it: each function calls a method of ``launch/run.py`` ``Run`` in its place.

``arguments``: ``add_megatron_arguments`` adds the schedules' flags, and ``--config FILE``; ``core_transformer_config_from_args``
cuts the model by the placement, which no flag of upstream's can express; ``validate_args`` does not see what a placement decides.
``global_vars.set_global_variables``: after it the size of the vocabulary is known, and everything is planned.
``training.get_model``, and ``models.dist_utils.unimodal_build_distributed_models`` from 0.18 on: build chunks where the placement
has them. Meanwhile the wrapper in low precision knows which chunk is the last stage; after it, ``finalize_model_grads``
knows where the ends of the model are.
``training.train``, ``train_step``: the watchdog around the loop, and what is measured of an iteration.
``training.checkpoint_and_decide_exit``, ``logical_and_across_model_parallel_group``,
``reduce_max_stat_across_model_parallel_group``: with ``--post-validation`` upstream's loop does not wait for other ranks.
``training.pretrain``, ``save_checkpoint``: no other run may save into the same directory.
``utils.is_first_or_last_pipeline_stage``: asks the placement which ranks read data. ``utils.get_batch_on_this_tp_rank``, which is
``megatron.core.utils``'s from 0.18 on: on a rank with both ends of the model, as on the first of a V, or with a shard of the
vocabulary, all of the batch is broadcast, not the part that the first stage uses.

Where no GPU is available (and only there) every module gets a view of ``torch`` whose ``cuda`` is the CPU (``cpu.py``),
and ``megatron.legacy.fused_kernels.load``, which looks for a CUDA compiler in releases before 0.17, does nothing.
"""

from __future__ import annotations

import importlib
import inspect
from argparse import ArgumentParser
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from megatron.pipeline.patches import compat, cpu
from megatron.pipeline.patches.upstream_args import written

_MODELS, _BUILD = "megatron.training.models.dist_utils", "unimodal_build_distributed_models"


def install(hooks: Any) -> None:
    """Apply all of it; ``on_cpu`` comes first."""
    training: Any = compat.module("megatron.training.training")
    importlib.import_module("megatron.training.initialize")  # which calls two of them, up to 0.17

    def add(original: Any, parser: ArgumentParser) -> ArgumentParser:
        hooks.add_flags(parser := original(parser))
        return parser

    def complete(original: Any, args: Any, *rest: Any, **options: Any) -> Any:
        result = original(args, *rest, **options)
        hooks.plan(args)
        return result

    def build(original: Any, provider: Any, *rest: Any, **options: Any) -> Any:
        def make(provide: Any, low_precision: Any) -> Any:
            if low_precision is None:
                return original(provide, *rest, **options)
            float16, training.Float16Module = training.Float16Module, low_precision
            try:
                with written(training.get_args(), delay_wgrad_compute=True):
                    return original(provide, *rest, **options)
            finally:
                training.Float16Module = float16

        return hooks.build(make, provider)

    def step(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.step(original, training, *rest, **options)

    def train(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.train(original, training, *rest, **options)

    def batch(original: Any, *given: Any, **options: Any) -> Any:
        if not hooks.shares_whole_batches:
            return original(*given, **options)
        signature = inspect.signature(original)
        if "mtp_on_this_rank" in signature.parameters:
            call = signature.bind(*given, **options)
            call.arguments["mtp_on_this_rank"] = True  # a rank for further tokens needs all of a batch, too
            return original(*call.args, **call.kwargs)
        with written(training.get_args(), pipeline_model_parallel_size=1):
            return original(*given, **options)

    for path, replacements in {
        "megatron.training.arguments": {
            "add_megatron_arguments": add,
            "core_transformer_config_from_args": hooks.configure,
            "validate_args": hooks.validate,
        },
        "megatron.training.global_vars": {"set_global_variables": complete},
        "megatron.training.training": {
            "pretrain": hooks.pretrain,
            "get_model": build,
            "train": train,
            "train_step": step,
            "save_checkpoint": hooks.save,
            "checkpoint_and_decide_exit": hooks.decide_exit,
            "logical_and_across_model_parallel_group": hooks.agreed,
            "reduce_max_stat_across_model_parallel_group": hooks.agreed,
        },
        "megatron.core.utils": {"get_batch_on_this_tp_rank": batch},
        "megatron.training.utils": {
            "get_batch_on_this_tp_rank": batch,
            "is_first_or_last_pipeline_stage": hooks.needs_data,
        },
    }.items():
        module = compat.module(path)
        for name, replacement in replacements.items():
            if hasattr(module, name):
                compat.wrap(module, name, replacement)
    if compat.has_module(_MODELS):
        _build_from_configurations(hooks)


def _build_from_configurations(hooks: Any) -> None:
    module = compat.module(_MODELS)
    importlib.import_module("megatron.training.models")  # its kinds of models import the function
    signature = inspect.signature(getattr(module, _BUILD))

    def build(original: Any, *given: Any, **options: Any) -> Any:
        call = signature.bind(*given, **options)

        def make(provide: Any, low_precision: Any) -> Any:
            call.arguments["build_model_func"] = provide
            if low_precision is not None:
                call.arguments["mixed_precision_wrapper"] = low_precision
                if (ddp := call.arguments.get("ddp_config")) is not None:
                    ddp.delay_wgrad_compute = True
            return original(*call.args, **call.kwargs)

        return hooks.build(make, call.arguments["build_model_func"])

    compat.wrap(module, _BUILD, build)


def on_cpu() -> None:
    """Redirect megatron.training to the CPU if there is no GPU; do nothing otherwise."""
    if torch.cuda.is_available():
        return
    view: Any = cpu.view_of_torch()
    view.cuda.is_available = lambda: True
    view.cuda.get_device_properties = lambda *_: SimpleNamespace(name="CPU", major=8, minor=0, total_memory=0)
    if compat.has_module(kernels := "megatron.legacy.fused_kernels"):
        compat.module(kernels).load = lambda _args: None
    importlib.import_module("megatron.training")
    if compat.has_module(_MODELS):
        importlib.import_module(_MODELS)  # else scripts import it later, without the view
    cpu.give_view(view, "megatron.training", "megatron.legacy")


def finalize_with(finalize: Callable[..., Any]) -> None:
    """Have the training loop finalize gradients by a function that knows where the ends of the model are."""
    compat.module("megatron.training.training").finalize_model_grads = finalize


def step_with(optimizer: Any, step: Callable[[], Any], scale: Any) -> None:
    """Have the training loop call a function in place of an optimizer's ``step``.

    Args:
        scale: a loss scale that never changes, on the CPU: the loop then reads it without waiting for the device. Or None.
    """
    optimizer.step = step
    if scale is not None:
        own = optimizer.get_loss_scale
        optimizer.scale_loss = lambda loss: own() * loss
        optimizer.get_loss_scale = lambda: scale


def is_told_to_stop(training: Any, args: Any) -> bool:
    """Tell whether this rank has got the signal on which upstream saves and exits."""
    return bool(getattr(args, "exit_signal_handler", False) and training.get_signal_handler()._signal_received)


def is_late(training: Any, args: Any, now: float) -> bool:
    """Tell whether the time is over after which upstream saves and exits."""
    minutes = getattr(args, "exit_duration_in_mins", None)
    return bool(minutes and now - training._TRAIN_START_TIME > 60 * minutes)
