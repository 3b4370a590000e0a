"""A training's flags from a file of others: the door to the other readers."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.pipeline.flags.importers import huggingface, primus, renamed, upstream

TESTS, PRIMUS = "MODEL_ARGS", "\nmodules:"  # of files that have more than flags, and some of them twice


def flags_in(content: Mapping[str, Any], path: Path, parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    """The flags in a file's content, which is returned as it is where it has nothing but flags. What Megatron-LM's tests have
    beside them is ``upstream.leave_out``'s. Settings within settings are NeMo's, or of Megatron-LM's own YAML.

    Raises:
        ValueError: as ``huggingface.of_model`` and ``primus.flags_of``.
    """
    if "modules" in content:
        return primus.flags_of(path, parser)
    if "model_type" in content:
        flags, remarks = huggingface.of_model(content)
        upstream.remark(parser, remarks)
        return flags
    own = content.get(TESTS, content)
    if own is content and any(isinstance(value, dict) for value in own.values()):
        settings = renamed.flat(own)
        for name, value in settings.items():
            if used := re.fullmatch(r"\$\{([\w.]+)\}", str(value)):
                settings[name] = settings.get(used[1])
        known = {name: value for name, value in settings.items() if "${" not in str(value)}
        found = renamed.flags_of(known, renamed.table("nested"), parser._option_string_actions)
        return {"tokenizer-type": "HuggingFaceTokenizer"} | found
    if own is content or not isinstance(own, dict):
        return own
    flags = {name: f"--{str(name).lstrip('-').replace('_', '-')}" for name in own}
    unknown = {name: flag for name, flag in flags.items() if flag not in parser._option_string_actions}
    upstream.leave_out(parser, unknown.values())
    return {name: value for name, value in own.items() if name not in unknown}
