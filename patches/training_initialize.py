"""megatron.training.initialize: where flags are validated and complete, before a process group exists.

``validate_args``: what a placement decides is kept from it.
``set_global_variables``: after it the size of the vocabulary is known, and everything is planned.
"""

from __future__ import annotations

from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap both."""
    initialize = compat.module("megatron.training.initialize")

    def complete(original: Any, args: Any, *rest: Any, **options: Any) -> Any:
        result = original(args, *rest, **options)
        hooks.plan(args)
        return result

    compat.wrap([initialize], "validate_args", hooks.validate)
    compat.wrap([initialize], "set_global_variables", complete)
