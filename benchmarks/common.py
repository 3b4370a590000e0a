"""What benchmarks share: command lines, processes of torchrun, rounds in which everything runs in turn, and tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is a benchmark's first lines as they are."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_flags(add: Callable[..., object], milliseconds: tuple[float, float, float] = (40, 40, 40), rounds: int = 5) -> None:
    """The flags of all benchmarks of sleeping stages."""
    add("--microbatches", type=int, default=8)
    add("--milliseconds", nargs=3, type=float, default=milliseconds, metavar=("F", "B", "W"))
    add("--rounds", type=int, default=rounds)


def torchrun(ranks: int, program: str, flags: str) -> None:
    """Run a program on ranks of this machine, and end with its last lines if it fails."""
    from megatron.pipeline.tune import trial

    command, environment = [*trial.torchrun(ranks), program, *flags.split()], {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{program} {flags} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def rehearsed(ranks: int, program: str, flags: str) -> dict[str, Any]:
    """What a training with ``--rehearse`` writes to rehearsal.json."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(ranks, program, f"{flags} --rehearse --rehearse-dir {folder}")
        found: dict[str, Any] = json.loads((Path(folder) / "rehearsal.json").read_text(encoding="utf-8"))
        return found


def in_rounds(runs: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int = 1) -> dict[Name, list[Result]]:
    """What each run returns in every round, in which all run in turn: whatever disturbs the machine disturbs all of them.

    Args:
        warm_up: rounds before those, which do not count: they connect ranks, and fill caches.
    """
    found: dict[Name, list[Result]] = {name: [] for name in runs}
    for turn in range(warm_up + rounds):
        for name, run in runs.items():
            result = run()
            if turn >= warm_up:
                found[name].append(result)
    return found


def save(path: str | None, title: str, seconds: Mapping[str, Sequence[float]]) -> None:
    """Append the seconds of every round to a file, as a line of JSON, which ``scripts/gpu.py`` reads; nothing without a path."""
    if path is not None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"title": title, "seconds": {name: list(rounds) for name, rounds in seconds.items()}}) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1, width: int = 130) -> None:
    """A table for the terminal: its first ``left`` columns are words, the others numbers."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=width).print(table)


def write_tables(page: Path, tables: Iterable[str]) -> None:
    """Replace the tables of a page that have the heads of these."""
    text = page.read_text(encoding="utf-8")
    for table in tables:
        text = re.sub(rf"^{re.escape(table.splitlines()[0])}\n(?:\|.*\n)+", table, text, flags=re.M)
    page.write_text(text, encoding="utf-8")


def markdown(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown, with a line break at its end; all but the first column are numbers."""
    head = f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}\n"
    return head + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
