"""megatron.training.checkpointing: how Megatron-LM's loop loads.

``_load_base_checkpoint``: what was read, before the model gets it. A chunk that is not in it upstream leaves as it was drawn.
``load_checkpoint``: failures in one line; those of ``save_checkpoint`` are ``training_training``'s.
"""

from __future__ import annotations

from typing import Any

from megatron.pipeline.patches import compat


def install(hooks: Any) -> None:
    checkpointing: Any = compat.module("megatron.training.checkpointing")

    def read(original: Any, *rest: Any, **options: Any) -> Any:
        found = original(*rest, **options)
        if not options.get("rank0"):  # what rank 0 has, for its flags
            hooks.check_read(*found)
        return found

    compat.wrap(checkpointing, "_load_base_checkpoint", read)
    compat.wrap(checkpointing, "load_checkpoint", hooks.load)
