"""Benchmarks of ranks that sleep or offload run, on small sizes, and hold what was planned. What they time is not looked at."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

from pool import forked, free_port

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def _run(script: str, flags: str, output: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.path.insert(0, str(BENCHMARKS))
    sys.argv = [script, *flags.split()]
    with open(output, "w") as file, redirect_stdout(file):
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


def run(script: str, flags: str, directory: Path, ranks: int = 1) -> list[list[str]]:
    """The cells of the table that rank 0 prints, row by row."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    outputs = [directory / f"rank-{rank}" for rank in range(ranks)]
    processes = [
        forked(_run, script, flags, str(output), {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, output in enumerate(outputs)
    ]
    for process in processes:
        process.join(timeout=300)
        process.kill()
    text = outputs[0].read_text()
    assert [process.exitcode for process in processes] == [0] * ranks, text
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line.startswith("│")]


def _share(cell: str) -> float:
    assert re.fullmatch(r"[+-]?\d+\.\d+%", cell), cell
    return float(cell.rstrip("%")) / 100


def test_one_rank_replayed_on_its_device(tmp_path: Path) -> None:
    saved = tmp_path / "rounds"
    flags = f"--hidden 256 --seq 128 --rank 1 --microbatches 4 --iterations 1 --cpu-bandwidth 2 --save {saved}"
    rows = {row[0]: row for row in run("offload.py", flags, tmp_path)}
    assert list(rows) == ["off", "selective", "full"]
    assert all(abs(_share(row[-1])) < 0.02 for row in rows.values()), "peaks are not as planned"
    assert _share(rows["off"][3]) == 0 < _share(rows["full"][3]), "nothing was moved"
    assert float(rows["full"][-3]) < float(rows["off"][-3])
    assert [len(rounds) for rounds in json.loads(saved.read_text())["seconds"].values()] == [1, 1, 1]


def test_ranks_that_sleep(tmp_path: Path) -> None:
    flags = "--schedules interleaved zb-auto --k 0.5 --microbatches 4 --milliseconds 8 8 8 --rounds 1"
    rows = run("offload_sleeping.py", flags, tmp_path, ranks=2)
    assert [row[:2] for row in rows] == [
        [name, mode] for name in ("interleaved", "zb-auto") for mode in ("off", "selective", "full")
    ]
    assert all(abs(_share(row[-1])) < 0.02 for row in rows), "peaks are not as planned"
    off, _, full = rows[:3]
    assert int(full[-3]) < int(off[-3])


def test_ranks_that_sleep_with_a_spread_vocabulary(tmp_path: Path) -> None:
    flags = "--methods off 2 --microbatches 4 --milliseconds 4 4 4 --rounds 1"
    rows = run("vocabulary.py", flags, tmp_path, ranks=2)
    assert [row[:2] for row in rows] == [["1f1b", "off"], ["1f1b", "2"]]
    assert all(float(row[4]) > 0 for row in rows)
