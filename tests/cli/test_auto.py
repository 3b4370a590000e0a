"""``mpipe plan --schedule auto`` and what a bound is within: what was chosen, for what, and why."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
from command import output, refusal, report

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
    alone = report(capsys, f"plan --schedule {auto['schedule']} --pp 3 --microbatches 6 --memory-limit 3")
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


@pytest.mark.parametrize(("name", "memory"), [("v-half", 3), ("zb-auto", 4), ("1f1b-v", 3)])
def test_a_bound_is_within_the_memory_that_the_schedule_holds(
    name: str, memory: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = f"plan --schedule {name} --pp 4 --microbatches 8"
    data = report(capsys, size)
    assert data["memory_limit"] == memory
    assert max(data["peak_activation"]) == memory
    for field, objective in (("lower_bound", "span"), ("makespan_lower_bound", "makespan")):
        assert data[field] == lower_bound(planning.Request(name, 4, 8, objective=objective).problem())
    assert f"no order within {memory} microbatches has a shorter makespan" in output(capsys, size)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    again = report(capsys, f"plan {path}")
    assert again == {key: value for key, value in data.items() if key != "plan_seconds"}


def test_simulate_takes_an_objective(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(report(capsys, "plan --schedule zb-h2 --pp 4 --microbatches 8")))
    assert "has a shorter makespan" in output(capsys, f"plan {path}")
    assert "has a shorter span" in output(capsys, f"plan {path} --objective span")
    path.write_text(json.dumps(report(capsys, f"plan {path} --objective span")))
    assert report(capsys, f"plan {path}")["objective"] == "span"


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
