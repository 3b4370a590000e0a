"""A training's flags from a model's config.json of Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.pipeline.flags.importers import upstream


def of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags without dashes, with their values, of a model as a config.json describes it; no batch, and no parallel sizes.

    Raises:
        ValueError: the model is of a kind that ``names.json`` does not have.
    """
    known = upstream.table("names")["huggingface"]
    kind = config["model_type"]
    if kind not in known["kinds"]:
        raise ValueError(f"model_type {kind}: known are {', '.join(known['kinds'])}: give the model's flags instead")
    flags = {flag: config[name] for name, flag in known["names"].items() if config.get(name) is not None}
    flags |= known["always"] | known["kinds"][kind]
    flags["untie-embeddings-and-output-weights"] = not config.get("tie_word_embeddings")
    if "num-experts" in flags:
        flags |= known["experts"]
        dense = config.get("first_k_dense_replace") or 0
        if dense:
            flags["moe-layer-freq"] = f"([0]*{dense}+[1]*{flags['num-layers'] - dense})"
        if shared := config.get("n_shared_experts"):
            flags["moe-shared-expert-intermediate-size"] = shared * flags["moe-ffn-hidden-size"]
    if config.get("attention_bias"):
        flags["add-qkv-bias"] = True
    return {flag: value for flag, value in flags.items() if value is not None}
