"""Files that people give: what is wrong with them is one line, and nothing in them is taken silently."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.costmodel import device, origin
from megatron.pipeline.planner.schedule.core import reading
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline

READERS = [Costs.from_json, Schedule.from_json, Timeline.from_json, device.Device.from_json, origin.read]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"hop": 1, "stages": [], "hop": 2}', "'hop' is given twice: leave one of them out"),
        ('{"stages": [{"forward": 1, "forward": 2}]}', "'forward' is given twice"),
        ("[" * 100_000, "the JSON is nested too deeply"),
        ("{", "invalid JSON"),
    ],
)
def test_json_is_read_in_one_place(read: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^not [^\n]*$") as error:
        read(text)
    assert message in str(error.value)


def test_a_file_without_an_end_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST", 2**20)
    assert "/dev/zero has more than 1 MiB" in refusal(capsys, "plan", "/dev/zero")
    assert "/dev/zero has more than 1 MiB" in refusal(capsys, "memory", "--config", "/dev/zero")


def test_yaml_is_text_and_not_nested_without_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("[" * 20_000)
    assert f"--config {path}: nested too deeply" in refusal(capsys, "memory", "--config", str(path))
    path.write_bytes(b"\xf8" * 99)
    assert f"--config {path}: not a text file" in refusal(capsys, "memory", "--config", str(path))


def test_a_limit_that_is_too_large_is_not_taken_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    """``inf`` lifts the limit of a file; 1e400 is only read as that."""
    line = refusal(capsys, "plan", "--schedule", "zb-v", "--pp", "2", "--microbatches", "4", "--memory-limit", "1e400")
    assert "--memory-limit: '1e400': expected a number" in line


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(planning.plan("zb-v", 4, 4).to_json()) | {"schedule": "x\x1b[31mred"}))
    assert main(["plan", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "x\\x1b[31mred: 4 ranks" in printed
