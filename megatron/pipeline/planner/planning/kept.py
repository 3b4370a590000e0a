"""Searched orders of passes on disk, so that the next start of a training reads in place of searching.

A file is a schedule's JSON, which ``mpipe plan FILE`` and ``file:PATH`` take, too. Its name has a digest of all that the order
follows from: the problem, and the code that plans. What is read goes through every rule as a new plan does, and ranks compare it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.compiled import user_folder, write_whole
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.reading import content_of, parse_json
from megatron.pipeline.planner.schedule.core.schedule import Schedule

FOLDER = "MEGATRON_PIPELINE_PLANS"  # the variable that names another folder, or is "off"
_WORTH = 0.1  # seconds of a search; shorter ones are not kept
_DIGITS = 24  # of a digest
_MOST = 200  # files: who plans for costs that differ at each start leaves no more
_LOG = logging.getLogger(__name__)

Order: TypeAlias = tuple[Schedule, float | None]  # and its period by Megatron-LM's rules, where that is known


def order(name: str, problem: Problem, search: Callable[[], Order]) -> Order:
    """The order of a family for a problem: as an earlier process has kept it, or else searched, and kept by one rank of a node.

    Args:
        search: finds it, and may raise a ValueError.
    """
    given, home = os.environ.get(FOLDER), user_folder()
    folder = Path(given) if given else home and home / "plans"
    if given == "off" or folder is None or not _is_own(families.named(name)):
        return search()
    key = f"{_code()} {name} {problem!r}"
    path = folder / f"{name}-{_digest(key)}.json"
    if found := _read(path, key):
        return found
    begin = time.perf_counter()
    searched = search()
    if time.perf_counter() - begin >= _WORTH and os.environ.get("LOCAL_RANK", "0") == "0":
        _write(path, key, *searched)
    return searched


def _read(path: Path, key: str) -> Order | None:
    try:
        fields = parse_json(content_of(path), "a plan")
        if fields.pop("digest") != _digest(key, json.dumps(fields)):
            raise ValueError("it was changed")
        return Schedule.from_json(json.dumps(fields)), fields.get("period_by_rules")
    except OSError:  # there is none, or every rank would say what the one says that cannot write
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("%s holds no plan any more (%s): it is planned anew", path, error)
        return None


def _write(path: Path, key: str, schedule: Schedule, by_rules: float | None) -> None:
    fields = schedule.fields() | ({} if by_rules is None else {"period_by_rules": by_rules})
    digest = _digest(key, json.dumps(fields))
    try:
        write_whole(path, json.dumps({"digest": digest} | fields).encode())
    except OSError as error:
        _LOG.warning("a plan is not kept for the next start (%s): %s names another folder, or off", error, FOLDER)
    with contextlib.suppress(OSError):  # another process removes them, too
        for old in sorted(path.parent.glob(f"*-{'[0-9a-f]' * _DIGITS}.json"), key=os.path.getmtime)[:-_MOST]:
            old.unlink()


def _is_own(family: families.Family) -> bool:
    """Tell whether the code that plans a family is of this package: of a user's own it is not known when it changes."""
    plan = family.plan.func if isinstance(family.plan, partial) else family.plan
    return plan.__module__.startswith(f"{families.__name__}.")


@cache
def _code() -> str:
    """Digest of the code that plans, and of the one that draws numbers for it."""
    room = Path(__file__).parents[1]
    files = [file for part in ("schedule", "planning") for file in sorted((room / part).rglob("*.py"))]
    return _digest(np.__version__, *(file.read_text(encoding="utf-8") for file in files))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:_DIGITS]
