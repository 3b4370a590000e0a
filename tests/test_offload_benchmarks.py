"""The benchmark of offload on one device runs, on small sizes, and holds what was planned. What it times is not looked at."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from pool import forked, free_port

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def _run(script: str, flags: str, output: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.path.insert(0, str(BENCHMARKS))
    sys.argv = [script, *flags.split()]
    with open(output, "w") as file, redirect_stdout(file):
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


def run(script: str, flags: str, directory: Path) -> list[list[str]]:
    """The cells of the table that it prints, row by row."""
    world = {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0"}
    output = directory / "output"
    process = forked(_run, script, flags, str(output), world)
    process.join(timeout=300)
    process.kill()
    text = output.read_text()
    assert process.exitcode == 0, text
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def _share(cell: str) -> float:
    assert re.fullmatch(r"[+-]?\d+\.\d+%", cell), cell
    return float(cell.rstrip("%")) / 100


@pytest.mark.rest
def test_one_rank_replayed_on_its_device(tmp_path: Path) -> None:
    saved = tmp_path / "rounds"
    flags = f"--hidden 256 --seq 128 --rank 1 --microbatches 4 --iterations 1 --cpu-bandwidth 2 --save {saved}"
    rows = {row[0]: row for row in run("offload.py", flags, tmp_path)}
    assert list(rows) == ["off", "selective", "full"]
    assert all(abs(_share(row[-1])) < 0.02 for row in rows.values()), "peaks are not as planned"
    assert _share(rows["off"][3]) == 0 < _share(rows["full"][3]), "nothing was moved"
    assert float(rows["full"][-3]) < float(rows["off"][-3])
    assert [len(rounds) for rounds in json.loads(saved.read_text())["seconds"].values()] == [1, 1, 1]
