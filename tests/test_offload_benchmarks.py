"""The benchmark of offload on one device runs, on small sizes, and holds what was planned. What it times is not looked at."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pool import free_port, run_program

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(flags: str) -> list[list[str]]:
    """The cells of the table that it prints, row by row."""
    world = {"WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "RANK": "0", "LOCAL_RANK": "0"}
    code, text = run_program(BENCHMARKS / "offload.py", *flags.split(), **world)
    assert code == 0, text
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def _share(cell: str) -> float:
    assert re.fullmatch(r"[+-]?\d+\.\d+%", cell), cell
    return float(cell.rstrip("%")) / 100


@pytest.mark.rest
def test_one_rank_replayed_on_its_device(tmp_path: Path) -> None:
    saved = tmp_path / "rounds"
    flags = f"--hidden 256 --seq 128 --rank 1 --microbatches 4 --iterations 1 --cpu-bandwidth 2 --save {saved}"
    rows = {row[0]: row for row in run(flags)}
    assert list(rows) == ["off", "selective", "full"]
    assert all(abs(_share(row[-1])) < 0.02 for row in rows.values()), "peaks are not as planned"
    assert _share(rows["off"][3]) == 0 < _share(rows["full"][3]), "nothing was moved"
    assert float(rows["full"][-3]) < float(rows["off"][-3])
    assert [len(rounds) for rounds in json.loads(saved.read_text())["seconds"].values()] == [1, 1, 1]
