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
from megatron.pipeline.planning.choose import Variant, variants
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.problem import LimitTooLow
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

LONG = 1 << 20  # the ``work`` from which on a plan may take many seconds
_SEARCH = 100  # times as long as to write a known order down


class Answer(NamedTuple):
    """A status of HTTP, and what was made, or JSON with the message that says what is wrong."""

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


def work(query: Query) -> int:
    """How much work a plan is, about: its passes, times what is done for each; 0 for what is refused at once."""
    given = dict(query)
    sizes = [given.get(name) or "1" for name in ("pp", "microbatches", "splits", "chunks")]
    if not all(size.isdecimal() and len(size) < 10 for size in sizes):
        return 0
    ranks, name = int(sizes[0]), given.get("schedule", "")
    tried = variants(ranks) if name == families.AUTO else [Variant(name)] if name in families.FAMILIES else []
    each = (
        (_SEARCH if family.searches else 1) * (1 if given.get("chunks") else variant.chunks or family.chunks)
        for variant in tried
        for family in [families.FAMILIES[variant.name]]
    )
    return math.prod(map(int, sizes)) * sum(each)


def command(query: Query) -> str:
    """The command that makes the same plan."""
    return shlex.join(["mpipe", "plan", *flags(query)])


def planned(query: Query) -> Answer:
    """What ``mpipe plan --json`` prints for these flags as ``plan``, and its timeline for the page's scripts as ``panel``; or
    ``message``, why there is none. ``least`` is the least limit that there is a plan for, where the limit makes a difference.

    Both have status 200: a browser would report another one as an error of the page.
    """
    told: dict[str, Any] = {}

    def act(options: argparse.Namespace) -> None:
        try:
            case, data, _ = plan.plan(options)
        except LimitTooLow as error:
            told["least"] = error.least
            raise
        told.update(plan=data, panel=encoded(Entry(case.title, case.timeline, case.schedule, case.problem.costs)))
        name = options.schedule
        if name != families.AUTO and families.named(name).uses_limits and case.problem.offload is None:
            told["least"] = families.least_memory(name, case.problem)

    complaint = _run(["plan", *flags(query)], act)
    return Answer(200, json.dumps({"message": complaint, **told} if complaint else told).encode())


def download(plan: bytes, suffix: str) -> Answer:
    """A plan, as ``mpipe plan --json`` prints it, in one of the formats of ``DOWNLOADS``."""
    command, type = DOWNLOADS[suffix]
    if not command:
        return Answer(200, plan + b"\n", type)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("plan.json").write_bytes(plan)
        made = Path(f"made.{suffix}")
        complaint = _run([command[0], "plan.json", *command[1:], "-o", str(made)])
        return refusal(complaint) if complaint else Answer(200, made.read_bytes(), type)


def refusal(message: str) -> Answer:
    return Answer(400, json.dumps({"message": message}).encode())


def _run(arguments: Sequence[str], act: Callable[[argparse.Namespace], None] | None = None) -> str:
    """Run a command; what it complains about, if it does."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            refused = cli.main(arguments, act) != 0
        except SystemExit:  # how argparse refuses flags
            refused = True
    return said.getvalue().strip() if refused else ""
