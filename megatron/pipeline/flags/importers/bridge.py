"""A training's flags from a recipe of Megatron-Bridge: a function without arguments that returns a container of settings."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from megatron.pipeline.flags.flags import actions, as_flags
from megatron.pipeline.flags.importers import upstream

SCHEME = "bridge:"
_PACKAGES = ("megatron.bridge.recipes", "megatron.bridge.perf_recipes")
# The first that has a setting counts: the first two are those that Bridge lets replace others.
_SECTIONS = ("mixed_precision", "comm_overlap", "model", "train", "ddp", "optimizer")


def flags_of(name: str) -> dict[str, Any]:
    """Flags without dashes, with their values, of a recipe.

    Args:
        name: of a function of Bridge's recipes, or ``MODULE:FUNCTION``.

    Raises:
        ValueError: Bridge is not installed, or has no such recipe.
    """
    recipe = _named(name)()
    names = upstream.table("names")["bridge"]
    parts = (getattr(recipe, section, None) for section in _SECTIONS)
    sections = [_precision(part) if isinstance(part, str) else part for part in parts if part is not None]

    def setting(name: str) -> Any:
        found = (getattr(part, one, None) for part in sections for one in (names.get(name, name), name))
        return next((value for value in found if value is not None), None)

    vocabulary = setting("vocab_size") or getattr(getattr(recipe, "tokenizer", None), "vocab_size", None)
    values = {name: setting(name) for name in actions()} | {
        "group_query_attention": bool(setting("num_query_groups")),
        "untie_embeddings_and_output_weights": setting("share_embeddings_and_output_weights") is False,
        "grad_reduce_in_bf16": setting("grad_reduce_in_fp32") is False,
        "hybrid_layer_pattern": setting("hybrid_layer_pattern") or setting("hybrid_override_pattern"),
        "squared_relu": getattr(setting("activation_func"), "__name__", "") == "squared_relu",
        "mtp_num_layers": setting("mtp_num_layers") or None,
        "vocab_size": vocabulary,
        "tokenizer_type": "HuggingFaceTokenizer" if vocabulary else None,  # of which the size is all that is read
    }
    return as_flags(values)


def _named(name: str) -> Callable[[], Any]:
    module, _, function = name.rpartition(":")
    tried = (module,) if module else _PACKAGES
    missing = ""
    for each in tried:
        try:
            found = getattr(import_module(each), function, None)
        except ImportError as error:
            missing = f" ({error})"
            continue
        if callable(found):
            return found
    raise ValueError(
        f"{' and '.join(tried)} {'has' if len(tried) == 1 else 'have'} no {function}{missing}: install "
        "megatron-bridge, and give the name of a recipe such as llama3_8b_pretrain_config, or MODULE:FUNCTION"
    )


def _precision(name: str) -> Any:
    return import_module("megatron.bridge.training.mixed_precision").get_mixed_precision_config(name)
