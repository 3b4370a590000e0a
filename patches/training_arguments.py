"""megatron.training.arguments: our flags, added to Megatron-LM's.

``add_megatron_arguments``: adds the flags of the schedules, and ``--config FILE``.
``core_transformer_config_from_args``: the model's configuration is cut by the placement, which no flag of upstream's can express.
"""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap both.

    Raises:
        RuntimeError: a symbol is unknown.
    """
    arguments = compat.module("megatron.training.arguments")
    add, configure = arguments.add_megatron_arguments, arguments.core_transformer_config_from_args

    @functools.wraps(add)
    def with_ours(parser: ArgumentParser) -> ArgumentParser:
        parser = add(parser)
        hooks.add_flags(parser)
        return parser

    arguments.add_megatron_arguments = with_ours  # type: ignore[attr-defined]

    @functools.wraps(configure)
    def cut(args: Any, *rest: Any, **options: Any) -> Any:
        return hooks.configure(configure, args, *rest, **options)

    for module in compat.importers(arguments, "core_transformer_config_from_args"):
        module.core_transformer_config_from_args = cut  # type: ignore[attr-defined]
