"""The upstream symbols that this package replaces, one file per upstream module. Nothing else touches megatron.core.

Every file names the symbols and the reason; ``loops`` has those that ask the loop which has called ``megatron.pipeline.install``.
``compat`` has the table of all upstream names that this package relies on.
The ``install`` of a file raises RuntimeError if one of its names is missing (``compat.module``).
``older_releases`` adds names that older releases lack. ``install()`` applies all patches; it is safe to call more than once.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["install"]

_CORE = (
    "cpu torch_gloo tensor_parallel_layers moe_experts moe_utils multi_token_prediction transformer_block hybrid_model "
    "rerun_state_machine distrib_optimizer distributed_data_parallel fully_parallel filesystem_async torch_checkpoint schedules "
    "cuda_graphs"
).split()
_TRAINING = (
    "training_arguments training_utils training_initialize training_models training_checkpointing training_training"
).split()


def install() -> None:
    """Apply every patch. Call it first thing in a program, before a model is built or a process group exists.

    Raises:
        RuntimeError: megatron-core is missing or too old, or lacks names that this package relies on.
    """
    from megatron.pipeline.patches import compat, older_releases

    compat.refuse_older_releases()
    try:
        older_releases.install()  # the others are written for the newest release
        compat.check()
        # Import all before the first is applied: ``cpu`` changes the modules of megatron.core that are loaded.
        for patch in [import_module(f"{__name__}.{name}") for name in _CORE]:
            patch.install()
    except ImportError as error:
        if "megatron." not in str(error):
            raise
        raise RuntimeError(f"megatron-core {compat.version()}: {error}; {compat.ADVICE}") from error


def install_loop(hooks: Any) -> None:
    """Prepare what any loop builds, and run its iterations, from here on.

    Args:
        hooks: ``session/own_loop.py`` ``OwnLoop``; None for loops under megatron-core's own schedules.

    Raises:
        RuntimeError: see ``install``, which comes first.
    """
    install()
    from megatron.pipeline.patches import cross_entropy, language_module, loops, schedules

    loops.install(hooks)
    cross_entropy.install_loop()
    language_module.install_loop()
    if hooks:
        schedules.use(hooks.forward_backward)
    else:
        schedules.restore()


def install_training(hooks: Any) -> None:
    """Apply the patches of ``megatron.training``, after those of ``install``.

    Args:
        hooks: ``launch/run.py`` ``Run``, whose methods are called in place of upstream's functions.

    Raises:
        RuntimeError: megatron.training lacks names that this package relies on.
    """
    from megatron.pipeline.patches import datasets_utils, training_cpu

    patches = [import_module(f"{__name__}.{name}") for name in _TRAINING]
    datasets_utils.install()
    training_cpu.install()
    for patch in patches:
        patch.install(hooks)
