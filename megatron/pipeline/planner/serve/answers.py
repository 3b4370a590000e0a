"""Answers to the queries of the page: one becomes the flags of ``mpipe plan``, and these a ``Request``.

So a schedule on the page is the one that ``mpipe plan`` makes, a download is what ``mpipe plan --draw`` or ``mpipe export``
writes, and bad parameters are refused in the same words.
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.choose import best
from megatron.pipeline.planner.planning.document import Changes, choice_fields, curves, read, report
from megatron.pipeline.planner.planning.no_gc import without_gc
from megatron.pipeline.planner.planning.request import MOST_PASSES, MOST_RANKS, Request, Variant, check_bounded, variants
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow
from megatron.pipeline.planner.schedule.lower.torch_csv import to_csv
from megatron.pipeline.planner.view import Entry, draw
from megatron.pipeline.planner.view.page import encoded

Ask: TypeAlias = Callable[[Sequence[str]], Request]  # from the flags of ``mpipe plan``; raises a ValueError for wrong ones
Query: TypeAlias = tuple[tuple[str, str], ...]  # names and values, in the order given

# What a page may ask of mpipe plan: all but the flags that read and write files, and --balance, which plans for long.
# The file of --costs is one that the page has opened.
FLAGS = (
    *("schedule", "pp", "microbatches", "chunks", "splits", "group", "cost", "activation", "first-stage", "last-stage"),
    *("vocab-cost", "vocab-parallel", "copy", "offload", "host-memory-limit", "memory-limit", "objective"),
    *("recompute", "fuse", "overlap-experts", "costs", "replicas", "grad-bytes", "param-bytes", "replica-link", "slow"),
    "trained",
)
DOWNLOADS = {"json": "application/json", "csv": "text/csv; charset=utf-8", "svg": "image/svg+xml"}  # formats of a plan, and types

LONG = 1 << 17  # the ``work`` from which on a plan may take longer than someone who drags a value waits for the next
_SEARCH = 1000  # times as long as to write a known order down


class Answer(NamedTuple):
    """A status of HTTP, and the result, or JSON with the error message."""

    status: int
    body: bytes
    type: str = "application/json"


def flags(query: Iterable[tuple[str, str]], costs: str = "") -> list[str]:
    """The flags of ``mpipe plan`` that a query stands for; an empty value is a flag left out.

    Args:
        costs: the path of the costs file that the query names, if it does.

    Raises:
        ValueError: it has a name that is not one of ``FLAGS``.
    """
    given = [(name, costs if name == "costs" else value) for name, value in query if value]
    for name, _ in given:
        if name not in FLAGS:
            raise ValueError(f"unknown parameter {name!r}; allowed are {', '.join(FLAGS)}")
    return [f"--{name}={value}" for name, value in given]


def work(query: Query) -> int:
    """Work of making a plan, about: its passes, times what is done for each; 0 for what is refused at once."""
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


def candidates(query: Query) -> list[dict[str, str]]:
    """Plans for the page's picture of all: the schedules of ``mpipe compare`` and ``auto``, as parameters of a plan, those
    that are the least work first.

    Raises:
        ValueError: ``pp`` is not a number of ranks, or ``microbatches`` are none that can be planned.
    """
    sizes = dict(query)
    for name, most in (("pp", MOST_RANKS), ("microbatches", MOST_PASSES)):
        number = sizes.get(name, "")
        if not number.isdecimal() or not 1 <= int(number) <= most:
            raise ValueError(f"{name}={number}: expected a whole number from 1 to {most}")
    ranks = int(sizes["pp"])
    check_bounded(ranks, int(sizes["microbatches"]))
    found = []
    for name, chunks, group, _ in map(astuple, variants(ranks)):
        own = chunks == families.FAMILIES[name].chunks  # which the page leaves out
        given = {"schedule": name, "chunks": None if own else chunks, "group": group}
        found.append({flag: str(value) for flag, value in given.items() if value is not None})
    return sorted(found, key=lambda one: work((*one.items(), *query)))


def command(query: Query, costs: str = "") -> str:
    return shlex.join(["mpipe", "plan", *flags(query, costs)])


def planned(query: Query, ask: Ask, quick: bool = False, costs: str = "") -> Answer:
    """Data that ``mpipe plan --json`` prints for these flags as ``plan``, and its timeline for the page's scripts as ``panel``;
    or
    with status 400 ``message``, why there is none. ``least`` is the least limit that there is a plan for, where a limit makes a
    difference.

    Args:
        quick: whether the first good plan is enough, and wanted at once.
        costs: see ``flags``.

    Raises:
        ValueError: the query has a name that is not one of ``FLAGS``.
    """
    fields: dict[str, Any] = {}
    status, given = 200, flags(query, costs)
    try:
        with without_gc():
            request = replace(ask(given), quick=quick)
            plan, choice = best(request)
            fields["plan"] = report(plan) | (choice_fields(choice) if choice else {})
            fields["panel"] = encoded(Entry(plan.title, plan.timeline, plan.schedule, plan.problem.costs))
            if not choice and families.named(request.schedule).uses_limits and plan.problem.offload is None:
                fields["least"] = planning.least_memory(request.schedule, plan.problem)
    except ValueError as error:
        status, fields = 400, {"message": f"mpipe: {error}"}
        if isinstance(error, LimitTooLow) and request.schedule != families.AUTO:
            fields["least"] = error.least
    return Answer(status, json.dumps(fields).encode())


def download(plan: bytes, suffix: str) -> Answer:
    """A plan, as ``mpipe plan --json`` prints it, in one of the formats of ``DOWNLOADS``."""
    type = DOWNLOADS[suffix]
    if suffix == "json":
        return Answer(200, plan + b"\n", type)
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder, "plan.json"), Path(folder, f"plan.{suffix}")
        source.write_bytes(plan)
        whole = read(str(source), Changes())
        if suffix == "csv":
            return Answer(200, to_csv(whole.schedule).encode(), type)
        title, splits = whole.title, whole.schedule.splits
        draw({title: whole.timeline}, result, splits={title: splits}, **curves({title: whole}), slow={title: whole.slow})
        return Answer(200, result.read_bytes(), type)
