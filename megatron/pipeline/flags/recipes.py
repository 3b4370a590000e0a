"""A training's flags from what others keep them in.

These are Megatron-LM's functional tests, a model's config.json of Hugging Face, and a shell script that starts a training.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping
from typing import Any

from megatron.pipeline.flags import upstream

TESTS = "MODEL_ARGS"  # of a file of the tests, which has more than flags, and some of them twice
_SET = re.compile(r"""^[ \t]*(?:export[ \t]+|local[ \t]+)?(\w+)=("[^"\n]*"|'[^'\n]*'|[^\s(#;]*)[ \t]*(?:[;#].*)?$""", re.M)
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")


def flags_in(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """The flags in a file's content, which is returned as it is where it has nothing but flags; raises as ``of_model``."""
    return of_model(content) if "model_type" in content else content.get(TESTS, content)


def of_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flags without dashes, with their values, of a model as a config.json describes it; no batch, and no parallel sizes.

    Raises:
        ValueError: the model is of a kind that ``huggingface.json`` does not have.
    """
    known = upstream.table("huggingface")
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


def of_script(text: str, parser: argparse.ArgumentParser) -> list[str]:
    """The flags in a shell script that a parser knows, with the values of variables that the script, or the environment, sets.

    Nothing is run: what a command would print, and arithmetic, are unknown. The last value counts, as in a command line.

    Raises:
        ValueError: a flag that this project reads has a value that is unknown; or quotes do not match.
    """
    text = text.replace("\\\n", " ")
    values: dict[str, str] = {}
    for name, value in _SET.findall(text):
        values[name] = _filled(value.strip("\"'"), values)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="()|&;<>")
    lexer.whitespace_split = True
    filled = (_filled(word, values) for word in lexer)
    words = [part for word in filled for part in (word.split() if word.startswith("--") else [word])]
    found: list[str] = []
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        action = parser._option_string_actions.get(name) if name.startswith("--") else None
        if action is None:
            continue
        number: Any = action.nargs  # which argparse's types take for a word
        most = {None: 1, "?": 1, "*": len(words), "+": len(words)}.get(number, number)
        given = [value] if value else []
        for other in words[index + 1 : index + 1 + int(most or 0) - len(given)]:
            if other.startswith("--") or re.fullmatch(r"[()|&;<>]+", other):
                break
            given += upstream.words(other) if action.nargs else [other]
        if any("$" in each or "`" in each for each in given) and action.type not in (None, str):
            raise ValueError(f"{name} {' '.join(given)}: not known without running the script: set it in the environment")
        found += [name, *given]
    return found


def _filled(word: str, values: Mapping[str, str]) -> str:
    def value(used: re.Match[str]) -> str:
        name = used[1] or used[2]
        return values.get(name) or os.environ.get(name) or used[3] or used[0]

    return _USED.sub(value, word)
