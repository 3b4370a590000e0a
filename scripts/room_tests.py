"""Run the tests of a room: what to run after a change there, before ``make test``.

    python scripts/room_tests.py ROOM [--list] [options of pytest]      or      make test-room ROOM=planner

A room is a package of megatron.pipeline, such as ``runtime`` or ``planner.view``. Its tests are the files in its own folder of
``tests/``, and those that import it, themselves or through the tests' own modules. Of those that import higher rooms as well, the
ones that start ranks are left out, and so are the searches of ``tune``: they are for these rooms.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGE = "megatron.pipeline."
RANKS = {"pool", "launch.launched"}  # the tests' modules that start them
OWN = {"tune"}  # rooms whose tests are for them alone


def imports(path: Path) -> set[str]:
    """Names of modules, and of what is taken from them, that a file imports; those of the tests' own modules too."""
    found, left = set[str](), [path]
    while left:
        new = _named(left.pop()) - found
        found |= new
        left += [file for name in new - RANKS if (file := TESTS / f"{name.replace('.', '/')}.py").is_file()]
    return found


@cache
def _named(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def layers() -> list[str]:
    """The rooms, highest first, as pyproject.toml has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    [rows] = (contract["layers"] for contract in contracts if contract["id"] == "rooms")
    return [room.strip() for row in rows for room in row.split("|")]


def tests_of(room: str) -> list[Path]:
    """The files with tests of a room."""
    whole, folder = PACKAGE + room, TESTS / room.rpartition(".")[2]
    above = set(layers()[: layers().index(room.partition(".")[0])])
    found = []
    for path in sorted(TESTS.rglob("test_*.py")):
        names = imports(path)
        higher = {name.split(".")[2] for name in names if name.startswith(PACKAGE)} & above
        imported = any(f"{name}.".startswith(f"{whole}.") for name in names)
        if path.is_relative_to(folder) or (imported and not (higher and (RANKS & names or OWN & higher))):
            found.append(path)
    return found


def main() -> int:
    """Returns the exit status of pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("room", metavar="ROOM", help=f"{', '.join(layers())}, or a package in one")
    parser.add_argument("--list", action="store_true", help="print the files, and run none")
    own, options = parser.parse_known_args()
    if own.room.partition(".")[0] not in layers():
        parser.error(f"{own.room} is no room; rooms are {', '.join(layers())}")
    files = [str(path.relative_to(ROOT)) for path in tests_of(own.room)]
    if own.list:
        print("\n".join(files))
        return 0
    marks = () if "-m" in options else ("-m", "not whole and not rest")
    command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "worksteal", *marks, *options, *files]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
