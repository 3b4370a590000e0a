"""megatron.training.training: where models are built and trained.

``get_model``: builds each rank's chunks where the placement has them. While it runs, ``Float16Module`` knows which chunk is the
last stage; after it, ``finalize_model_grads`` knows where the ends of the model are.
``train``, ``train_step``: the watchdog around the loop, and what is measured of an iteration.
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
            args, float16 = training.get_args(), training.Float16Module
            args.delay_wgrad_compute = True  # upstream's function copies it into the configuration of DDP
            training.Float16Module = low_precision
            try:
                return original(provide, *rest, **options)
            finally:
                args.delay_wgrad_compute = False
                training.Float16Module = float16

        return hooks.build(make, provider)

    def step(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.step(original, training, *rest, **options)

    compat.wrap(training, "pretrain", hooks.pretrain)
    compat.wrap(training, "get_model", build)
    compat.wrap(training, "train", hooks.train)
    compat.wrap(training, "train_step", step)
    compat.wrap(training, "save_checkpoint", hooks.save)


def finalize_with(finalize: Callable[..., Any]) -> None:
    """Have the training loop finalize gradients by a function that knows where the ends of the model are."""
    compat.module("megatron.training.training").finalize_model_grads = finalize
