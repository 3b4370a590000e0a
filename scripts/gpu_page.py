"""The tables of docs/gpu.md between its markers: what ``make gpu`` writes after each step, and reads again where it goes on."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

BEGIN, END = "<!-- written by make gpu: begin -->", "<!-- written by make gpu: end -->"


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    RAN_OUT = "ran out of time"
    SKIPPED = "skipped"
    NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Measured:
    """The seconds of the rounds of one way of a benchmark."""

    title: str
    name: str
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    name: str
    outcome: Outcome
    seconds: float = 0.0
    found: str = ""
    measured: tuple[Measured, ...] = ()


def report(old: str, about: Mapping[str, str], rows: Sequence[Row], order: Sequence[str]) -> str:
    """What the page has between its markers: every run that a step's row is of, the steps, and the tables of benchmarks.

    Args:
        old: what it had. A step that has not run now, or that no time was left for, keeps what there is of it.
        about: the machine of this run.
        order: names of all steps; what is there of others goes.
    """
    tables, *sections = old.split("\n### ")
    lines = {_cells(line)[0]: line for line in tables.splitlines() if line.startswith("| ")}
    details = dict(section.split("\n", maxsplit=1) for section in sections)
    runs = {int(key): line for key, line in lines.items() if key.isdigit()}
    number = 1 + max(runs, default=0)
    runs[number] = _line(str(number), *about.values())
    for row in rows:
        if row.outcome is not Outcome.NOT_REACHED or row.name not in lines:
            lines[row.name] = _line(row.name, str(number), row.outcome, f"{row.seconds:.0f} s", row.found)
            details[row.name] = "\n".join(_details(row.measured))
    steps = [lines[name] for name in order if name in lines]
    used = {int(_cells(line)[1]) for line in steps}
    text = [_line("run", *about), "|---" * (1 + len(about)) + "|", *(line for key, line in runs.items() if key in used)]
    text += ["", "| step | run | outcome | took | found |", "|---|---|---|---:|---|", *steps]
    for name in order:
        if details.get(name, "").strip():
            text += ["", f"### {name}", "", details[name].strip()]
    return "\n".join(text)


def _details(measured: Sequence[Measured]) -> Iterable[str]:
    """Tables of medians and spread."""
    for title in dict.fromkeys(one.title for one in measured):
        yield from ("", f"{title}:", "", "| | median | middle half of the rounds | rounds |", "|---|---:|---:|---:|")
        for one in (one for one in measured if one.title == title):
            low, middle, high = (1000 * each for each in _quartiles(one.rounds))
            yield _line(one.name, f"{middle:.3f} ms", f"{low:.3f} to {high:.3f} ms", str(len(one.rounds)))


def _quartiles(rounds: Sequence[float]) -> tuple[float, float, float]:
    if len(rounds) == 1:
        return rounds[0], rounds[0], rounds[0]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, middle, high


def _line(*cells: str) -> str:
    """Of a table in Markdown."""
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def parts_of(page: Path) -> tuple[str, str, str]:
    """A page before its markers, between them, and behind them.

    Raises:
        ValueError: the page does not have both markers, once each.
    """
    whole = page.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise ValueError(f"{page} does not have the lines {BEGIN} and {END}, once each")
    before, rest = whole.split(BEGIN)
    between, behind = rest.split(END)
    return before, between.strip("\n"), behind


def write(page: Path, text: str) -> None:
    """Put a text between the markers of a page; see ``parts_of`` for errors."""
    before, _, behind = parts_of(page)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{behind}", encoding="utf-8")
