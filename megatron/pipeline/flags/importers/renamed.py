"""Settings of others by our names: one engine over the tables of ``names.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

from megatron.pipeline.flags.flag_types import positive_int, to_10_000
from megatron.pipeline.flags.flags import actions, as_flags
from megatron.pipeline.flags.importers import upstream
from megatron.pipeline.flags.settings import OURS


def flags_of(settings: Mapping[str, Any], kind: Mapping[str, Any], known: Collection[str] = ()) -> dict[str, Any]:
    """Flags without dashes, with their values, of those that ``values_of`` and ``upstream`` know."""
    values, others = values_of(settings, kind, known)
    return others | as_flags(values)


def values_of(
    settings: Mapping[str, Any], kind: Mapping[str, Any], known: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Values by the names of ``actions``, and those of upstream's flags; settings that are no flags are left out.

    Args:
        settings: by their paths, as ``model.num_layers``; of two for one flag the first counts.
        kind: a table of ``names.json``, or ``table`` of one. ``names`` has names of settings, or ends of their paths, with the
            names that flags have in ``actions``; ``means`` what values stand for, by patterns of ``NAME=VALUE``.
        known: further flags, of upstream.
    """
    theirs = {name: action for name, action in actions().items() if action.option_strings[0] not in OURS}
    options = {option[2:].replace("-", "_"): action for action in theirs.values() for option in action.option_strings}
    found: dict[str, Any] = {}
    others: dict[str, Any] = {}
    meant: dict[str, Any] = {}
    for path, value in settings.items():
        parts = path.split(".")
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        name = next((kind["names"][end] for end in ends if end in kind["names"]), parts[-1].replace("-", "_"))
        for pattern, flags in kind.get("means", {}).items():
            if fnmatchcase(f".{path}={value}", f"*.{pattern}"):
                meant = flags | meant
        if value in (None, []) or name is None:
            continue
        action = theirs.get(name) or options.get(name)
        if action is None:
            flag = name.replace("_", "-")
            if f"--{flag}" in known and f"--{flag}" not in OURS and value is not False:
                others.setdefault(flag, value)
        elif action.nargs == 0 and name not in theirs:  # as --disable-bias-linear, which clears what has another name
            found.setdefault(action.dest, action.const if value else action.default)
        elif action.type not in (positive_int, to_10_000) or value:  # a count of 0 is none
            found.setdefault(action.dest, int(value) if action.type is int and isinstance(value, float) else value)
    return found | meant, others


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Settings by their paths, of settings within settings."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def table(*path: str) -> Any:
    """A part of ``names.json``."""
    found = upstream.table("names")
    for name in path:
        found = found[name]
    return found
