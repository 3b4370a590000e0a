"""A model's flags from its config.json of Hugging Face."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.pipeline.flags.flag_types import MOST
from megatron.pipeline.flags.flags import as_flags
from megatron.pipeline.flags.importers import renamed, upstream
from megatron.pipeline.planner import reading

_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")  # within the configuration of a model of several kinds
_TUNED = r"(-(instruct|base|chat|it|pt|thinking|hf|fp8|bf16|v?0?\.\d|v\d\.\d|\d{4}))*"  # behind the name of what is as large


def lacking(path: str) -> list[str]:
    """Remark on what a model's name does not stand for; none of a file or a folder."""
    words = "a name stands for sizes: to train, give the config.json, which also has rotary bases, epsilons and routers' scales"
    return [] if os.path.exists(os.path.expanduser(path)) else [words]


def read(path: str) -> tuple[dict[str, Any], list[str]]:
    """Flags of the model in a file, a folder, Hugging Face's cache, or, by its name, in ``published.json``; and remarks.

    Raises:
        ValueError: there is no such model; otherwise as ``of_model``.
    """
    file = Path(os.path.expanduser(path))
    if file.is_dir() and not (file / "config.json").is_file():
        raise ValueError("a folder without a config.json: give that of a model of Hugging Face")
    if not file.exists():
        short = path.rstrip("/").rpartition("/")[2].lower()
        for name, config in upstream.table("published").items():
            if re.fullmatch(re.escape(name.rpartition("/")[2].lower()) + _TUNED, short.replace("-vl-", "-")):
                return of_model({"text_config": config} | config if "-vl-" in short else config)
        cache = (
            Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub" / f"models--{path.replace('/', '--')}"
        )
        if not (snapshots := sorted(cache.glob("snapshots/*/config.json"))):
            names = {name.rpartition("/")[2].lower(): name for name in upstream.table("published")}
            near = ", ".join(names[one] for one in difflib.get_close_matches(short, names)) or "such as Qwen/Qwen3-8B"
            raise ValueError(
                "no such file or folder: give the config.json of this model of Hugging Face. Known by name are "
                f"{near}, and {len(names)} in all"
            )
        file = snapshots[-1]
    file = file / "config.json" if file.is_dir() else file
    config = reading.parse_json(reading.read_text(file, "a config.json"), "a config.json")
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError("no config.json of a model of Hugging Face, which has a model_type")
    return of_model(config)


def of_model(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Flags without dashes, with their values, of a model as a config.json describes it, and remarks on what they leave out; no
    batch, and no parallel sizes.

    A kind that ``names.json`` does not have is read as Llama's.

    Raises:
        ValueError: fields are missing; says which.
    """
    known = renamed.table("huggingface")
    inner = next((config[part] for part in _TEXT if isinstance(config.get(part), dict)), None)
    remarks = ["the model of its text alone"] if inner else []
    own = {"model_type": config["model_type"]} | {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    own |= inner or config
    name = str(own["model_type"])
    kind = known["kinds"].get(name, {})
    own = {field: _one(value) for field, value in own.items()}
    settings = kind.get("defaults", {}) | {field: value for field, value in own.items() if value is not None}
    if missing := [field for field in _NEEDED if field not in settings]:
        settings = _of_class(name, own) | settings
        missing = [field for field in missing if settings.get(field) is None]
    if missing:
        which = "" if name in known["kinds"] else f"; known kinds are {', '.join(known['kinds'])}"
        raise ValueError(f"model_type {name}: its config.json is without {', '.join(missing)}, which a model of text has{which}")
    if name not in known["kinds"]:
        remarks.append(f"model_type {name} is not known here, and read as Llama's")
    remarks += [kind["note"]] if "note" in kind else []
    remarks += [f"{field} {settings[field]}" for field in ("rope_scaling",) if settings.get(field)]
    table = known | {"names": known["names"] | kind.get("names", {})}
    values = known["always"] | renamed.values_of(settings, table)[0]
    if values.get("num_experts"):
        try:
            values |= known["experts"] | _of_experts(settings, values)
        except (KeyError, TypeError) as error:
            raise ValueError(f"its experts' layers, or their sizes, are not whole numbers, or missing ({error})") from None
    if "window" in kind and settings.get("sliding_window"):
        values |= {"window_size": f"{settings['sliding_window']},0", "window_attn_skip_freq": kind["window"]}
    return as_flags(values | kind.get("is", {})), remarks


def _of_experts(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers that have experts, and the width of those that every token passes."""
    found: dict[str, Any] = {}
    layers, other = values["num_layers"], settings.get("mlp_only_layers") or ()
    if not isinstance(layers, int) or layers > MOST:
        return {}  # the flag is refused
    step, first, last = (
        next((settings[name] for name in names if settings.get(name)), usual)
        for names, usual in (
            (("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"), 1),
            (("first_k_dense_replace", "moe_layer_start_index"), 0),
            (("moe_layer_end_index",), layers),
        )
    )
    having = [
        int(first <= layer <= last % (layers + 1) and not (layer + 1) % step and layer not in other) for layer in range(layers)
    ]
    if not all(having) and "hybrid_layer_pattern" not in values:
        found["moe_layer_freq"] = "+".join(f"[{one}]*{len(list(group))}" for one, group in groupby(having))
    shared = next(
        (settings[name] for name in ("n_shared_experts", "moe_num_shared_experts", "num_shared_expert") if settings.get(name)), 0
    )
    if shared and "moe_shared_expert_intermediate_size" not in values:
        found["moe_shared_expert_intermediate_size"] = shared * values["moe_ffn_hidden_size"]
    return found


def _one(value: Any) -> Any:
    """The value of all layers, where each has the same."""
    return value[0] if isinstance(value, list) and value and all(each == value[0] for each in value) else value


def _of_class(kind: str, own: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that transformers' class for a kind of models has, where the package is installed; none otherwise."""
    try:
        from transformers import CONFIG_MAPPING

        return dict(CONFIG_MAPPING[kind](**{name: value for name, value in own.items() if name != "model_type"}).to_dict())
    except (ImportError, KeyError, TypeError, ValueError):
        return {}
