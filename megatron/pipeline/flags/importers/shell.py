"""A training's flags from a shell script that starts it, which is read and not run."""

from __future__ import annotations

import argparse
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from megatron.pipeline.flags.flag_types import not_negative, positive_float
from megatron.pipeline.flags.importers import renamed, upstream
from megatron.pipeline.flags.importers.bash import Script, shown, unknown_in
from megatron.pipeline.flags.settings import Role

_SETTING = re.compile(r"\+*([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.S)  # of a program that hydra configures
ENDS = (".sh", ".bash", ".sbatch", ".slurm")


def of_script(
    text: str, path: Path, parser: argparse.ArgumentParser, given: Collection[str], values: Mapping[str, str]
) -> dict[str, Any]:
    """Flags of the command, of those that a script would run, that has most flags of a training; of a script without one those
    in its variables.

    The last value counts, as in a command line. ``--num_layers`` is ``--num-layers``, and a switch may have ``true`` or
    ``false``. Names and defaults of frameworks are those of ``names.json``. The other flags, but torchrun's, are
    ``upstream.leave_out``'s.

    Args:
        given: flags of the command line, whose values in the script are of no interest.
        values: of variables and, by their numbers, of parameters of the script's command line.

    Raises:
        ValueError: the script has no such flags, or flags that this project reads have values that are not known: all of them.
    """
    from torch.distributed.run import get_args_parser as torchrun  # a second, with torch: scripts alone need it

    script = Script(path, values)
    script.run(text)
    known = parser._option_string_actions
    stored = [word for value in script.values.values() for word in (value if isinstance(value, list) else [value])]
    first, *lines = ([part for word in words for part in _words(word)] for words in (stored, *reversed(script.commands)))
    line = max(lines, key=lambda words: _flags_among(words, known), default=[])
    line = line if _flags_among(line, known) else first
    kind: dict[str, Any] = next(
        (each for each in renamed.table("frameworks") if any(fnmatchcase(word, each["mark"]) for word in line)), {}
    )
    settings = {found[1]: found[2] for word in line if (found := _SETTING.fullmatch(word))}
    flags = _of_settings(settings, kind, known) if settings else _of_words(line, kind, known)
    if not flags or (script.lost and not {"num-layers", "model"} & {*flags, *(flag[2:] for flag in given)}):
        missing = "".join(f"; {name} is not there" for name in script.lost)
        raise ValueError(f"no flags of a training in it, nor in what it sources{missing}{_sets('; give {}', script.asked)}")
    words = [] if settings else [word for word in line if re.match("--[A-Za-z]", word)]
    others = {f"--{upstream.key(word.partition('=')[0])}": word for word in words}
    theirs = {f"--{name.replace('_', '-')}" for name in kind.get("names", ())}
    upstream.leave_out(parser, [name for name in others if name not in {*known, *theirs, *torchrun()._option_string_actions}])
    for name, value in kind.get("defaults", {}).items():
        if name not in flags and f"--{name}" not in given:
            flags[name] = value
            if type(value) is int:
                upstream.remark(parser, [f"--{name} {value}: {kind['name']}'s own, which leaves it to the data"])
    flags = {name: value for name, value in flags.items() if f"--{name}" not in given}
    unknown = {name: value for name, value in flags.items() if not _fits(value, known[f"--{name}"])}
    _ask(script, {name: f"{value}" for name, value in unknown.items() if not _is_aside(known[f"--{name}"])}, text, line)
    return {name: shown(value) if isinstance(value, str) else value for name, value in flags.items() if name not in unknown}


def _flags_among(words: Sequence[str], known: Collection[str]) -> int:
    """Number of words that are flags that are known, or settings for hydra."""
    names = (f"--{upstream.key(word.partition('=')[0])}" for word in words if word.startswith("--"))
    return sum(name in known for name in names) + sum(map(bool, map(_SETTING.fullmatch, words)))


def _of_words(words: Sequence[str], kind: Mapping[str, Any], known: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Flags without dashes, as ``--config`` reads them."""
    flags: dict[str, Any] = {}
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        name = upstream.key(name)
        name = kind.get("names", {}).get(name.replace("-", "_"), name) or ""
        action = known.get(f"--{name}")
        if not word.startswith("--") or action is None or action.dest == "help":
            continue
        behind = itertools.takewhile(lambda other: not re.match(r"--\D|[()|&;<>]+$", other), words[index + 1 :])
        own = [each.strip("'\"") for each in ([value] if value else behind)]
        if action.nargs == 0:
            flags[name] = not (own and own[0].lower() == "false")
        elif own or action.nargs in ("?", "*"):  # else part of a script that reads its own flags
            several = [part for each in own if own == [each] or not unknown_in(each) for part in upstream.words(each)]
            flags[name] = several if action.nargs not in (None, "?") else own[0]
    return flags


def _of_settings(settings: Mapping[str, str], kind: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The same of a program's settings by hydra."""
    own = {path: yaml.safe_load(value) for path, value in settings.items() if path.startswith(kind.get("under", ""))}
    flags = renamed.flags_of(own, kind or renamed.table("nested"), known)
    for flag, (how, parts) in kind.get("of_several", {}).items():
        numbers = [settings.get(path, str(usual)) for path, usual in parts.items()]
        numeric = all(map(str.isdecimal, numbers))
        flags[flag] = (sum if how == "sum" else math.prod)(map(int, numbers)) if numeric else "".join(numbers)
    return flags


def _ask(script: Script, unknown: Mapping[str, str], text: str, line: Sequence[str]) -> None:
    """Raise an error about all that a script's text leaves open, if flags depend on it: also by a branch that sets some."""
    unset = [name for word in line for name in unknown_in(word) if re.search(rf"\b{re.escape(name)}\+?=", text)]
    if not unknown and not (unset and any(name.isdigit() for name in script.asked)):
        return
    sets = _sets("{}, or ", [*script.asked, *(name for value in unknown.values() for name in unknown_in(value))])
    flags = ", ".join(f"--{name} {shown(value)}" for name, value in unknown.items()) or "some of its flags"
    raise ValueError(f"{flags}: not known without running the script: give {sets}these flags on the command line")


def _sets(form: str, names: Iterable[str]) -> str:
    """Words about the values that answer for parameters and variables; none where nothing of these is not known."""
    named = sorted(dict.fromkeys(names), key=lambda name: int(name) if name.isdigit() else math.inf)
    values = " ".join(f"{name}=.." for name in named if re.fullmatch(r"\w+", name))
    return form.format(f"--set {values} (parameters by number, variables by name)") if values else ""


def _fits(value: Any, action: argparse.Action) -> bool:
    """Tell whether a flag can have a value, of which something is unknown."""
    if action.dest == "model":
        value = value.rpartition("/")[2]  # its name, which may be known
    values = value if isinstance(value, list) else [value]
    if not any(unknown_in(each) for each in values if isinstance(each, str)):
        return True
    return action.type in (None, str) and not action.choices and action.dest not in ("model", "pipeline_model_parallel_layout")


def _is_aside(action: argparse.Action) -> bool:
    """Tell whether no prediction depends on a flag: on lengths, files, data and rates."""
    aside = (Role.LENGTH, Role.FILES, Role.DATA)
    return vars(action).get("role") in aside or action.type in (not_negative, positive_float) or action.dest == "seed"


def _words(word: str) -> list[str]:
    """The words of one that has flags: of a variable's value, or a whole command."""
    flags = re.match(r"\s*(?=--)|.*\.py\s", word, re.S)
    return word[flags.end() :].split() if flags and re.search(r"\s", word.strip()) else [word]
