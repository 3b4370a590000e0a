"""Iterations of a run, joined on one time axis."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command import refusal

from megatron.pipeline import planning
from megatron.pipeline.cli import main
from megatron.pipeline.schedule.core.costs import uniform
from megatron.pipeline.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.schedule.time.simulate import simulate
from megatron.pipeline.view import Consecutive, RecordedIteration, draw, render
from megatron.pipeline.view.consecutive import latest

EPOCH = 1_800_000_000.0


def iteration(number: int, begin: float, name: str = "1f1b", ranks: int = 2, microbatches: int = 2) -> RecordedIteration:
    """One whose first pass on rank 0 starts so many seconds after the epoch."""
    schedule = planning.plan(name, ranks, microbatches)
    shift = EPOCH + begin
    rows = simulate(schedule, uniform(schedule.placement)).ranks
    timeline = Timeline(tuple(tuple(Timed(work, shift + start, shift + end) for work, start, end in row) for row in rows))
    return RecordedIteration(number, name, timeline)


def write(directory: Path, one: RecordedIteration) -> str:
    """As a training writes it, or what of it is read here."""
    timeline = json.loads(one.timeline.to_json())
    nothing: list[Any] = [[] for _ in one.timeline.ranks]
    record = {"schedule": one.schedule, "iteration": one.number, "timeline": timeline, "waits": nothing, "memory": []}
    path = directory / f"iteration_{one.number:07d}.json"
    path.write_text(json.dumps(record | {"planned": {"costs": "of this iteration", "timeline": timeline, "memory": []}}))
    return str(path)


def test_interlocking_iterations_start_once_per_span() -> None:
    span = iteration(0, 0, "zb-v", 4, 8).timeline.span
    joined = Consecutive(tuple(iteration(5 + n, n * span, "zb-v", 4, 8) for n in range(4)))
    assert joined.period == pytest.approx(span)
    assert joined.timeline.makespan < 4 * joined.iterations[0].timeline.makespan, "they overlap"
    assert [len(row) for row in joined.timeline.ranks] == [4 * 8 * 2 * 3] * 4
    assert joined.title == "zb-v, iterations 5 to 8"


def test_text_tells_iterations_apart() -> None:
    joined = Consecutive((iteration(9, 0), iteration(10, 9), iteration(11, 18)))
    assert render(joined.timeline, width=36, consecutive=joined).splitlines() == [
        "       9        10       11",
        "rank 0 FF..B=.B=ff..b=.b=FF..B=.B=",
        "rank 1 .FB=FB=...fb=fb=...FB=FB=..",
    ]
    narrow = render(joined.timeline, width=20, consecutive=joined).splitlines()
    assert " ".join(narrow[3:]) == "left out: passes too short for a column; 6 of 24 passes", "all of the time is there"
    wide = render(joined.timeline, width=200, consecutive=joined).splitlines()
    assert wide[0].split() == ["iteration", "9", "iteration", "10", "iteration", "11"]
    assert wide[0].index("iteration 10") == wide[1].index("f0")


@pytest.mark.parametrize("microbatches", [2, 400], ids=["boxes", "columns"])
def test_a_picture_names_every_iteration(tmp_path: Path, microbatches: int) -> None:
    length = 4.5 * microbatches + 10
    joined = Consecutive(tuple(iteration(n, n * length, microbatches=microbatches) for n in (5, 6)))
    path = tmp_path / "picture.svg"
    draw({joined.title: joined.timeline, "alone": joined.iterations[0].timeline}, path, consecutive={joined.title: joined})
    text = path.read_text()
    for label in ("1f1b, iterations 5 to 6", joined.summary(), "iteration 5", "iteration 6"):
        assert f"<!-- {label} -->" in text
    assert ("columns: share of time" in text) == (microbatches == 400)


def test_draw_joins_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path, iteration(n, 9 * n)) for n in (5, 6)]
    assert main(["draw", *files, "--consecutive"]) == 0
    assert "on average an iteration every 9 s (span 9 s, bubble 33.3%)" in capsys.readouterr().out
    assert main(["draw", *files, "--consecutive", "-o", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").stat().st_size > 1000


REFUSALS = [
    ([(5, 0, 2)], [], "consecutive iterations are at least two, got 1"),
    ([(5, 0, 2), (7, 20, 2)], [], "iteration 7 does not follow iteration 5: name each from the first to the last"),
    ([(6, 20, 2), (5, 0, 2)], [], "iteration 5 does not follow iteration 6"),
    ([(5, 0, 2), (6, 20, 4)], [], "iteration 5 ran on 2 ranks and iteration 6 on 4: name files of one run"),
    ([(5, 0, 2), (6, 7, 2)], [], "rank 0 begins iteration 6 2 s before it ends iteration 5: they are not of one run"),
    ([(5, 0, 2), (6, 9, 2)], ["-o", "page.html"], "must end in .png or .svg"),
    ([(5, 0, 2), (6, 9, 2)], ["--memory"], "--memory is for schedules, and --consecutive joins recorded iterations"),
]


@pytest.mark.parametrize(("written", "flags", "words"), REFUSALS, ids=[words[:30] for *_, words in REFUSALS])
def test_what_cannot_be_one_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], written: list[tuple[int, float, int]], flags: list[str], words: str
) -> None:
    files = [write(tmp_path, iteration(number, begin, ranks=ranks)) for number, begin, ranks in written]
    assert words in refusal(capsys, "draw", *files, "--consecutive", *flags)


def test_iterations_of_other_schedules_are_of_other_runs() -> None:
    with pytest.raises(ValueError, match="iteration 5 ran zb-v and iteration 6 1f1b: name files of one run"):
        Consecutive((replace(iteration(5, 0), schedule="zb-v"), iteration(6, 9)))


def test_what_is_no_recorded_iteration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, iteration(5, 0))
    planned, plain, empty = (str(tmp_path / name) for name in ("planned.json", "plain.json", "empty.json"))
    main([*"plan --schedule 1f1b --pp 2 --microbatches 2 --cost F=1,B=1,W=1,comm=0 -o".split(), planned])
    Path(plain).write_text(iteration(6, 9).timeline.to_json())
    Path(empty).write_text('{"iteration": 6, "timeline": {"ranks": [[["F0.0", 1, 2]], []]}}')
    for path, words in (
        (planned, "is a schedule, and only iterations that ran are joined"),
        (plain, "no iteration's number is in there"),
        (empty, "rank 1 ran no pass in iteration 6"),
    ):
        assert words in refusal(capsys, "draw", good, path, "--consecutive")


def test_the_latest_are_those_without_a_pause_or_a_gap() -> None:
    run = [iteration(n, 9 * n) for n in range(4)]
    assert latest(run) == Consecutive(tuple(run))
    assert latest(run[:1]) is None and latest([]) is None
    paused = iteration(4, 9 * 4 + 20)
    assert latest([*run, paused]) is None, "as after an evaluation"
    assert latest([*run, paused, iteration(5, 9 * 5 + 20)]) == Consecutive((paused, iteration(5, 9 * 5 + 20)))
    assert latest([run[0], *run[2:]]) == Consecutive(tuple(run[2:])), "one was not recorded"
    assert latest([iteration(1, 0, ranks=4), *run[2:]]) == Consecutive(tuple(run[2:])), "an earlier run"


def test_training_ends_with_a_picture_of_its_last_iterations(tmp_path: Path) -> None:
    from megatron.pipeline.flags.settings import Settings
    from megatron.pipeline.trainer.program import _last_words

    args = Settings.of(Namespace(tensorboard_dir=None, save=None, pipeline_trace=str(tmp_path)))
    log: Any = SimpleNamespace(first_loss=None)
    write(tmp_path, iteration(1, 0))
    assert "consecutive" not in _last_words(args, log)
    for n in range(2, 7):
        write(tmp_path, iteration(n, 9 * n))
    assert _last_words(args, log).endswith(f"\n picture of consecutive iterations: {tmp_path}/consecutive.png")
    assert (tmp_path / "consecutive.png").stat().st_size > 1000
