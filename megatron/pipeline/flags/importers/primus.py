"""A training's flags from an experiment of AMD's Primus: overrides of a file of its model, and of one of its trainer."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

import yaml

from megatron.pipeline.flags.flags import actions
from megatron.pipeline.flags.importers import renamed, upstream
from megatron.pipeline.planner import reading

_CONFIGS = Path("primus") / "configs"


def flags_of(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Flags without dashes that a parser knows, with their values; settings of Primus' own are left out, and those of the file
    named.

    Raises:
        ValueError: the file is not in Primus' repository, which has the others, or a file cannot be read.
    """
    trainer = next(iter((_read(path)["modules"] or {}).values()), None)
    if not (isinstance(trainer, dict) and {"framework", "config", "model"} <= trainer.keys()):
        raise ValueError(f"{path}: the first of modules needs framework, config and model, as an experiment of Primus has")
    folder = next((found for above in path.resolve().parents if (found := above / _CONFIGS).is_dir()), None)
    if folder is None:
        raise ValueError(f"its model {trainer['model']} is in {_CONFIGS} of Primus' repository: give the file where it is there")
    files = (folder / kind / trainer["framework"] / trainer[key] for kind, key in (("modules", "config"), ("models", "model")))
    settings = {name: value for file in files for name, value in _extended(file).items()} | (trainer.get("overrides") or {})
    if not any(settings.get(name) for name in ("recompute_num_layers", "recompute_layer_ids")):
        settings["recompute_method"] = None
        if settings.get("recompute_granularity") == "full":  # of no layers
            settings["recompute_granularity"] = None
    settings["is_hybrid_model"] = settings.get("model_type") == "mamba"
    if settings.get("use_turbo_deepep"):
        settings["moe_token_dispatcher_type"] = "flex"
    if settings.get("tokenizer_model"):
        settings["tokenizer_type"] = "HuggingFaceTokenizer"  # of which the size is all that is read
    known = {option[2:].replace("-", "_") for option in parser._option_string_actions}
    others = [name for name in trainer.get("overrides") or {} if settings[name] and name not in {*known, *actions()}]
    upstream.leave_out(parser, [f"--{name.replace('_', '-')}" for name in others])
    return renamed.flags_of(settings, {"names": {}}, parser._option_string_actions)


def _extended(file: Path, within: tuple[Path, ...] = ()) -> dict[str, Any]:
    if file.resolve() in within:
        raise ValueError(f"{file} extends itself")
    content = _read(file)
    below = [_extended(file.parent / name, (*within, file.resolve())) for name in content.pop("extends", None) or ()]
    return {name: value for one in (*below, content) for name, value in one.items()}


def _read(file: Path) -> dict[str, Any]:
    """A file whose values may be ``${VARIABLE:default}``."""
    text = reading.read_text(file, "YAML of Primus")
    return dict(yaml.safe_load(re.sub(r"\$\{(\w+):([^{}]*)\}", lambda used: os.environ.get(used[1], used[2]), text)) or {})
