"""The costs files that pages have opened, and those made of models: kept as long as the server runs, each by what it contains."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import re
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.pipeline.costmodel import device
from megatron.pipeline.planning.document import read_costs
from megatron.pipeline.planning.refusals import MIB, unit_of
from megatron.pipeline.schedule.core.costs import CopyCosts, Costs, VocabularyCosts
from megatron.pipeline.serve.workers import ENDING, Busy

MOST_BYTES = 4 << 20  # of a file
_LONGEST_NAME = 80  # letters
_MOST = 64  # files; the ones opened first go first
_PATIENCE = 120.0  # seconds for a model's costs: torch and megatron-core are imported for them
_YAML = (".yaml", ".yml")
_INSTEAD = "run mpipe costs, and open what that writes"


class Unknown(ValueError):
    """There is no such file, or no more."""


class Opened:
    """Costs files by a digest of their text. ``with`` makes the directory that has them, and removes it.

    Args:
        models: whether to make costs of a model's flags too. These may name files of this machine, so only its own pages may.
    """

    def __init__(self, models: bool) -> None:
        self._models = models
        self._known: dict[str, dict[str, Any]] = {}
        self._making: asyncio.subprocess.Process | None = None
        self._ending = False

    def __enter__(self) -> Opened:
        self._folder = tempfile.TemporaryDirectory(prefix="mpipe-serve-")
        self._one_by_one = asyncio.Lock()  # each imports torch, and uses a core
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.refuse()
        self._folder.cleanup()

    def refuse(self) -> None:
        """Make no more costs of models, so that none delays the end of the server; those that are being made end."""
        self._ending = True
        self._kill()

    def _kill(self) -> None:
        if self._making is not None:
            with contextlib.suppress(ProcessLookupError):
                self._making.kill()

    @property
    def gpus(self) -> list[str]:
        """Those for which costs of a model are made; none where none are."""
        return list(device.shipped()) if self._models else []

    async def add(self, name: str, text: str, gpu: str) -> dict[str, Any]:
        """Keep a file; returns what there is to know of it.

        Args:
            name: of the file, for people.
            gpu: for which the costs of a model are predicted, where the text is YAML.

        Raises:
            ValueError: it has no costs, or no model that can be cut into stages.
            Busy: the server ends.
        """
        file = re.sub(r"[^\w. -]", "_", Path(name).name)[-_LONGEST_NAME:] or "costs.json"
        if Path(file).suffix.lower() in _YAML:
            if not self._models:
                raise ValueError(f"{file}: a model's flags are read at 127.0.0.1 only; {_INSTEAD}")
            async with self._one_by_one:
                if self._ending:
                    raise Busy(ENDING)
                text = await self._predicted(file, text, gpu)
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

    async def _predicted(self, file: str, text: str, gpu: str) -> str:
        """The costs of a model, as ``mpipe costs`` writes them; the process that makes them ends where this is cancelled.

        Raises:
            ValueError: in the words of that command.
            Busy: the server ends.
        """
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            config = Path(folder, file)
            config.write_text(text, encoding="utf-8")
            command = [sys.executable, "-m", "megatron.pipeline.cli", "costs", "--config", str(config), "--gpu", gpu, "--json"]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe)
            self._making = process
            if self._ending:  # meanwhile
                self._kill()
            try:
                out, complaint = await asyncio.wait_for(process.communicate(), _PATIENCE)
            except TimeoutError:
                raise ValueError(f"{file}: its costs took more than {_PATIENCE:g} s; {_INSTEAD}") from None
            finally:
                self._kill()
                self._making = None
            if self._ending:
                raise Busy(ENDING)
            if process.returncode:
                said = complaint.decode(errors="replace").strip().splitlines() or [f"{file}: exit code {process.returncode}"]
                errors = [line for line in said if line.startswith("mpipe: ")] or said  # libraries may complain after it
                raise ValueError(errors[-1].removeprefix("mpipe: ").replace(str(config), file))
            return json.dumps(json.loads(out))


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


__all__ = ["MOST_BYTES", "Opened", "Unknown"]
