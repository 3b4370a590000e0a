"""megatron.training.arguments: our flags, added to Megatron-LM's.

``add_megatron_arguments``: adds the flags of the schedules, and ``--config FILE``.
``core_transformer_config_from_args``: the model's configuration is cut by the placement, which no flag of upstream's can express.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megatron.pipeline.patches import compat


def install(hooks: Any) -> None:
    arguments = compat.module("megatron.training.arguments")

    def add(original: Any, parser: ArgumentParser) -> ArgumentParser:
        hooks.add_flags(parser := original(parser))
        return parser

    compat.wrap(arguments, "add_megatron_arguments", add)
    compat.wrap(arguments, "core_transformer_config_from_args", hooks.configure)
