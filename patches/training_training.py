"""megatron.training.training: where models are built and trained.

``get_model``: builds each rank's chunks where the placement has them. While it runs, ``Float16Module`` knows which chunk is the
last stage; after it, ``finalize_model_grads`` knows where the ends of the model are.
``train``, ``train_step``: the watchdog around the loop, and what is measured of an iteration.
``checkpoint_and_decide_exit``, ``logical_and_across_model_parallel_group``, ``reduce_max_stat_across_model_parallel_group``: with
``--post-validation`` upstream's loop does not wait for other ranks.
``pretrain``, ``save_checkpoint``: no other run may save into the same directory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.pipeline.patches import compat


def install(hooks: Any) -> None:
    training: Any = compat.module("megatron.training.training")

    def build(original: Any, provider: Any, *rest: Any, **options: Any) -> Any:
        def make(provide: Any, low_precision: Any) -> Any:
            if low_precision is None:
                return original(provide, *rest, **options)
            float16, training.Float16Module = training.Float16Module, low_precision
            try:
                return original(provide, *rest, **options)
            finally:
                training.Float16Module = float16

        return hooks.build(make, provider)

    def step(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.step(original, training, *rest, **options)

    compat.wrap(training, "pretrain", hooks.pretrain)
    compat.wrap(training, "get_model", build)

    def train(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.train(original, training, *rest, **options)

    compat.wrap(training, "train", train)
    compat.wrap(training, "train_step", step)
    compat.wrap(training, "save_checkpoint", hooks.save)
    compat.wrap(training, "checkpoint_and_decide_exit", hooks.decide_exit)
    for name in ("logical_and_across_model_parallel_group", "reduce_max_stat_across_model_parallel_group"):
        compat.wrap(training, name, hooks.agreed)


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
