"""megatron.training.arguments: our flags, added to Megatron-LM's.

``add_megatron_arguments``: adds the flags of the schedules, and ``--config FILE``.
``core_transformer_config_from_args``: the model's configuration is cut by the placement, which no flag of upstream's can express.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megatron.pipeline.patches import compat
from megatron.pipeline.patches.hooks import Hooks


def install(hooks: Hooks) -> None:
    """Wrap both."""
    arguments = compat.module("megatron.training.arguments")

    def add(original: Any, parser: ArgumentParser) -> ArgumentParser:
        hooks.add_flags(parser := original(parser))
        return parser

    compat.wrap([arguments], "add_megatron_arguments", add)
    name = "core_transformer_config_from_args"
    compat.wrap(compat.importers(arguments, name), name, hooks.configure)
