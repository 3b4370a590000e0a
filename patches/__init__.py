"""The upstream symbols that this package replaces, one file per upstream module. Nothing else touches megatron.core.

Every file names the symbols and the reason; ``upstream.require`` checks that they are there, and warns of versions that are not
tested. ``older_releases`` adds what older releases lack. ``install()`` applies all of them; it is safe to call more than once.
"""

from __future__ import annotations

from megatron.pipeline.patches.hooks import Hooks


def install() -> None:
    """Apply every patch. Call it first thing in a program, before a model is built or a process group exists.

    Raises:
        RuntimeError: megatron-core is missing, or has no symbol of a name that a patch relies on.
    """
    from megatron.pipeline.patches import older_releases, upstream

    with upstream.missing_names_explained():
        older_releases.install()  # the others are written for the newest release
        from megatron.pipeline.patches import (
            cpu,
            distrib_optimizer,
            filesystem_async,
            moe_experts,
            moe_utils,
            schedules,
            tensor_parallel_layers,
            transformer_block,
        )

        for patch in (
            cpu,
            tensor_parallel_layers,
            moe_experts,
            moe_utils,
            transformer_block,
            distrib_optimizer,
            filesystem_async,
            schedules,
        ):
            patch.install()


def install_training(hooks: Hooks) -> None:
    """Apply the patches of ``megatron.training``, after those of ``install``.

    Args:
        hooks: its methods are called in place of upstream's functions.

    Raises:
        RuntimeError: a symbol is unknown.
    """
    from megatron.pipeline.patches import (
        datasets_utils,
        training_arguments,
        training_cpu,
        training_initialize,
        training_training,
        training_utils,
    )

    datasets_utils.install()
    training_cpu.install()
    for patch in (training_arguments, training_utils, training_initialize, training_training):
        patch.install(hooks)
