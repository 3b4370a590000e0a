"""``mpipe`` with ``--offload``: what is planned with activations in host memory, read back, and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import output, refusal, report

from megatron.pipeline.cli import main

PLAN = "plan --schedule interleaved --pp 4 --microbatches 8 "


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_plan_says_what_it_moved(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory falls, the span does not grow, and what is told adds up."""
    plain = report(capsys, PLAN)
    planned = report(capsys, f"{PLAN} --offload {mode} --cost D2H=0.5,H2D=0.25")
    told = planned["offload"]
    assert told["mode"] == mode and told["k"] == pytest.approx(0.75 / 3)
    assert told["peak_without"] == plain["peak_activation"] and told["span_without"] == plain["span"] == planned["span"]
    assert max(planned["peak_activation"]) < max(told["peak_without"])
    assert planned["costs"]["D2H"] == 0.5 and planned["costs"]["H2D"] == 0.25
    assert planned["copies"] == {"both": 1.0, "switch": 1, "shared": 1.0}
    copies = [sum(work.startswith("D2H") for work in row) for row in planned["passes"]]
    assert told["moved"] == [count / 2 for count in copies]
    assert told["moved_share"] == [count / 16 for count in copies]
    assert all(0 < held <= moved for held, moved in zip(told["host_peak"], told["moved"], strict=True))
    assert mode == "full" or max(told["moved_share"]) <= 0.5
    assert "offload" not in plain and "copies" not in plain and "D2H" not in plain["costs"]


def test_k_is_1_where_nobody_says(capsys: pytest.CaptureFixture[str]) -> None:
    planned = report(capsys, f"{PLAN} --offload full --cost F=2,B=3,W=1")
    assert planned["offload"]["k"] == pytest.approx(1)
    assert planned["costs"]["D2H"] == planned["costs"]["H2D"] == 3
    for given, both in (("D2H=2", 4), ("D2H=0", 0), ("H2D=0.5", 1), ("D2H=1,H2D=0.5", 1.5)):
        assert report(capsys, f"{PLAN} --offload full --cost {given}")["offload"]["k"] == pytest.approx(both / 3)


def test_k_counts_what_recomputing_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    planned = report(capsys, f"{PLAN} --offload full --cost D2H=1 --recompute all --activation B=1,R=0.25")
    assert planned["offload"]["k"] == pytest.approx(2 * 0.25 / 4)
    assert max(planned["offload"]["moved"]) <= 8 * 0.25
    assert max(planned["offload"]["moved_share"]) <= 1


def test_copies_that_disturb_each_other_move_less(capsys: pytest.CaptureFixture[str]) -> None:
    alone = report(capsys, f"{PLAN} --offload full")
    shared = report(capsys, f"{PLAN} --offload full --copy both=0.7,switch=2,shared=0.5")
    assert shared["copies"] == {"both": 0.7, "switch": 2, "shared": 0.5}
    assert sum(shared["offload"]["moved"]) < sum(alone["offload"]["moved"])
    assert shared["span"] == alone["span"]


