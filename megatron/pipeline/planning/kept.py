"""Searched orders of passes on disk, so that the next start of a training reads in place of searching.

A file is a schedule's JSON, which ``mpipe draw`` and ``file:PATH`` take, too. Its name has a digest of all that the order follows
from: the problem, and the code that plans. What is read goes through every rule as a new plan does, and ranks compare it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron.pipeline.schedule.core.compiled import user_folder, write_whole
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.core.schedule import Schedule

FOLDER = "MEGATRON_PIPELINE_PLANS"  # the variable that names another folder, or is "off"
_WORTH = 0.1  # seconds of a search; shorter ones are not kept
_MOST = 200  # files: who plans for costs that differ at each start leaves no more
_LOG = logging.getLogger(__name__)


class Order(NamedTuple):
    """What planning finds: the schedule, and its period by Megatron-LM's rules (see ``Planned``)."""

    schedule: Schedule
    by_rules: float | None


def find(name: str, problem: Problem) -> Order | None:
    """The order that an earlier process has kept for a family's name and a problem; None without one, or if its file is not as it
    was written."""
    path, key = _place(name, problem)
    if path is None:
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("digest") != _digest(key, json.dumps(fields)):
            raise ValueError("it was changed")
        return Order(Schedule.from_json(json.dumps(fields)), fields.get("period_by_rules"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("%s holds no plan any more (%s): it is planned anew", path, error)
        return None


def keep(name: str, problem: Problem, order: Order, seconds: float) -> None:
    """Keep an order whose search has taken that long. One rank of a node does so; a file that cannot be written costs a line."""
    path, key = _place(name, problem)
    if path is None or seconds < _WORTH or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    fields = order.schedule.fields() | ({} if order.by_rules is None else {"period_by_rules": order.by_rules})
    digest = _digest(key, json.dumps(fields))
    try:
        write_whole(path, json.dumps({"digest": digest} | fields).encode())
    except OSError as error:
        _LOG.warning("a plan is not kept for the next start (%s): %s names another folder, or off", error, FOLDER)
        return
    with contextlib.suppress(OSError):  # another process removes them, too
        for old in sorted(path.parent.glob("*.json"), key=os.path.getmtime)[:-_MOST]:
            old.unlink()


def _place(name: str, problem: Problem) -> tuple[Path | None, str]:
    """The file of a plan, if plans are kept, and what its order follows from."""
    given, home = os.environ.get(FOLDER), user_folder()
    folder = Path(given) if given else home and home / "plans"
    if given == "off" or folder is None:
        return None, ""
    key = f"{_code()} {name} {problem!r}"
    return folder / f"{name}-{_digest(key)}.json", key


@cache
def _code() -> str:
    """Digest of the code that plans."""
    room = Path(__file__).parents[1]
    files = [file for part in ("schedule", "planning") for file in sorted((room / part).rglob("*.py"))]
    return _digest(*(file.read_text(encoding="utf-8") for file in files))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:24]
