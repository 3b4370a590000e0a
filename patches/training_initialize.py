"""Point at which megatron.training's flags are validated and complete, before a process group exists.

Up to 0.17 ``initialize.py`` calls both functions, from 0.18 on ``arguments.py``: each is wrapped wherever it was imported.

``validate_args``: what a placement decides is kept from it.
``set_global_variables``: after it the size of the vocabulary is known, and everything is planned.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.pipeline.patches import compat


def install(hooks: Any) -> None:
    importlib.import_module("megatron.training.initialize")

    def complete(original: Any, args: Any, *rest: Any, **options: Any) -> Any:
        result = original(args, *rest, **options)
        hooks.plan(args)
        return result

    for path, name, replacement in (
        ("megatron.training.arguments", "validate_args", hooks.validate),
        ("megatron.training.global_vars", "set_global_variables", complete),
    ):
        compat.wrap(compat.module(path), name, replacement)
