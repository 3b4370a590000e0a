"""Ranks that ``mpipe tune`` starts, forked with torch and megatron-core imported: importing them takes most of a short run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import launched
from pool import forked, free_port

from megatron.pipeline.tune import trial


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends, trials do without torchrun: test_trial.py has trials with it."""
    monkeypatch.setattr(trial, "_finish", _finish)


def _finish(command: Sequence[str], output: Any, timeout: float) -> int:
    """Stands for ``trial._finish``; the command is torchrun --nproc-per-node N pretrain_gpt.py and its flags."""
    start = command.index("--nproc-per-node")
    ranks, program, *arguments = command[start + 1 :]
    assert Path(program).name == "pretrain_gpt.py"
    port = free_port()
    started = [forked(launched.own, rank, int(ranks), port, Path(output.name), list(arguments)) for rank in range(int(ranks))]
    for process in started:
        process.join(timeout)
        process.kill()
        process.join()
    return max(abs(process.exitcode or 0) for process in started)
