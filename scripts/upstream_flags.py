"""The flags of Megatron-LM's releases, from its own parsers: ``megatron/pipeline/flags/importers/upstream.json``.

    python scripts/upstream_flags.py 0.16=CHECKOUT 0.17=CHECKOUT ...    a source tree of every release, the oldest first

Facts alone: a flag's names, how many values it takes, their type and choices, its default (the newest release's) if it is not
None or False, its name in a program if it is not that of the first name, its group, and the releases that have it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import typing
from importlib import import_module
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parents[1] / "megatron" / "pipeline" / "flags" / "importers" / "upstream.json"
_ALL = "--print"


def flags_here() -> list[dict[str, Any]]:
    """The flags of the Megatron-LM that this process imports, as rows without releases."""
    if not hasattr(typing, "override"):  # of Python 3.12, which releases from 0.18 on ask for
        vars(typing)["override"] = lambda function: function
    vars(import_module("megatron.core.extensions.kitchen"))["HAVE_KITCHEN"] = True  # its package need not be here
    parser = import_module("megatron.training.arguments").add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    parser = import_module("megatron.post_training.arguments").add_modelopt_args(parser)
    return [_row(action, str(group.title)) for group in parser._action_groups for action in group._group_actions]


def _row(action: argparse.Action, group: str) -> dict[str, Any]:
    row: dict[str, Any] = {"names": [name for name in action.option_strings if name.startswith("--")], "group": group}
    if action.nargs is not None:
        row["nargs"] = action.nargs
    if action.type in (int, float):
        row["type"] = action.type.__name__
    if action.choices is not None:
        row["choices"] = [getattr(choice, "name", choice) for choice in action.choices]
    default = getattr(action.default, "name", action.default)
    if default not in (None, False, argparse.SUPPRESS):
        row["default"] = default
    if action.dest != row["names"][0][2:].replace("-", "_"):
        row["dest"] = action.dest
    return row


def joined(releases: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Every flag once, as the newest release that has it says, with the first and the last of its releases."""
    found: dict[str, dict[str, Any]] = {}
    for release, rows in releases.items():
        for row in rows:
            before = next((found.pop(name) for name in row["names"] if name in found), row)
            names = list(dict.fromkeys([*row["names"], *before["names"]]))
            choices = {"choices": sorted({*before.get("choices", ()), *row["choices"]}, key=str)} if "choices" in row else {}
            found[names[0]] = row | choices | {"names": names, "since": before.get("since", release), "until": release}
    return sorted(found.values(), key=lambda row: row["names"][0])


def main() -> None:
    if sys.argv[1:] == [_ALL]:
        print(json.dumps(flags_here()))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", metavar="RELEASE=CHECKOUT")
    releases = {}
    for release, _, checkout in (given.partition("=") for given in parser.parse_args().checkouts):
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", __file__, _ALL],
            env=os.environ | {"PYTHONPATH": checkout},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        releases[release] = json.loads(ended.stdout.splitlines()[-1])
    rows = joined(releases)
    OUTPUT.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n", encoding="utf-8")
    print(f"{OUTPUT}: {len(rows)} flags")


if __name__ == "__main__":
    main()
