"""What scripts/evidence.py makes of the metrics and logs that trainings leave; nothing trains here."""

from __future__ import annotations

import json
from pathlib import Path

import evidence
import pytest
from evidence import RUNS, Found, Run

STOCK, ZB_V = Run("stock", "--pipeline-schedule stock"), Run("zb-v", "--pipeline-schedule zb-v")
AHEAD = Run("zb-h2 post-validation", "--pipeline-schedule zb-h2 --post-validation")


def leave(output: Path, run: Run, losses: dict[int, float], evaluations: dict[int, float], undone: tuple[int, ...] = ()) -> None:
    """Add to a training's files what a part of it writes."""
    where = evidence.folder(run, output)
    where.mkdir(parents=True, exist_ok=True)
    with (where / "metrics.jsonl").open("a") as metrics:
        for iteration, loss in losses.items():
            step = "undone" if iteration in undone else "synchronous"
            metrics.write(json.dumps({"iteration": iteration, "loss": loss, "optimizer_step": step}) + "\n")
    with (where / "log.txt").open("a") as log:
        log.write("schedule zb-v on 2 ranks\n")
        for iteration, loss in evaluations.items():
            log.write(f" validation loss at iteration {iteration} | lm loss value: {loss!r} | lm loss PPL: 3.1\n")


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_found_has_losses_evaluations_and_undone_steps(tmp_path: Path) -> None:
    leave(tmp_path, AHEAD, {1: 3.0, 2: 2.5, 3: 2.0}, {2: 2.6, 3: 2.1}, undone=(2,))
    assert evidence.found(AHEAD, tmp_path) == Found({1: 3.0, 2: 2.5, 3: 2.0}, {2: 2.6, 3: 2.1}, 1)


def test_found_of_a_training_that_has_not_begun(tmp_path: Path) -> None:
    assert evidence.found(ZB_V, tmp_path) == Found({}, {}, 0)


def test_found_of_a_resumed_training_takes_the_last_record(tmp_path: Path) -> None:
    leave(tmp_path, ZB_V, {1: 3.0, 2: 2.5, 3: 9.0}, {2: 2.6}, undone=(3,))
    leave(tmp_path, ZB_V, {3: 2.0, 4: 1.5}, {4: 1.6})  # from the checkpoint of iteration 2
    assert evidence.found(ZB_V, tmp_path) == Found({1: 3.0, 2: 2.5, 3: 2.0, 4: 1.5}, {2: 2.6, 4: 1.6}, 0)


@pytest.mark.parametrize(("losses", "evaluations"), [({1: 3.0}, {1: 3.0}), ({1: 3.0, 2: 2.5}, {1: 3.0}), ({}, {})])
def test_unfinished_without_the_last_iteration_and_its_evaluation(
    tmp_path: Path, losses: dict[int, float], evaluations: dict[int, float]
) -> None:
    leave(tmp_path, ZB_V, losses, evaluations)
    assert not evidence.is_finished(ZB_V, tmp_path, 2)
    leave(tmp_path, ZB_V, {2: 2.5}, {2: 2.6})
    assert evidence.is_finished(ZB_V, tmp_path, 2)


def test_a_row_of_an_equal_training() -> None:
    left = Found({1: 3.0, 2: 2.0}, {2: 2.1}, 0)
    assert cells(evidence.row(ZB_V, left, left)) == ["zb-v", "2", "2.5000", "+0.0000", "2.1000", "+0.0000", "2", "0.0e+00", ""]


def test_a_row_of_a_training_that_differs() -> None:
    reference = Found({1: 3.0, 2: 2.0, 3: 2.0}, {3: 2.0}, 0)
    left = Found({1: 3.0, 2: 2.25, 3: 1.5}, {3: 2.25}, 7)
    assert cells(evidence.row(ZB_V, left, reference)) == [
        *("zb-v", "3", "2.2500", "-0.0833", "2.2500", "+0.2500", "1", "5.0e-01", ""),
    ]
    assert cells(evidence.row(AHEAD, left, reference))[-1] == "7"  # undone steps, which others cannot have


def test_a_row_has_the_mean_of_the_last_hundred_iterations_that_both_have() -> None:
    """A training that begins with another's checkpoint has no iterations before it."""
    reference = Found({k: 5.0 if k <= 1100 else 2.0 for k in range(1, 1201)}, {1200: 2.0}, 0)
    left = Found(dict.fromkeys(range(1001, 1201), 2.0), {1200: 2.0}, 0)
    assert cells(evidence.row(ZB_V, left, reference))[1:8] == ["200", "2.0000", "+0.0000", "2.0000", "+0.0000", "100", "3.0e+00"]


def test_the_table_has_what_is_finished_and_names_the_rest(tmp_path: Path) -> None:
    leave(tmp_path, STOCK, {1: 3.0, 2: 2.0}, {2: 2.1})
    leave(tmp_path, ZB_V, {1: 3.0, 2: 2.0}, {2: 2.1})
    leave(tmp_path, AHEAD, {1: 3.0}, {})
    rows = evidence.table(tmp_path, 2).splitlines()
    assert [cells(row)[0] for row in rows[2:4]] == ["stock", "zb-v"] and rows[4] == ""
    assert rows[5] == f"Not finished yet: {', '.join(run.name for run in RUNS if run.name not in ('stock', 'zb-v'))}."
    assert {len(cells(row)) for row in rows[:4]} == {9}


def test_the_report_writes_between_its_marks(tmp_path: Path) -> None:
    leave(tmp_path, STOCK, {1: 3.0, 2: 2.0}, {2: 2.1})
    leave(tmp_path, ZB_V, {1: 3.0, 2: 2.5}, {2: 2.6})
    page = tmp_path / "page.md"
    page.write_text(f"before\n{evidence.BEGIN}\nold\n{evidence.END}\nbehind\n")
    for _ in range(2):  # the second time it finds its own table
        evidence.report(tmp_path, 2, page, tmp_path / "picture.png")
        assert page.read_text() == f"before\n{evidence.BEGIN}\n\n{evidence.table(tmp_path, 2)}\n\n{evidence.END}\nbehind\n"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_marks_once() -> None:
    text = evidence.DOCUMENT.read_text(encoding="utf-8")
    assert text.count(evidence.BEGIN) == text.count(evidence.END) == 1 and text.index(evidence.BEGIN) < text.index(evidence.END)


def test_every_training_has_a_reference_and_a_folder_of_its_own(tmp_path: Path) -> None:
    assert {run.reference for run in RUNS} | {run.start for run in RUNS if run.start} <= {run.name for run in RUNS}
    assert len({evidence.folder(run, tmp_path) for run in RUNS}) == len(RUNS)
