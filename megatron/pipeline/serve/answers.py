"""What one query of the page is answered with: it becomes the flags of ``mpipe``, and the command's own code does the rest.

So a schedule on the page is the one that ``mpipe plan`` makes, a download is what ``mpipe draw`` or ``mpipe export`` writes, and
bad parameters are refused in the same words.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from megatron.pipeline import cli
from megatron.pipeline.cli import plan
from megatron.pipeline.view.page import Entry, encoded

Query: TypeAlias = tuple[tuple[str, str], ...]  # names and values, in the order given

# What a page may ask of mpipe plan: all but the flags that read and write files, and --exact, which takes minutes.
FLAGS = (
    *("schedule", "pp", "microbatches", "chunks", "splits", "group", "cost", "activation", "first-stage", "last-stage"),
    *("vocab-cost", "vocab-parallel", "copy", "offload", "host-memory-limit", "memory-limit", "objective", "jitter"),
    *("recompute", "fuse"),
)
# The commands that write a plan in another format, and the type of what they write; a plan is JSON already.
DOWNLOADS = {
    "json": ((), "application/json"),
    "csv": (("export",), "text/csv; charset=utf-8"),
    "svg": (("draw", "--memory"), "image/svg+xml"),
}

LONG = 1 << 14  # microbatches of all ranks from which on a search may take many seconds


class Answer(NamedTuple):
    """A status of HTTP, 200 or 400, and what was made, or JSON with the message that says what is wrong."""

    status: int
    body: bytes
    type: str = "application/json"


def flags(query: Iterable[tuple[str, str]]) -> list[str]:
    """The flags of ``mpipe plan`` that a query stands for; an empty value is a flag left out.

    Raises:
        ValueError: it has a name that is not one of ``FLAGS``.
    """
    given = [(name, value) for name, value in query if value]
    for name, _ in given:
        if name not in FLAGS:
            raise ValueError(f"unknown parameter {name!r}; allowed are {', '.join(FLAGS)}")
    return [f"--{name}={value}" for name, value in given]


def may_take_long(query: Query) -> bool:
    """Whether the sizes that a query names are large; what is no size, or far too large, is refused at once."""
    given = dict(query)
    sizes = [given.get(name) or "1" for name in ("pp", "microbatches", "splits")]
    return all(size.isdecimal() and len(size) < 10 for size in sizes) and math.prod(map(int, sizes)) >= LONG


def command(query: Query) -> str:
    """The command that makes the same plan."""
    return shlex.join(["mpipe", "plan", *flags(query)])


def planned(query: Query) -> Answer:
    """What ``mpipe plan --json`` prints for these flags as ``plan``, and its timeline for the page's scripts as ``panel``."""
    told: dict[str, Any] = {}

    def act(options: argparse.Namespace) -> None:
        case, data, _ = plan.plan(options)
        told.update(plan=data, panel=encoded(Entry(case.title, case.timeline, case.schedule, case.problem.costs)))

    return _refusal(["plan", *flags(query)], act) or Answer(200, json.dumps(told).encode())


def download(plan: bytes, suffix: str) -> Answer:
    """A plan, as ``mpipe plan --json`` prints it, in one of the formats of ``DOWNLOADS``."""
    command, type = DOWNLOADS[suffix]
    if not command:
        return Answer(200, plan + b"\n", type)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("plan.json").write_bytes(plan)
        made = Path(f"made.{suffix}")
        refusal = _refusal([command[0], "plan.json", *command[1:], "-o", str(made)])
        return refusal or Answer(200, made.read_bytes(), type)


def _refusal(arguments: Sequence[str], act: Callable[[argparse.Namespace], None] | None = None) -> Answer | None:
    """Run a command; what it complains about, if it does."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            refused = cli.main(arguments, act) != 0
        except SystemExit:  # how argparse refuses flags
            refused = True
    return Answer(400, json.dumps({"message": said.getvalue().strip()}).encode()) if refused else None
