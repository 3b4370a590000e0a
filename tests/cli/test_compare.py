"""``mpipe compare`` and ``mpipe export``: every schedule beside the others, and in other formats."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import output, refusal, report

from megatron.pipeline.cli import main
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.schedule import Schedule

COMPARE = "compare --pp 4 --microbatches 8 --cost F=1,B=1.2,W=0.8,comm=0.1"


def test_every_schedule_is_planned_as_plan_does_or_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, "compare --pp 4 --microbatches 3 --cost F=1,B=1.2,W=0.8,comm=0.1 --memory-limit 2.5")
    labels = [row["label"] for row in data["schedules"]]
    assert [*labels, *data["refused"]] == list(dict.fromkeys([*labels, *data["refused"]]))
    assert {label.split()[0] for label in (*labels, *data["refused"])} == set(families.FAMILIES)
    assert {"interleaved v=2", "interleaved v=4", "gis v=2", "gis v=2 g=3", "zb-auto v=1"} <= {*labels, *data["refused"]}
    assert "above the limit of 2.5; this schedule needs 3 there" in data["refused"]["zb-h2"]
    for row in data["schedules"]:
        assert row["memory"] == max(row["peak_activation"]) <= 2.5
        assert row["memory_of_1f1b"] == row["memory"] / 3
        if row["label"] in ("1f1b", "v-min", "gis-h v=3", "zb-auto v=2"):
            chunks = f" --chunks {row['chunks']}" if "=" in row["label"] else ""
            command = f"{COMPARE} --microbatches 3 --memory-limit 2.5 --schedule {row['schedule']}{chunks} --json"
            planned: dict[str, Any] = json.loads(output(capsys, command.replace("compare", "plan")))
            shared = row.keys() & planned.keys() - {"plan_seconds"}
            assert {
                "span",
                "makespan",
                "bubble_rate",
                "span_bubble_rate",
                "makespan_bubble_rate",
                "peak_activation",
                "gap",
            } <= shared
            assert {key: row[key] for key in shared} == {key: planned[key] for key in shared}


@pytest.mark.parametrize("objective", ["span", "makespan"])
def test_the_best_by_the_objective_is_first(objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = f"compare --pp 4 --microbatches 8 --schedules 1f1b,zb-h2,zb-h1 --objective {objective} --json"
    rows = json.loads(output(capsys, command))["schedules"]
    assert [row[objective] for row in rows] == sorted(row[objective] for row in rows)
    # ZB-H2 is shorter in the span; a single iteration of it takes as long as one of ZB-H1, with more memory.
    assert rows[0]["schedule"] == {"span": "zb-h2", "makespan": "zb-h1"}[objective]


def test_memory_of_1f1b_counts_the_extras_of_its_own_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = f"{COMPARE} --first-stage activation=0.5 --schedules 1f1b,zb-h1"
    rows = report(capsys, f"{extra}")
    assert rows["peak_of_1f1b"] == 4 * 1.5
    assert {row["schedule"]: row["memory_of_1f1b"] for row in rows["schedules"]}["1f1b"] == 1
    costs = tmp_path / "costs.json"
    stage = {"forward": 1, "backward": 1, "weight": 1, "activation": 3}
    costs.write_text(json.dumps({"stages": [stage] * 8}))
    schedules = "--schedules 1f1b,interleaved"
    data = report(capsys, f"compare --pp 4 --microbatches 8 --costs {costs} {schedules}")
    assert data["peak_of_1f1b"] == 4 * 2 * 3
    assert {row["schedule"]: row["memory_of_1f1b"] for row in data["schedules"]}["1f1b"] == 1
    assert data["refused"] == {}


def test_several_numbers_of_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, f"{COMPARE} --schedules interleaved,1f1b --chunks 2,4,1")
    assert [(row["label"], row["chunks"]) for row in data["schedules"]] == [
        ("interleaved v=4", 4),
        ("interleaved v=2", 2),
        ("1f1b", 1),
    ]
    assert "at least 2 chunks per rank, got 1" in data["refused"]["interleaved v=1"]


def test_the_table_is_plain_when_piped(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, f"{COMPARE} --schedules 1f1b,zb-h1,dualpipe-v --memory-limit 4").splitlines()
    assert lines[0].split() == "schedule makespan bubble span bubble memory of 1F1B above bound plan s".split()
    assert [line.split()[0] for line in lines[1:3]] == ["zb-h1", "1f1b"]
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[4].startswith("above bound: how far the makespan is above a proven lower bound")
    assert lines[6:] == ["not possible here:", "  dualpipe-v: needs 4.5 microbatches, limit 4"]
    assert all(map(str.isascii, lines))


def test_files_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, page = tmp_path / "table.json", tmp_path / "page.html"
    assert output(capsys, f"{COMPARE} --schedules 1f1b,zb-h1 -o {table}") == f"wrote {table}\n"
    assert [row["schedule"] for row in json.loads(table.read_text())["schedules"]] == ["zb-h1", "1f1b"]
    shown = output(capsys, f"{COMPARE} --schedules 1f1b,zb-h1 -o {page}")
    assert shown.startswith("schedule ") and shown.endswith(f"\nwrote {page}\n")
    assert "zb-h1" in page.read_text()
    plot = tmp_path / "pareto.svg"
    shown = output(capsys, f"{COMPARE} --schedules 1f1b,zb-h1,dualpipe-v --memory-limit 4 -o {plot}")
    assert "dualpipe-v: needs 4.5" in shown and shown.endswith(f"\nwrote {plot}\n")
    assert "<!-- zb-h1 -->" in plot.read_text() and "a rank (microbatches) -->" in plot.read_text()


def test_refusals_with_one_reason_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    costs, plot = tmp_path / "costs.json", tmp_path / "plot.svg"
    costs.write_text(json.dumps({"stages": [{"forward": 1, "backward": 1, "weight": 1, "activation": 3}] * 3}))
    size = f"compare --pp 3 --microbatches 3 --costs {costs}"
    names = "1f1b,zb-h1,v-half,v-min"
    limited = output(capsys, f"{size} --schedules {names} --memory-limit 6 -o {plot}")
    lines = limited.split("not possible here:\n")[1].splitlines()
    assert lines == ["  1f1b, zb-h1: needs 9, limit 6", f"wrote {plot}"]
    assert "a rank (in the costs file's unit) -->" in plot.read_text()
    few = refusal(capsys, f"{size} --schedules interleaved,gis --chunks 1")
    assert few == "mpipe: no schedule is possible: needs at least 2 chunks per rank, got 1\n"


def test_compare_recomputes_and_fuses_as_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--recompute 0 --fuse 1-3 --activation B=1,R=0.25"
    (row,) = report(capsys, f"{COMPARE} --schedules zb-h1 {flags}")["schedules"]
    plan = json.loads(output(capsys, f"{COMPARE} --schedule zb-h1 {flags} --json".replace("compare", "plan")))
    assert (row["span"], row["peak_activation"]) == (plan["span"], plan["peak_activation"])
    (plain,) = report(capsys, f"{COMPARE} --schedules zb-h1")["schedules"]
    assert row["span"] > plain["span"] and row["peak_activation"][0] < plain["peak_activation"][0]
    text = output(capsys, f"{COMPARE} --schedules zb-h1,zb-v --recompute 7")
    assert "zb-h1: --recompute 7: there is no stage 7; the stages are 0..3" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"{COMPARE} --schedules 1f1b,zb", "unknown schedule 'zb'; known are 1f1b"),
        (f"{COMPARE} -o table.txt", "cannot write table.txt: the file name must end in .json"),
        (
            f"{COMPARE} --schedules 1f1b --memory-limit 3",
            "no schedule fits within a memory of 3 microbatches: the least that one needs is 4, for 1f1b;",
        ),
    ],
)
def test_bad_comparisons(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, arguments)


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert main(["plan", *"--schedule zb-h1 --pp 2 --microbatches 3 --cost F=1,B=2,comm=0.5 --json -o".split(), str(path)]) == 0
    return path


def test_export_and_back(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, back, trace = (tmp_path / name for name in ("order.csv", "back.json", "zb.trace.json"))
    for source, target in ((planned, table), (table, back), (planned, trace)):
        assert output(capsys, f"export {source} -o {target}") == f"wrote {target}\n"
    original, again = Schedule.from_json(planned.read_text()), Schedule.from_json(back.read_text())
    assert (again.passes, again.placement, again.name) == (original.passes, original.placement, "order")
    given = json.loads(planned.read_text())
    told = report(capsys, f"plan {table} --cost F=1,B=2,comm=0.5")
    assert told["span"] == given["span"]
    assert "order (2 ranks, 3 microbatches) obeys every rule" in output(capsys, f"plan {table}")
    drawn = output(capsys, f"plan {table} --cost F=1,B=2,comm=0.5 --text")
    assert drawn == output(capsys, f"plan {planned} --text").replace("zb-h1", "order")
    complete = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == 2 * 3 * 3


def test_a_recorded_timeline_becomes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, trace = tmp_path / "measured.json", tmp_path / "measured.trace.json"
    recorded.write_text('{"ranks": [[["F0.0", 100.5, 101.5], ["BW0.0", 101.5, 103]]]}')
    output(capsys, f"export {recorded} -o {trace}")
    assert len([event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]) == 2
    assert "missing schedule" in refusal(capsys, f"export {recorded} -o {tmp_path / 'x.csv'}")


def test_bad_exports(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "must end in .trace.json, .json or .csv" in refusal(capsys, f"export {planned} -o x.yaml")
    table = tmp_path / "bad.csv"
    table.write_text("0F0,0B0\n1F0,what\n")
    line = refusal(capsys, f"plan {table}")
    assert f"{table}: " in line and "what" in line
    again = tmp_path / "again.json"
    plan = "plan --schedule 1f1b --pp 2 --microbatches 2 --recompute all --json -o"
    output(capsys, f"{plan} {again}")
    assert "no kind for passes R, which 1f1b has" in refusal(capsys, f"export {again} -o {tmp_path / 'x.csv'}")


def test_pages(planned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    output(capsys, f"plan {planned} {planned} --memory --draw {page}")
    assert f"zb-h1 ({planned})" in page.read_text()
    assert "--memory is for pictures: add --draw" in refusal(capsys, f"plan {planned} --memory")


def test_the_command_line_imports_nothing_heavy() -> None:
    heavy = {"torch", "matplotlib", "ortools", "rich", "numba"}
    code = f"import sys, megatron.pipeline.cli; sys.exit(', '.join({heavy!r} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_compare_says_how_much_of_the_all_to_alls_is_exposed(capsys: pytest.CaptureFixture[str]) -> None:
    """Where there are any: with the parts of layers, or assumed ones."""
    compare = "compare --pp 2 --microbatches 6 --schedules 1f1b,dualpipe-v"
    parts = "--cost F.dispatch=0.2,F.experts=0.3,F.combine=0.2,B.combine=0.2,B.experts=0.3,B.dispatch=0.2,W.experts=0.4"
    assert "exposed" not in output(capsys, compare)

    def shares(flags: str) -> list[str]:
        heads, *rows = output(capsys, f"{compare} {flags}").splitlines()[:3]
        assert "exposed" in heads
        return [row.split()[-3] for row in rows]

    assert shares(parts) == ["100%", "100%"]
    hidden, plain = shares("--overlap-experts")
    assert 0 < int(hidden.rstrip("%")) < 60 and plain == "100%"
