"""What every patch does before it touches an upstream module: check that it is the module it was written for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

KNOWN_VERSIONS = ("0.16.1",)


def require(module: str, symbols: Sequence[str]) -> ModuleType:
    """Import an upstream module and check its version and that the symbols a patch relies on are there.

    Args:
        module: dotted name of the upstream module.
        symbols: names in it, with dots for attributes (``"ColumnParallelLinear.forward"``).

    Raises:
        RuntimeError: the version is unknown, or a symbol is missing; says what to install or report.
    """
    import megatron.core

    version = megatron.core.__version__
    if version not in KNOWN_VERSIONS:
        known = ", ".join(KNOWN_VERSIONS)
        raise RuntimeError(
            f"megatron-core {version} is not known to megatron.pipeline (known: {known}); "
            f"install one of these, for example: pip install megatron-core=={KNOWN_VERSIONS[-1]}"
        )
    loaded = importlib.import_module(module)
    for symbol in symbols:
        target: object = loaded
        for name in symbol.split("."):
            if not hasattr(target, name):
                raise RuntimeError(f"{module} of megatron-core {version} has no {symbol}, which a patch relies on")
            target = getattr(target, name)
    return loaded
