"""megatron.training.initialize: where flags are validated and complete, before a process group exists.

``validate_args``: what a placement decides is kept from it.
``set_global_variables``: after it the size of the vocabulary is known, and everything is planned.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap both.

    Raises:
        RuntimeError: a symbol is unknown.
    """
    initialize = compat.module("megatron.training.initialize")
    validate, complete = initialize.validate_args, initialize.set_global_variables

    @functools.wraps(validate)
    def validated(args: Any, *rest: Any, **options: Any) -> Any:
        return hooks.validate(validate, args, *rest, **options)

    @functools.wraps(complete)
    def completed(args: Any, *rest: Any, **options: Any) -> Any:
        result = complete(args, *rest, **options)
        hooks.plan(args)
        return result

    initialize.validate_args = validated  # type: ignore[attr-defined]
    initialize.set_global_variables = completed  # type: ignore[attr-defined]
