"""``mpipe plan --schedule auto`` and what a bound is within: what was chosen, for what, and why."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command import output, refusal

from megatron.pipeline.cli import main
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.planning.choose import best
from megatron.pipeline.planner.planning.planned import Variant
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.optimum.bound import lower_bound
from megatron.pipeline.planner.schedule.rules.verify import verify

AUTO = "plan --schedule auto --pp 3 --microbatches 6 --chunks 2"


def told(capsys: pytest.CaptureFixture[str], arguments: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(output(capsys, f"{arguments} --json"))
    return data


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("auto") / "auto.json"
    assert main(f"{AUTO} --memory-limit 3 -o {path}".split()) == 0
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_auto_is_the_object_of_its_choice_with_all_candidates(auto: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    candidates = auto.pop("candidates")
    assert {row["schedule"] for row in candidates} == set(families.FAMILIES)
    (best,) = (row for row in candidates if row["why_not"] is None)
    single = [row["makespan"] for row in candidates if "makespan" in row]
    assert best["makespan"] == auto["makespan"] <= 1.001 * min(single)
    alone = told(capsys, f"plan --schedule {auto['schedule']} --pp 3 --microbatches 6 --memory-limit 3")
    del auto["plan_seconds"], alone["plan_seconds"]
    assert auto == alone
    schedule = Schedule.from_json(json.dumps(auto))
    verify(schedule, memory_limit=3)


def test_the_table_says_why_not(auto: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, f"{AUTO} --memory-limit 3")
    table, note, summary, *_ = text.split("\n\n")
    assert note.startswith("above bound: ")
    heads, *rows = table.splitlines()
    assert heads.split() == "schedule makespan bubble span memory above bound why not".split()
    assert len(rows) == len(families.FAMILIES)
    name = auto["schedule"]
    assert rows[0].split()[0] == name and rows[0].endswith("  -")
    assert summary.startswith(f"{name}: 3 ranks")
    by_name = {row.split()[0]: row for row in rows}
    assert by_name["dualpipe-v"].endswith("needs 3.5 microbatches, limit 3")
    assert by_name["1f1b"].endswith("% longer")


def test_the_table_is_about_the_objective(capsys: pytest.CaptureFixture[str]) -> None:
    heads, *rows = output(capsys, f"{AUTO} --objective span").split("\n\n")[0].splitlines()
    assert heads.split()[:5] == "schedule span bubble makespan memory".split()
    (h2,) = (row.split() for row in rows if row.startswith("zb-h2 "))
    # 6 microbatches of 3 passes; for the makespan p - 1 = 2 more, which the span does not count.
    assert h2[1:4] == ["18", "0.0%", "20"]


def test_the_limit_that_a_refusal_names_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs = tmp_path / "costs.json"
    held = (1 / 3, 7.7, 2.0, 1.0, 5.0, 1e-7 + 4 / 3)
    stages = [{"forward": 1, "backward": 1, "weight": 1, "activation": each} for each in held]
    costs.write_text(json.dumps({"stages": stages}))
    size = f"--pp 3 --microbatches 6 --costs {costs} --memory-limit"
    line = refusal(capsys, f"plan --schedule auto {size} 1")
    least = line.split("needs is ")[1].split(",")[0]
    told(capsys, f"plan --schedule auto {size} {least}")
    refusal(capsys, f"plan --schedule auto {size} {0.999 * float(least)}")
    line = refusal(capsys, f"plan --schedule interleaved --chunks 2 {size} 1")
    assert "this schedule needs" in line
    least = line.split("raise the limit to ")[1].split(",")[0]
    told(capsys, f"plan --schedule interleaved --chunks 2 {size} {least}")
    refusal(capsys, f"plan --schedule interleaved --chunks 2 {size} {0.999 * float(least)}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{AUTO} --group 2", "--group is for single families: leave it out with --schedule auto"),
        (f"{AUTO} --splits 2", "--splits is for single families"),
        (
            f"{AUTO} --memory-limit 0.2",
            "no schedule fits within a memory of 0.2 microbatches: the least that one needs is 1, for zb-auto v=2;",
        ),
        ("plan --schedule auto --pp 99999999999 --microbatches 3", "over 3000000 passes"),
        ("compare --pp 4 --microbatches 3 --schedules auto", "auto is the best of all schedules: leave --schedules out"),
    ],
)
def test_bad_input(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, arguments)


def test_candidates_are_counted_while_they_are_planned() -> None:
    reported: list[tuple[int, int]] = []
    best(Request("auto", 2, 2), [Variant("1f1b"), Variant("zb-h1")], lambda done, known: reported.append((done, known)))
    assert reported == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize(
    ("name", "memory"), [("v-half", 3), ("v-min", 2), ("zb-v", 4), ("v-auto", 4), ("zb-auto", 4), ("1f1b-v", 3)]
)
def test_a_bound_is_within_the_memory_that_the_schedule_holds(
    name: str, memory: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = f"plan --schedule {name} --pp 4 --microbatches 8"
    data = told(capsys, size)
    assert data["memory_limit"] == memory
    assert max(data["peak_activation"]) == memory
    for field, objective in (("lower_bound", "span"), ("makespan_lower_bound", "makespan")):
        assert data[field] == lower_bound(planning.Request(name, 4, 8, objective=objective).problem())
    assert f"no order within {memory} microbatches has a shorter makespan" in output(capsys, size)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    again = told(capsys, f"plan {path}")
    assert again == {key: value for key, value in data.items() if key != "plan_seconds"}


def test_a_limit_above_what_a_name_stands_for_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    size = "plan --pp 4 --microbatches 8 --schedule"
    assert told(capsys, f"{size} v-half --memory-limit 9")["memory_limit"] == 3
    assert told(capsys, f"{size} zb-v --memory-limit 5")["memory_limit"] == 5
    assert "memory_limit" not in told(capsys, f"{size} zb-h1 --memory-limit inf")


def test_simulate_takes_an_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(told(capsys, "plan --schedule zb-h2 --pp 4 --microbatches 8")))
    assert "has a shorter makespan" in output(capsys, f"plan {path}")
    assert "has a shorter span" in output(capsys, f"plan {path} --objective span")
    path.write_text(json.dumps(told(capsys, f"plan {path} --objective span")))
    assert told(capsys, f"plan {path}")["objective"] == "span"


def test_a_package_that_is_not_installed_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output(capsys, f"plan --schedule 1f1b --pp 2 --microbatches 2 -o {tmp_path}/plan.json")
    line = refusal(capsys, f"plan {tmp_path}/plan.json --draw {tmp_path}/plan.png")
    assert line.startswith("mpipe: this needs the package matplotlib") and "not installed" in line


def test_the_collector_of_cycles_is_as_it_was_afterwards(capsys: pytest.CaptureFixture[str]) -> None:
    assert gc.isenabled()
    output(capsys, "plan --schedule 1f1b --pp 2 --microbatches 2")
    refusal(capsys, "plan --schedule what")
    assert gc.isenabled()
    gc.disable()
    try:
        output(capsys, "plan --schedule 1f1b --pp 2 --microbatches 2")
        assert not gc.isenabled()
    finally:
        gc.enable()
