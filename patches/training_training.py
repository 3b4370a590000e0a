"""megatron.training.training: where models are built and trained.

``get_model``: builds each rank's chunks where the placement has them. While it runs, ``Float16Module`` knows which chunk is the
last stage; after it, ``finalize_model_grads`` knows where the ends of the model are.
``train``, ``train_step``: the watchdog around the loop, and what is measured of an iteration.
"""

from __future__ import annotations

from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap them."""
    training: Any = compat.module("megatron.training.training")

    def build(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.build(original, training, *rest, **options)

    def step(original: Any, *rest: Any, **options: Any) -> Any:
        return hooks.step(original, training, *rest, **options)

    compat.wrap(compat.importers(training, "get_model"), "get_model", build)
    compat.wrap([training], "train", hooks.train)
    compat.wrap([training], "train_step", step)
