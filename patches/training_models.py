"""megatron.training.models.dist_utils: where 0.18 and later build a model from its configuration, and not from a function.

``unimodal_build_distributed_models``: builds each rank's chunks where the placement has them, as ``get_model`` does
(``training_training.py``).
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from megatron.pipeline.patches import compat


def install(hooks: Any) -> None:
    path, name = "megatron.training.models.dist_utils", "unimodal_build_distributed_models"
    if not compat.has_module(path):
        return
    module = compat.module(path)
    importlib.import_module("megatron.training.models")  # its kinds of models import the function
    signature = inspect.signature(getattr(module, name))

    def build(original: Any, *given: Any, **options: Any) -> Any:
        call = signature.bind(*given, **options)

        def make(provide: Any, low_precision: Any) -> Any:
            call.arguments["build_model_func"] = provide
            if low_precision is not None:
                call.arguments["mixed_precision_wrapper"] = low_precision
            return original(*call.args, **call.kwargs)

        return hooks.build(make, call.arguments["build_model_func"])

    compat.wrap(module, name, build)
