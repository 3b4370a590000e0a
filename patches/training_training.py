"""megatron.training.training: where models are built and trained.

``get_model``: builds each rank's chunks where the placement has them. While it runs, ``Float16Module`` knows which chunk is the
last stage; after it, ``finalize_model_grads`` knows where the ends of the model are.
``train``, ``train_step``: the watchdog around the loop, and what is measured of an iteration.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap them.

    Raises:
        RuntimeError: a symbol is unknown.
    """
    training: Any = compat.module("megatron.training.training")
    get_model, train, train_step = training.get_model, training.train, training.train_step

    @functools.wraps(get_model)
    def built(provider: Any, *rest: Any, **options: Any) -> Any:
        return hooks.build(get_model, training, provider, *rest, **options)

    @functools.wraps(train)
    def trained(*rest: Any, **options: Any) -> Any:
        return hooks.train(train, *rest, **options)

    @functools.wraps(train_step)
    def stepped(*rest: Any, **options: Any) -> Any:
        return hooks.step(train_step, training, *rest, **options)

    for module in compat.importers(training, "get_model"):
        module.get_model = built  # type: ignore[attr-defined]
    training.train, training.train_step = trained, stepped