@pytest.mark.parametrize(
    "flags",
    [
        "--cost F=1,B=1.5,W=0.5,D2H=0.6,H2D=0.4 --copy both=0.8,switch=2,shared=0.6",
        "--last-stage F=0.5,activation=0.25 --cost D2H=0.3",
        "--host-memory-limit 3 --memory-limit 4.5 --objective makespan",
    ],
)
def test_what_a_plan_says_is_read_back(flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "away.json"
    planned = report(capsys, f"{PLAN} --offload full {flags}")
    file.write_text(json.dumps(planned))
    again = report(capsys, f"plan {file}")
    planned.pop("plan_seconds")
    assert again == planned
    assert "obeys every rule" in output(capsys, f"plan {file}")
    assert " H2D " in output(capsys, f"plan {file} --text")
    assert max(planned["offload"]["host_peak"]) <= planned["offload"].get("host_limit", 99)


def test_a_schedule_from_a_file_is_offloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A user's own, or one with other copies; and without them it is what it was."""
    plain, away = tmp_path / "plain.json", tmp_path / "away.json"
    output(capsys, f"{PLAN} -o {plain}")
    output(capsys, f"plan {plain} --offload full --cost D2H=0.5 -o {away}")
    planned = report(capsys, f"{PLAN} --offload full --cost D2H=0.5")
    assert json.loads(away.read_text())["passes"] == planned["passes"]
    assert report(capsys, f"plan {away}")["offload"] == planned["offload"]
    half = report(capsys, f"plan {away} --offload selective")
    assert half["offload"]["mode"] == "selective" and sum(half["offload"]["moved"]) < sum(planned["offload"]["moved"])
    assert report(capsys, f"plan {away} --offload off")["passes"] == json.loads(plain.read_text())["passes"]
    # The limit is of what is left on the device.
    within = report(capsys, f"plan {plain} --offload full --cost D2H=0.5 --memory-limit 3")
    assert max(within["peak_activation"]) <= 3 < max(within["offload"]["peak_without"])
    assert sum(within["offload"]["moved"]) < sum(planned["offload"]["moved"])


def test_copies_by_hand_have_costs_and_no_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.json"
    passes = [["F0.0", "F1.0", "D2H0.0", "H2D0.0", "BW0.0", "BW1.0"]]
    file.write_text(json.dumps({"schedule": "own", "placement": [[0]], "microbatches": 2, "passes": passes}))
    found = report(capsys, f"plan {file}")
    assert found["offload"] == {
        "mode": None,
        "k": 1.0,
        "moved": [1.0],
        "moved_share": [0.5],
        "peak_without": [2.0],
        "host_peak": [1.0],
        "span_without": 6.0,
    }
    assert found["span"] == 8.0  # the copies stand in the way, 1.5 each, where F1 takes 1


def test_the_report_with_offload(capsys: pytest.CaptureFixture[str]) -> None:
    told = output(capsys, f"{PLAN} --offload full --cost D2H=0.5")
    rows = {line.split("  ")[1]: line for line in told.splitlines() if line.startswith("  ")}
    assert {"memory", "host memory", "moved", "k", "without"} <= rows.keys()
    assert "span 28.5, this one is 0.0% longer" in rows["without"]
    assert "A100" not in told


def test_compare_says_what_each_moved(capsys: pytest.CaptureFixture[str]) -> None:
    given = "compare --pp 4 --microbatches 8 --schedules 1f1b,interleaved,seq-1f1b --chunks 2 --offload full --cost D2H=0.5"
    head, *lines = output(capsys, given).splitlines()
    assert head.split()[-7:] == "without host moved above bound plan s".split()
    assert lines[0].startswith("interleaved") and "79.7%" in lines[0]
    rows = report(capsys, given)
    assert all(max(row["peak_activation"]) < max(row["offload"]["peak_without"]) for row in rows["schedules"])
    assert all(row["gap"] >= -1e-9 and row["makespan_gap"] >= -1e-9 for row in rows["schedules"])
    assert "slices" in rows["refused"]["seq-1f1b"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--offload half", "--offload: invalid choice: 'half' (choose from"),
        ("--offload full --cost D2H=-1", "D2H=-1.0: expected a number that is not negative, 0 or between 1e-100 and 1e100"),
        ("--cost D2H=1", "--cost D2H=.. is of copies to host memory: give --offload selective or full, or leave it out"),
        ("--copy both=0.9", "--copy is of copies to host memory: give --offload selective or full, or leave it out"),
        ("--host-memory-limit 3", "--host-memory-limit 3.0 is for what --offload moves: give --offload selective or full"),
        ("--offload full --host-memory-limit x", "'x': expected a number of microbatches of at least 0"),
        ("--offload full --copy shared=0.5", "shared=0.5 is of ranks behind one switch: say how many share one, as in switch=2"),
        ("--offload full --copy both=0.2", "0.5 (they take turns) to 1 (they do not disturb each other), got 0.2"),
        ("--offload full --copy switch=1.5", "switch=1.5: expected a number of neighbouring ranks that share one switch"),
        ("--offload full --copy fast=1", "unknown cost 'fast'; allowed are both, switch, shared"),
        ("--offload full --memory-limit 0.25", "above the limit of 0.25"),
    ],
)
def test_bad_input_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refusal(capsys, PLAN, flags)


@pytest.mark.parametrize("offload", ["x", {"mode": "half"}, {"mode": "full", "host_limit": -1}, {"host_limit": 3}])
def test_a_damaged_file_is_named(offload: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.json"
    one = {"schedule": "own", "placement": [[0]], "microbatches": 1, "passes": [["F0.0", "BW0.0"]], "offload": offload}
    file.write_text(json.dumps(one))
    assert "own.json" in refusal(capsys, "plan", str(file))


def test_a_file_is_offloaded_below_what_it_was_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that stands for an amount of memory is no limit of the user's."""
    path = str(tmp_path / "plain.json")
    assert main(["plan", "--schedule", "v-half", "--pp", "4", "--microbatches", "8", "-o", path]) == 0
    capsys.readouterr()
    assert main(["plan", path, "--offload", "full", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert max(data["peak_activation"]) < max(data["offload"]["peak_without"])
    assert "memory_limit" not in data


def test_a_limit_that_host_memory_stands_in_the_way_of(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --schedule interleaved --pp 4 --microbatches 8 --offload full --memory-limit 3 --host-memory-limit 1"
    assert "or raise the limit of host memory, 1" in refusal(capsys, words)
