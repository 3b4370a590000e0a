"""Iterations of a run, joined on one time axis."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.view.consecutive import joined, recorded

EPOCH = 1_800_000_000.0


def iteration(number: int, begin: float, name: str = "1f1b", ranks: int = 2, microbatches: int = 2) -> str:
    """What is read of the record of one whose first pass on rank 0 starts so many seconds after the epoch."""
    schedule = planning.plan(name, ranks, microbatches)
    shift = EPOCH + begin
    rows = simulate(schedule, uniform(schedule.placement)).ranks
    timeline = Timeline(tuple(tuple(Timed(work, shift + start, shift + end) for work, start, end in row) for row in rows))
    return json.dumps({"schedule": name, "iteration": number, "timeline": json.loads(timeline.to_json())})


def test_interlocking_iterations_start_once_per_span() -> None:
    alone = Timeline.from_json(iteration(0, 0, "zb-v", 4, 8))
    title, whole = joined([recorded(iteration(5 + n, n * alone.span, "zb-v", 4, 8)) for n in range(4)])
    assert title == f"zb-v, iterations 5 to 8: on average one every {alone.span:.4g} s (span {alone.span:.4g} s, bubble 0.0%)"
    assert whole.makespan < 4 * alone.makespan, "they overlap"
    assert [len(row) for row in whole.ranks] == [4 * 8 * 2 * 3] * 4


def test_draw_joins_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = [str(tmp_path / f"iteration_{n}.json") for n in (5, 6)]
    for n, file in zip((5, 6), files, strict=True):
        Path(file).write_text(iteration(n, 9 * n))
    read = Mock(side_effect=Timeline.from_json)
    with monkeypatch.context() as patch:
        patch.setattr(Timeline, "from_json", read)
        assert main(["plan", *files, "--consecutive"]) == 0
    assert read.call_count == len(files), "each once"
    assert "iterations 5 to 6: on average one every 9 s (span 9 s, bubble 33.3%)" in capsys.readouterr().out
    for suffix in ("png", "html"):
        assert main(["plan", *files, "--consecutive", "--draw", str(tmp_path / f"p.{suffix}")]) == 0
        assert (tmp_path / f"p.{suffix}").stat().st_size > 1000
    Path(files[1]).write_text("{}")
    assert (
        'iteration_6.json: not a timeline: expected {"ranks": [[["F0.0", start, end], ...], ...]} (\'ranks\' is missing)'
        in refusal(capsys, "plan", *files, "--consecutive")
    )


EMPTY = '{"iteration": 6, "schedule": "1f1b", "timeline": {"ranks": [[["F0.0", 1, 2]], []]}}'


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ([iteration(5, 0)], "iterations 5 do not follow one another"),
        ([iteration(5, 0), iteration(7, 20)], "iterations 5, 7 do not follow"),
        ([iteration(6, 20), iteration(5, 0)], "iterations 6, 5 do not follow"),
        ([iteration(5, 0), '{"ranks": [[]]}'], "iterations 5, None do not follow"),
        ([iteration(5, 0), iteration(6, 20, ranks=4)], "on several numbers of ranks"),
        ([iteration(5, 0, "zb-h1"), iteration(6, 20)], "under several schedules"),
        ([iteration(5, 0), iteration(6, 7)], "rank 0 begins an iteration before it ends the one before"),
        ([iteration(5, 0), EMPTY], "rank 0 begins an iteration before"),
    ],
)
def test_what_cannot_be_one_run_is_refused(texts: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        joined(list(map(recorded, texts)))
