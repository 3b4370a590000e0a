"""A slow link and a slow rank in the commands that take costs: planned for, drawn, said, kept in files, refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import output, refusal, report

from megatron.pipeline.planner.planning import document
from megatron.pipeline.planner.schedule.core.passes import Kind

PLAN = "plan --pp 4 --microbatches 8 --cost F=1,B=1,W=1,comm=0.5"
PASS = {"forward": 1.0, "backward": 1.0, "weight": 1.0}


def test_a_slow_rank_is_slow_in_all_its_chunks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    slow = report(capsys, PLAN, "--schedule zb-v --slow 2=1.5,3=0.5")
    seconds = [[stage[name] for name in ("forward", "backward", "weight")] for stage in slow["stage_costs"]["stages"]]
    assert seconds == [[0.5 * times] * 3 for times in (1, 1, 1.5, 0.5, 0.5, 1.5, 1, 1)]
    assert slow["makespan"] > report(capsys, PLAN, "--schedule zb-v")["makespan"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(slow))
    assert report(capsys, "plan", str(path))["makespan"] == slow["makespan"]
    assert report(capsys, "certify", str(path))["makespan_unlimited"] == slow["makespan"]


def test_a_slow_rank_is_slow_in_comparisons_and_in_what_else_its_passes_have(capsys: pytest.CaptureFixture[str]) -> None:
    compared = report(capsys, PLAN.replace("plan", "compare"), "--schedules 1f1b,zb-h1 --slow 0=2")["schedules"]
    for row in compared:
        assert row["makespan"] == report(capsys, PLAN, f"--schedule {row['label']} --slow 0=2")["makespan"] > 8 * 6
    stages = report(capsys, PLAN + ",BW=1.5,OPT=3", "--schedule zb-h1 --slow 1=2")["stage_costs"]["stages"]
    assert [(stage["fused"], stage["recompute"], stage["step"]) for stage in stages] == [(1.5, 1, 3), (3, 2, 6)] + 2 * [
        (1.5, 1, 3)
    ]


def test_a_plan_says_which_ranks_are_slow_and_none_is_slow_twice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, path, picture = f"{PLAN} --schedule zb-v", tmp_path / "plan.json", tmp_path / "plan.svg"
    slow = report(capsys, plan, "--slow 0=1.3,3=1.1")
    path.write_text(json.dumps(slow))
    assert slow["slow"] == {"rank 0": 1.3, "rank 3": 1.1} and "slow" not in report(capsys, plan)
    said = "rank 0 takes 1.3 times as long, rank 3 takes 1.1 times as long"
    text = output(capsys, "plan", str(path), "--draw", str(picture))
    assert f"2  in these costs: {said}\n" in text and "no order within 4 microbatches has" in text
    assert "<!-- 1.3x -->" in picture.read_text()
    assert output(capsys, "plan", str(path), "--text").splitlines()[1] == f"slow: {said}"
    output(capsys, "plan", str(path), "--draw", str(tmp_path / "plan.html"), "--trace", str(trace := tmp_path / "a.trace.json"))
    assert "this is a trace, for Perfetto: give the schedule itself" in refusal(capsys, "plan", str(trace))
    assert '"slow": "rank 0: 1.3, rank 3: 1.1"' in (tmp_path / "plan.html").read_text()
    again, usual = (report(capsys, "plan", str(path), f"--slow 0={times}") for times in (1.3, 1))
    assert (again["makespan"], again["slow"]) == (slow["makespan"], slow["slow"])
    assert usual["slow"] == {"rank 3": 1.1} and usual["stage_costs"]["stages"][0]["forward"] == pytest.approx(0.5)


def test_a_slow_rank_is_slow_in_its_shard_of_the_vocabulary_or_in_all_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for variant in ("1", "2", "interlaced"):
        path = tmp_path / f"{variant}.json"
        slow = report(capsys, PLAN, f"--schedule 1f1b --slow 2=1.5 --vocab-parallel {variant}")
        assert slow["lower_bound"] == pytest.approx(8 * 1.5 * (3 + 1)) and slow["span"] < 1.4 * slow["lower_bound"]
        path.write_text(json.dumps(slow))
        found = document.read(str(path), document.Changes()).timeline
        seconds = [{round(end - start, 9) for work, start, end in row if work.kind is Kind.S} for row in found.ranks]
        assert seconds == [{0.5}, {0.5}, {0.75}, {0.5}]
    whole = {"vocabulary": {"S": 0.5, "T": 0.25, "IF": 0.1}, "stages": [PASS] * 4}
    (path := tmp_path / "costs.json").write_text(json.dumps(whole))
    plan = f"plan --schedule zb-h1 --pp 4 --microbatches 8 --slow 0=2,3=1.5 --costs {path}"
    first, *_, last = report(capsys, plan)["stage_costs"]["stages"]
    assert [first["forward"], last["forward"], last["weight"]] == pytest.approx([2 * 1.4, 1.5 * 3, 1.5 * 2])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_layers_move_off_a_slow_rank(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{PLAN} --schedule {schedule} --slow 2=1.5 --cost F=1,B=1,W=1,comm=0.1"
    moved, even = report(capsys, flags, "--balance 32"), report(capsys, flags)
    layers, costs = moved["balance"]["layers"], moved["stage_costs"]["stages"]
    of_ranks = [layers] if len(layers) == 4 else [[one + other for one, other in zip(layers, reversed(layers), strict=True)][:4]]
    assert sum(layers) == 32 and of_ranks[0][2] <= 6
    seconds = {
        round(stage["forward"] / count / (1.5 if place in (2, 5) else 1), 9)
        for place, (stage, count) in enumerate(zip(costs, layers, strict=True))
    }
    assert seconds == {1 / 8}
    assert moved["makespan"] < even["makespan"] == pytest.approx(moved["balance"]["even"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_slow_link_is_planned_for_said_drawn_and_kept(
    schedule: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan, path = (
        f"plan --pp 4 --microbatches 8 --cost comm=0.5,comm[1-2]=3,comm[2to3]=2 --schedule {schedule}",
        tmp_path / "plan.json",
    )
    found = report(capsys, plan)
    assert found["makespan"] > report(capsys, PLAN, f"--schedule {schedule}")["makespan"]
    path.write_text(json.dumps(found))
    assert report(capsys, "plan", str(path))["makespan"] == found["makespan"]
    assert report(capsys, "certify", str(path))["makespan_unlimited"] == found["makespan"]
    said = "1-2 takes 3, 2to3 takes 2"
    assert f"2  whose messages do not take 0.5: {said}\n" in output(capsys, plan)
    assert output(capsys, plan, "--text").splitlines()[1] == f"slow: {said}"
    for name in ("plan.svg", "plan.html"):
        output(capsys, plan, "--draw", str(tmp_path / name))
    picture = (tmp_path / "plan.svg").read_text()
    assert "<!-- 1-2: 3 -->" in picture and "<!-- 2to3: 2 -->" in picture
    assert '"slow": "1-2: 3, 2to3: 2"' in (tmp_path / "plan.html").read_text()


def test_links_of_a_file_of_costs_and_on_top_of_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, plan = tmp_path / "costs.json", "plan --schedule 1f1b --pp 4 --microbatches 8"
    path.write_text(json.dumps({"hop": 0.5, "links": {"1-2": [1, 2]}, "stages": [PASS] * 4}))
    both = report(capsys, plan, "--costs", str(path), "--cost comm[2to3]=2")
    assert both["makespan"] == report(capsys, plan, "--cost comm=0.5,comm[1-2]=2,busy[1-2]=1,comm[2to3]=2")["makespan"]
    refused = refusal(capsys, plan, "--costs", str(path), "--cost comm[2to3]=2,F=2")
    assert "--costs says what every stage costs" in refused


def test_a_link_that_lacks_bandwidth_is_said_and_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, path = (
        "plan --pp 4 --microbatches 8 --schedule zb-v --cost comm=0.5,comm[1-2]=0.5,busy[1-2]=2,busy[2to3]=1",
        tmp_path / "plan.json",
    )
    found = report(capsys, plan)
    assert found["makespan"] > report(capsys, plan.replace("comm[1-2]=0.5,busy[1-2]=2", "comm[1-2]=2.5"))["makespan"]
    path.write_text(json.dumps(found))
    assert report(capsys, "plan", str(path))["makespan"] == found["makespan"]
    assert report(capsys, "certify", str(path))["makespan_unlimited"] == pytest.approx(found["makespan"])
    assert "whose messages do not take 0.5: 1-2 takes 2.5, 2to3 takes 1; in line: 1-2, 2to3\n" in output(capsys, plan)
    named = report(capsys, plan.replace("plan", "compare").replace("schedule", "schedules"))["schedules"]
    assert [row["makespan"] for row in named] == [found["makespan"]]


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ({"5-6": 1}, "there is no link 5-6: links of 4 ranks are 0-1 to 2-3, and 3-0"),
        ({"0-2": 1}, "there is no link 0-2"),
        ({"1-2": -1}, "link 1-2 must be a number, 0 or between 1e-100 and 1e100, got -1"),
        ({"1-2": [1, -1]}, "link 1-2 must be a number, 0 or between 1e-100 and 1e100, got -1"),
        ({"1-2": 1e300}, "got 1e+300"),
        ({"1-2": [1, 2, 3]}, "link 1-2: expected seconds, or [seconds, latency]"),
        ({"1+2": 1}, "a link is written 2-3"),
        ({"1-2": 1, "2to1": 2}, "link 2to1: a message from rank 2 to rank 1 is given twice"),
        ([1], "expected seconds by link"),
    ],
)
def test_wrong_links_of_a_file_are_one_line(links: object, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"hop": 0.5, "links": links, "stages": [PASS] * 4}))
    assert says in refusal(capsys, "plan --schedule 1f1b --pp 4 --microbatches 8 --costs", str(path))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--cost comm[3-4]=1", "there is no link 3-4: links of 4 ranks are"),
        ("--cost comm[1-1]=1", "a link is written 2-3"),
        ("--cost comm[1-2]=3,comm[2-1]=4", "link 2-1: a message from rank 2 to rank 1 is given twice"),
        ("--cost comm[1-2]=-1", "comm[1-2]=-1.0: expected a number that is not negative"),
        ("--cost comm[1-2]=1e101", "comm[1-2]=1e+101: expected"),
        ("--cost comm[1-2]=nan", "comm[1-2]=nan: expected"),
        ("--slow 4=1.3", "--slow 4=1.3: there is no rank 4; the ranks are 0 to 3"),
        ("--slow 1=0", "'1=0': expected each rank at most once, with how many times as long its passes take"),
        ("--slow 1=nan", "'1=nan': expected"),
        ("--slow 1=2,1=3", "'1=2,1=3': expected"),
        ("--slow=-1=2", "'-1=2': expected"),
        ("--slow 1.3", "'1.3': expected"),
        ("--slow 4=1.3 --balance 16", "there is no rank 4"),
    ],
)
def test_wrong_links_and_ranks_are_one_line(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, "plan --schedule 1f1b --pp 4 --microbatches 8", flags)


@pytest.mark.parametrize(("ranks", "says"), [(2, "links of 2 ranks are 0-1 alone"), (1, "links of 1 ranks are none")])
def test_few_ranks_have_few_links(ranks: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, f"plan --schedule 1f1b --pp {ranks} --microbatches 8 --cost comm[1-2]=1")


SUMS = "--cost F=1.4,B=1.4,W=1,AR=0.4"  # 0.2 for a chunk of two
PARTS = "F.dispatch=0,F.experts=0,F.combine=0.4,B.combine=0.4,B.experts=0,B.dispatch=0,W.experts=0"


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        (f"--schedule interleaved {SUMS}", 2 * 32),
        (f"--schedule zb-v --cost F=1.4,B=1.4,W=1,{PARTS}", 4 * 32),  # nothing is behind sums
        (f"--schedule zb-v {SUMS}", 2 * 32),  # all B are shielded
        (f"--schedule 1f1b {SUMS}", 2 * 32),  # of F alone, each as long as two
        (f"--schedule zb-v {SUMS},BW=2.4", 2 * 32),
    ],
)
def test_sums_between_tensor_parallel_ranks_are_exposed_as_published(
    flags: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """STP (arXiv 2510.27257): interleaved 1F1B exposes 2m of them, ZB-V 4m; braids less."""
    found = report(capsys, f"plan --pp 4 --microbatches 32 {flags}")
    assert found["overlap"]["exposed"] == pytest.approx(0.2 * count)
    assert found["overlap"]["communication"] == pytest.approx(0.2 * 4 * 32)


def test_a_plan_with_sums_says_so_and_is_read_back(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan, path = f"plan --pp 4 --microbatches 16 --schedule zb-v {SUMS}", tmp_path / "plan.json"
    assert "50% of the 12.8 that a rank spends in all-reduces (mean); 0 braids" in output(capsys, plan)
    found = report(capsys, plan)
    path.write_text(json.dumps(found))
    again = report(capsys, "plan", str(path))
    assert (again["makespan"], again["overlap"], again["shielded"]) == (found["makespan"], found["overlap"], list(range(8)))
    assert "AR says what F, B and BW consist of" in refusal(capsys, "plan", str(path), "--cost AR=0.1")
    assert "AR = 2 is more than 1.4" in refusal(capsys, plan.replace("AR=0.4", "AR=2"))
    assert "AR and F.combine both say" in refusal(capsys, plan.replace("AR=0.4", "AR=0.4,F.combine=0.1"))
    braided = report(capsys, plan.replace("zb-v", "dualpipe-v"), "--overlap-experts")["overlap"]
    assert braided["exposed"] < found["overlap"]["exposed"] / 2


def test_links_and_costs_of_letters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Costs of letters are split as the pattern says, with the links of the flags; they are of no stages."""
    path, plan = tmp_path / "costs.json", "plan --schedule 1f1b --pp 2 --microbatches 4 --costs"
    path.write_text(json.dumps({"hop": 0.5, "pattern": "*-*-", "stages": [PASS] * 6}))
    planned = [output(capsys, plan, str(path), "--balance '*-*-'", more) for more in ("", "--cost comm[0-1]=9")]
    assert "links" not in planned[0] and "0-1 takes 9" in planned[1]
    for more in ("--pp 2", "--balance 4"):
        assert "these costs are of the letters *-*-, not of stages" in refusal(capsys, plan, str(path), more)
