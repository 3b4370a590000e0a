"""Megatron-LM's own scripts under our schedules: ``mpipe launch PATH/pretrain_gpt.py ...``, with nothing changed in the checkout.

At the top of any script of your own two lines do the same::

    from megatron.pipeline.launch import install

    install()

``install`` adds our flags to ``megatron.training``'s parser. What they ask for is planned and proved while flags are validated,
the model is cut by the placement as it is built, and the schedule runs where Megatron-LM calls its own: ``patches/training_*.py``
call the methods of ``run.py``.
"""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["install"]


def install() -> None:
    """Patch ``megatron.core`` and ``megatron.training``, before anything else of them is imported.

    Raises:
        RuntimeError: there is no ``megatron.training`` on Python's path, or it or ``megatron.core`` lacks what is relied on.
    """
    from megatron.pipeline import patches
    from megatron.pipeline.flags.packages import SCRIPTS
    from megatron.pipeline.launch.versions import check

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.core")  # of every optional package that is not there, on every rank
        versions = check()
        if versions.difference and os.environ.get("RANK", "0") == "0":
            print(f" WARNING: {versions.difference}", file=sys.stderr)
        patches.install()  # before what follows imports names that older releases lack
        from megatron.pipeline.launch.run import Run
        from megatron.pipeline.session import checkpoint_failures

        checkpoint_failures.install()
        try:
            patches.install_training(Run(versions))
        except ImportError as error:
            why = versions.difference or (
                f"install what Megatron-LM's scripts import (pip install {' '.join(SCRIPTS)}); it was found in "
                f"{versions.training_path}"
            )
            raise RuntimeError(f"megatron.training cannot be imported ({error}): {why}") from error
