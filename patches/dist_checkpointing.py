"""megatron.core.dist_checkpointing: how loops save and load checkpoints.

``save``, ``load``: a failure ends in an exception of torch's with a traceback for each rank, or with no reason on ranks other
than the first. Loops get one line instead. Programs that say it themselves do without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.pipeline.patches import compat


def install(save: Callable[..., Any], load: Callable[..., Any]) -> None:
    """Have both functions called with upstream's, wherever it was imported, and its arguments."""
    module = compat.module("megatron.core.dist_checkpointing.serialization")
    compat.wrap(module, "save", save)
    compat.wrap(module, "load", load)
