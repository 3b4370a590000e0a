"""A training's flags from a recipe of Megatron-Bridge: a function without arguments that returns a container of settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

from megatron.pipeline.flags.importers import renamed

SCHEME = "bridge:"
_PACKAGES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")
# The first that has a setting counts: the first two are those that Bridge lets replace others.
_SECTIONS = ("mixed_precision", "comm_overlap", "model", "train", "ddp", "optimizer", "tokenizer")


def flags_of(name: str, known: Collection[str]) -> dict[str, Any]:
    """Flags without dashes, with their values, of a recipe.

    Args:
        name: of a function of Bridge's recipes, or ``MODULE:FUNCTION``.
        known: further flags, of upstream.

    Raises:
        ValueError: Bridge is not installed, or has no such recipe.
    """
    recipe = _named(name)()
    parts = {section: getattr(recipe, section, None) for section in _SECTIONS}
    found = {name: _precision(part) if isinstance(part, str) else part for name, part in parts.items() if part is not None}
    settings = {f"{section}.{name}": value for section, part in found.items() for name, value in vars(part).items()}
    return renamed.flags_of(settings, renamed.table("bridge"), known)


def _named(name: str) -> Callable[[], Any]:
    module, _, function = name.rpartition(":")
    tried = (module,) if module else _PACKAGES
    missing = ""
    for each in tried:
        try:
            found = next((one for one in _within(each, bool(module)) if callable(getattr(one, function, None))), None)
        except ImportError as error:
            missing = f" ({error})"
            continue
        if found:
            return getattr(found, function)  # type: ignore[no-any-return]
    raise ValueError(
        f"{' and '.join(tried)} {'has' if len(tried) == 1 else 'have'} no {function}{missing}: install "
        "megatron-bridge, and give the name of a recipe such as llama3_8b_pretrain_config, or MODULE:FUNCTION"
    )


def _within(name: str, alone: bool) -> Iterator[ModuleType]:
    """A module and, unless it is wanted alone, those within it: a release's package may be empty at the top."""
    package = import_module(name)
    yield package
    for each in () if alone else walk_packages(getattr(package, "__path__", ()), f"{name}.", onerror=lambda _: None):
        with suppress(ImportError):  # one that needs a package that is not here
            yield import_module(each.name)


def _precision(name: str) -> Any:
    return import_module("megatron.bridge.training.mixed_precision").get_mixed_precision_config(name)
