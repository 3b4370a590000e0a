"""All flags of Megatron-LM's releases, for commands that predict: a training's line is taken as it is.

``upstream.json`` has the flags by release (``scripts/upstream_flags.py`` writes it), and ``effects.json`` what those mean that
this project has not: nothing for a prediction, the same as others, or more or less than is predicted.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
from argparse import Namespace
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from megatron.pipeline.flags.flags import actions
from megatron.pipeline.flags.settings import Flags
from megatron.pipeline.planner import hybrid

_MARK = "upstream:"  # before the names of such flags in a namespace
_LEFT_OUT = object()  # the value of a flag that no release has
_OFF = {"none", "None", "0", "False"}


def add_upstream(parser: argparse.ArgumentParser) -> None:
    """Add to a parser the flags, and to its own flags the names and values, that it lacks; their values are not checked."""
    known = parser._option_string_actions
    # A variable of a shell may stand there: no prediction depends on it.
    known["--seed"].type = lambda text: int(text) if text.isdecimal() else text
    for row in table("upstream"):
        own = next((known[name] for name in row["names"] if name in known), None)
        if own is not None:
            for name in row["names"]:
                known.setdefault(name, own)
            own.choices = own.choices and list(dict.fromkeys([*own.choices, *row.get("choices", ())]))
            continue
        takes: dict[str, Any] = {"action": "store_true"} if row.get("nargs") == 0 else {"nargs": row.get("nargs")}
        parser.add_argument(*row["names"], dest=_MARK + row["names"][0][2:], default=argparse.SUPPRESS, **takes)


def in_words(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """A command line whose lists, as ``"[a b]"`` or ``"a b"``, are words, where the flag before takes several."""
    found: list[str] = []
    several = False
    for token in argv:
        if token.startswith("--"):
            several = getattr(parser._option_string_actions.get(token), "nargs", None) not in (None, 0)
        found += words(token) if several else [token]
    return found


def words(text: str) -> list[str]:
    return re.sub(r"^\[(.*)\]$", r"\1", text.strip()).replace(",", " ").split() if re.match(r"\[|\S+\s", text) else [text]


def leave_out(parser: argparse.ArgumentParser, flags: Iterable[str]) -> None:
    """Name flags of a file that the parser does not know; ``settle`` says so."""
    parser.set_defaults(**{_MARK + flag[2:]: _LEFT_OUT for flag in flags})


def remark(parser: argparse.ArgumentParser, words: Iterable[str]) -> None:
    """Say something about what was read; ``settle`` does."""
    parser.set_defaults(remarks=[*(parser.get_default("remarks") or ()), *words])


def unknown(parser: argparse.ArgumentParser, name: str) -> str:
    """Words about a flag that no release has, with the nearest of those that one has."""
    meant = nearest(name, parser)
    end = f"; did you mean {meant}?" if meant else "; --help lists ours"
    return f"unknown flag {name}: no Megatron-LM from {_releases()} has it{end}"


def _releases() -> str:
    releases = sorted({row[end] for row in table("upstream") for end in ("since", "until")})
    return f"{releases[0]} to {releases[-1]}"


def nearest(name: str, parser: argparse.ArgumentParser) -> str | None:
    """The flag that is meant by a name, with dashes or without: by what people call it, or by its spelling."""
    known = {key(option): option for option in parser._option_string_actions}
    wanted = key(name.partition("=")[0])
    near = difflib.get_close_matches(wanted, known, n=1, cutoff=0.8)
    return table("names")["called"].get(wanted) or (known[near[0]] if near else None)


def called(word: str) -> str:
    """The flag, without dashes, that people call by a word; else the word."""
    return key(str(table("names")["called"].get(word, word)))


def key(name: str) -> str:
    """A flag's name as a command line has it, without its first dashes."""
    return name.lstrip("-").replace("_", "-")


def left(args: Namespace) -> list[str]:
    """The flags in a namespace that this project has not."""
    return [f"--{name.removeprefix(_MARK)}" for name in vars(args) if name.startswith(_MARK)]


def named(args: Flags) -> Flags:
    """The same with flags that this project has not by the names that Megatron-LM gives them, and with numbers as numbers."""
    others = {name for name in vars(args) if name.startswith(_MARK)}
    values = {name.removeprefix(_MARK).replace("-", "_"): _number(value) for name, value in vars(args).items() if name in others}
    return Flags(**values | {name: value for name, value in vars(args).items() if name not in others})


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def settle(args: Flags) -> tuple[Flags, list[str]]:
    """Read such flags as this project's own where they are alike.

    Returns:
        This project's flags alone; and the flags that were left out, and for every feature that matters and is not modelled, its
        flags, and how far off the prediction is.

    Raises:
        ValueError: a value is none of the flag that it is read as.
    """
    given = {name.removeprefix(_MARK): value for name, value in vars(args).items() if name.startswith(_MARK)}
    unknown = [f"--{name}" for name, value in given.items() if value is _LEFT_OUT]
    given = {name: value for name, value in given.items() if value is not _LEFT_OUT}
    remarks = getattr(args, "remarks", ())
    args = Flags(**{name: value for name, value in vars(args).items() if not name.startswith(_MARK) and name != "remarks"})
    for dest, action in actions().items():
        values = getattr(args, dest) if isinstance(getattr(args, dest), list) else [getattr(args, dest)]
        if action.choices and any(value is not None and value not in action.choices for value in values):
            given[f"{action.option_strings[0][2:]}={' '.join(map(str, values))}"] = True
    for name in ("pipeline_model_parallel_layout", "hybrid_layer_pattern"):  # which a shell would read otherwise
        args |= {name: getattr(args, name) and getattr(args, name).replace("\\", "")}
    # Upstream has these, and reads them for multi-latent attention alone.
    latent = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
    is_latent = args.multi_latent_attention or {hybrid.LATENT, hybrid.INDEXED}.intersection(args.hybrid_layer_pattern or "")
    args |= ({name: getattr(args, name) or usual for name, usual in latent.items()} if is_latent
             else dict.fromkeys((*latent, "q_lora_rank")))  # fmt: skip
    effects = table("effects")
    for name, value in given.items():
        alike: Any = next((row for pattern, row in effects["as"].items() if fnmatch(name, pattern)), {})
        new = alike if isinstance(alike, dict) else {alike: _typed(name, value, alike)}
        # A value of a flag of ours is replaced; another flag says nothing where that of ours is given.
        free = [dest for dest in new if "=" in name or getattr(args, dest) == actions()[dest].default]
        args |= {dest: new[dest] for dest in free}
    given |= {action.option_strings[0][2:]: getattr(args, dest) for dest, action in actions().items()
              if getattr(args, dest) != action.default}  # fmt: skip
    notes = [*remarks, *([f"left out, unknown to Megatron-LM {_releases()}: {', '.join(unknown)}"] if unknown else [])]
    for row in effects["differs"]:
        off = [*_OFF, *row.get("unless", ())]
        on = [name for name, value in given.items() if not any(fnmatch(str(value), pattern) for pattern in off)]
        if found := [f"--{name.replace('=', ' ')}" for name in on if any(fnmatch(name, pattern) for pattern in row["flags"])]:
            notes.append(f"{', '.join(found)}: {row['effect']}")
    return args, notes


def _typed(name: str, value: str, dest: str) -> Any:
    read = actions()[dest].type
    last = value.rpartition(":")[2]  # of --step-batch-size-schedule the largest batch
    try:
        return read(last) if callable(read) else last
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ValueError(f"--{name}: {error}") from None


@cache
def table(name: str) -> Any:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text(encoding="utf-8"))
