"""What every patch does before it touches an upstream module: check that it is the module it was written for."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

RELEASES = ("0.14", "0.15", "0.16")  # that scripts/check_core_versions.py trains with

_TESTED = (
    f"install a release that megatron.pipeline is tested with ({', '.join(RELEASES)}): "
    f"pip install 'megatron-core~={RELEASES[-1]}.0'"
)

logger = logging.getLogger(__name__)


def require(module: str, symbols: Sequence[str]) -> ModuleType:
    """Import an upstream module and check that the symbols a patch relies on are there.

    Of a version that is not tested, rank 0 logs a warning with what was checked.

    Args:
        module: dotted name of the upstream module.
        symbols: names in it, with dots for attributes (``"ColumnParallelLinear.forward"``).

    Raises:
        RuntimeError: megatron-core is missing, or one of the symbols; says what to install.
    """
    version = _version()
    loaded = importlib.import_module(module)
    for symbol in symbols:
        target: object = loaded
        for name in symbol.split("."):
            if not hasattr(target, name):
                raise RuntimeError(f"{module} of megatron-core {version} has no {symbol}, which a patch relies on; {_TESTED}")
            target = getattr(target, name)
    if not is_tested(version) and _speaks():
        logger.warning("  %s has %s", module, ", ".join(symbols) or "nothing that is relied on")
    return loaded


def importers(module: ModuleType, name: str) -> list[ModuleType]:
    """The upstream modules, this one included, that have its ``name``: ``from`` imports make copies of what is to be replaced."""
    original = getattr(module, name)
    loaded = [found for key, found in sys.modules.items() if key.startswith("megatron.")]
    return [found for found in loaded if vars(found).get(name) is original]


@contextmanager
def missing_names_explained() -> Iterator[None]:
    """What is imported within and is not there is told as what it is: a release that this package is not made for.

    Raises:
        RuntimeError: says what to install.
    """
    try:
        yield
    except ImportError as error:
        if "megatron." not in str(error):
            raise
        raise RuntimeError(f"megatron-core {_version()}: {error}; {_TESTED}") from error


def is_tested(version: str) -> bool:
    """Whether a version of megatron-core is a release of those that tests train with; a release candidate is not."""
    release = re.fullmatch(r"(\d+\.\d+)\.\d+", version)
    return release is not None and release[1] in RELEASES


@functools.cache
def _version() -> str:
    """The version that is installed; the first who asks hears whether it is tested."""
    try:
        import megatron.core
    except ImportError as error:
        raise RuntimeError(
            f"megatron-core cannot be imported ({error}): pip install 'megatron-core~={RELEASES[-1]}.0'"
        ) from error
    version = str(megatron.core.__version__)
    if not is_tested(version) and _speaks():
        logger.warning(
            "WARNING: megatron.pipeline is not tested with megatron-core %s, but with the releases %s; "
            "it goes on, as long as upstream's modules have the symbols that its patches rely on:",
            version,
            ", ".join(RELEASES),
        )
    return version


def _speaks() -> bool:
    return os.environ.get("RANK", "0") == "0"
