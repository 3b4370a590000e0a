"""A training's flags from a shell script that starts it, which is read and not run."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron.pipeline.flags.importers import upstream
from megatron.pipeline.planner import reading

_SET = re.compile(r"""^[ \t]*(?:export[ \t]+|local[ \t]+)?(\w+)=("[^"\n]*"|'[^'\n]*'|[^\s(#;]*)[ \t]*(?:[;#].*)?$""", re.M)
_SUM = re.compile(r"(?!.*\*\*)[\d\s+*/%()-]+")
_USED = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^{}]*))?\})")


def of_script(text: str, folder: Path, parser: argparse.ArgumentParser, given: Collection[str]) -> list[str]:
    """The flags in a shell script that a parser knows, with the values of variables that the script, or the environment, sets.

    Nothing is run: what a command would print, or a loop would add, is unknown. The last value counts, as in a command line.
    Scripts that it sources are read too. ``--num_layers`` is ``--num-layers``, and a switch may have ``true`` or ``false``.
    The other flags, but torchrun's, are ``upstream.leave_out``'s.

    Args:
        folder: of the script.
        given: flags of the command line, whose values in the script are of no interest.

    Raises:
        ValueError: a flag that this project reads has a value that is unknown; or quotes do not match.
    """
    from torch.distributed.run import get_args_parser as torchrun  # a second, with torch: scripts alone need it

    values: dict[str, str] = {}
    lexer = shlex.shlex(_sourced(text, folder, values), posix=True, punctuation_chars="()|&;<>")
    lexer.whitespace_split = True
    words = [part for word in lexer for part in _words(_filled(word, values))]
    found: list[str] = []
    open_ = 0  # parentheses: of an array, while a pattern of case ends with one that was not opened
    for index, (word, behind) in enumerate(zip(words, [*words[1:], ""], strict=True)):
        open_ = max(0, open_ + word.count("(") - word.count(")"))
        name, _, value = word.partition("=")
        known = parser._option_string_actions
        name = name if name in known else name.replace("_", "-")
        action = known.get(name) if name.startswith("--") else None
        if action is None and re.fullmatch("--[A-Za-z][A-Za-z0-9-]*", name) and (open_ or behind[:1] not in (")", "|")):
            upstream.leave_out(parser, {name} - torchrun()._option_string_actions.keys())
        is_off = "false" in (value.lower(), behind.lower())
        if action is None or action.dest == "help" or name in given or (action.nargs == 0 and is_off):
            continue
        number: Any = action.nargs  # which argparse's types take for a word
        most = {None: 1, "?": 1, "*": len(words), "+": len(words)}.get(number, number)
        own = [value] if value and number != 0 else []
        for other in words[index + 1 : index + 1 + int(most or 0) - len(own)]:
            if other.startswith("--") or re.fullmatch(r"[()|&;<>]+", other):
                break
            own += upstream.words(other) if action.nargs else [other]
        if any(("$" in each or "`" in each) and not _fits(each, action) for each in own):
            raise ValueError(
                f"{name} {' '.join(own)}: not known without running the script: give {name} on the command line, or set the "
                "variable in the environment"
            )
        if own or action.nargs in (0, "?", "*"):  # else part of a script that reads its own flags
            found += [name, *own]
    return found


def _sourced(script: str, folder: Path, values: dict[str, str], within: tuple[Path, ...] = ()) -> str:
    """A script with those that it sources in their places, but those that it is ``within``; adds what variables are set to to
    ``values``."""
    parts = []
    for line in script.replace("\\\n", " ").splitlines(keepends=True):
        if source := re.match(r"""[ \t]*(?:source|\.)[ \t]+["']?([^"'\s;]+)""", line):
            # An unknown beginning is taken for the script's own folder.
            file = (folder / re.sub(r"^\$[^/]*/", "", _filled(source[1], values))).resolve()
            known = file.is_file() and file not in within
            text = reading.read_text(file, "a shell script") + "\n" if known else ""
            parts.append(_sourced(text, file.parent, values, (*within, file)))
        else:
            parts.append(_filled_sums(line, values))
            values.update((name, _filled(value.strip("\"'"), values)) for name, value in _SET.findall(parts[-1]))
    return "".join(parts)


def _filled_sums(line: str, values: Mapping[str, str]) -> str:
    """A line with the results of its arithmetic of whole numbers, as ``$((2 * NODES))``."""

    def result(used: re.Match[str]) -> str:
        text = re.sub(r"\b[A-Za-z_]\w*\b", lambda name: values.get(name[0], name[0]), _filled(used[1], values))
        try:
            return str(eval(text.replace("/", "//"), {"__builtins__": {}})) if _SUM.fullmatch(text) else used[0]
        except (SyntaxError, TypeError, ArithmeticError):
            return used[0]

    return re.sub(r"\$\(\((.+?)\)\)(?!\))", result, line)


def _fits(value: str, action: argparse.Action) -> bool:
    try:
        return not callable(action.type) or action.type(value) is not None
    except (argparse.ArgumentTypeError, ValueError):
        return False


def _words(word: str) -> list[str]:
    """The words of one that has flags: of a variable's value, or a whole command."""
    flags = re.match(r"(?:\w+\+?=)?\s*(?=--)|.*\.py\s", word, re.S)
    return word[flags.end() :].split() if flags else [word]


def _filled(word: str, values: Mapping[str, str]) -> str:
    def value(used: re.Match[str]) -> str:
        name = used[1] or used[2]
        return values.get(name) or os.environ.get(name) or used[3] or used[0]

    return _USED.sub(value, word)
