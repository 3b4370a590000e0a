"""The benchmark of slow links and ranks runs, on small sizes. What it times is not looked at."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pool import free_port, run_program

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(ranks: int, flags: str) -> dict[str, list[str]]:
    """The cells of the table that rank 0 prints, by schedule."""
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}

    def rank(number: int) -> tuple[int | None, str]:
        place = {"RANK": str(number), "LOCAL_RANK": str(number)}
        return run_program(BENCHMARKS / "slow_links.py", *flags.split(), **world, **place)

    with ThreadPoolExecutor(ranks) as threads:
        ends = list(threads.map(rank, range(ranks)))
    assert [code for code, _ in ends] == [0] * ranks, "".join(text for _, text in ends)
    rows = [line.strip("│").split("│") for line in ends[0][1].splitlines() if line.startswith("│")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


@pytest.mark.parametrize("holds", ["nothing", "sender", pytest.param("link", marks=pytest.mark.rest)])
def test_a_slow_link(holds: str, tmp_path: Path) -> None:
    flags = f"--links 0-1 --delays 0 4 --holds {holds} --microbatches 8 --milliseconds 2 2 2 --rounds 1"
    rows = run(4, f"{flags} --ours zb-h1 --planned zb-auto@2 v-auto --picture {tmp_path / 'slow.svg'}")
    assert [*rows] == ["stock 1f1b", "zb-h1", "zb-auto@2, planned for it", "v-auto, planned for it"]
    simulated = {name: float(cells[3]) for name, cells in rows.items()}
    assert simulated["zb-auto@2, planned for it"] < simulated["zb-h1"], "it is planned without the delay"
    assert [cells[-1] for cells in rows.values()] == ["4", "4", "8", "4"]
    assert (tmp_path / "slow.svg").exists()


def test_a_slow_rank() -> None:
    flags = "--links --delays 0 1 --slower 1 1.5 --microbatches 4 --milliseconds 2 2 2 --rounds 1"
    rows = run(2, f"{flags} --ours zb-h1 --planned zb-v")
    assert [*rows] == ["stock 1f1b", "zb-h1", "zb-v, planned for it"]
    assert all(float(cells[3]) > 0 for cells in rows.values()), "no rank is slower in the simulation"


def test_a_late_message_is_there_when_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from sleeping import _Late

    due = time.monotonic() + 0.01
    assert _Late((), lambda: due).wait()
    assert time.monotonic() >= due, "it was there sooner"
