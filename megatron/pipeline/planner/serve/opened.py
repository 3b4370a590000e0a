"""The costs files that pages have opened: kept as long as the server runs, each by what it contains."""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from pathlib import Path
from typing import Any

from megatron.pipeline.planner.planning.document import read_costs
from megatron.pipeline.planner.planning.refusals import MIB, unit_of
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, VocabularyCosts

MOST_BYTES = 4 << 20  # of a file
_LONGEST_NAME = 80  # letters
_MOST = 64  # files; the ones opened first go first


class Unknown(ValueError):
    """There is no such file, or no more."""


class Opened:
    """Costs files by a digest of their text. ``with`` makes the directory that has them, and removes it."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> Opened:
        self._folder = tempfile.TemporaryDirectory(prefix="mpipe-serve-")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def add(self, name: str, text: str) -> dict[str, Any]:
        """Keep a file; returns what there is to know of it.

        Args:
            name: of the file, for people.

        Raises:
            ValueError: it has no costs.
        """
        file = re.sub(r"[^\w. -]", "_", Path(name).name)[-_LONGEST_NAME:] or "costs.json"
        costs = read_costs(file, text)
        id = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._path(id).write_text(text, encoding="utf-8")
        self._known[id] = {"costs": id, "name": file, **_about(costs)}
        while len(self._known) > _MOST:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._path(oldest).unlink()
        return self._known[id]

    def about(self, id: str) -> dict[str, Any]:
        """Raises:
        Unknown: there is no such file, or no more.
        """
        if id not in self._known:
            raise Unknown("mpipe serve does not have this costs file any more: open it again")
        return self._known[id]

    def path(self, id: str) -> str:
        """Path of the file; empty for no file. Raises as ``about``."""
        return str(self._path(self.about(id)["costs"])) if id else ""

    def name(self, id: str) -> str:
        return str(self.about(id)["name"]) if id else ""

    def _path(self, id: str) -> Path:
        return Path(self._folder.name, f"{id}.json")


def _about(costs: Costs) -> dict[str, Any]:
    """Facts about costs that a page shows: ``microbatch`` is the memory of one on all stages together."""
    unit = unit_of(costs)
    return {
        "stages": len(costs.stages),
        "unit": unit.name if unit is MIB else "",
        "size": unit.size,
        "microbatch": math.fsum(stage.activation for stage in costs.stages),
        "vocabulary": costs.vocabulary != VocabularyCosts(),
        "copies": costs.copies != CopyCosts(),
    }
