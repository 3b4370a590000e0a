"""``mpipe certify``: what it prints, its JSON, its exit codes, and one line for what is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS

PLAN = ["plan", "--schedule", "zb-h1", "--pp", "4", "--microbatches", "8", "--cost", "F=1,B=1,W=1,comm=0.25"]
HEAD_ON = ["0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1", "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"]


@pytest.fixture
def planned(tmp_path: Path) -> str:
    path = tmp_path / "zb-h1.json"
    assert main([*PLAN, "--json", "-o", str(path)]) == 0
    return str(path)


@pytest.fixture
def head_on(tmp_path: Path) -> str:
    path = tmp_path / "head-on.csv"
    path.write_text("\n".join(HEAD_ON) + "\n")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["certify", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_schedule_of_ours_hangs_over_no_transport(capsys: pytest.CaptureFixture[str], planned: str) -> None:
    lines = run(capsys, planned).splitlines()
    assert lines[0] == "zb-h1: 4 ranks, 8 microbatches; messages where training has them"
    assert [line.split()[0] for line in lines[1:]] == list(TRANSPORTS)
    assert all("does not hang; makespan" in line for line in lines[1:])
    assert re.search(r"rendezvous +does not hang; makespan \S+, \S+% above \S+, where messages never wait$", lines[1])
    assert run(capsys, planned, "--cold").startswith(lines[0] + ", cold start\n")
    data = json.loads(run(capsys, planned, "--json", "--cost", "F=1,B=1,W=1,comm=0.5"))
    shared = data["transports"]["shared"]
    assert shared["waiting"] == pytest.approx(shared["makespan"] - data["makespan_unlimited"]) and shared["waiting"] > 0


def test_a_hang_is_exit_code_1_with_its_circle(capsys: pytest.CaptureFixture[str], head_on: str) -> None:
    out = run(capsys, head_on, code=1)
    assert "pair               HANGS" in out
    assert "direction          does not hang; makespan 10" in out
    assert re.search(
        r"the hang over rendezvous, shared, pair, batched, queue:\n  rank .*\n  waits for rank .*\n  waits for rank \d, as above",
        out,
    )
    run(capsys, head_on, "--transport", "direction,batched-direction")
    run(capsys, head_on, "--transport", "direction,pair", code=1)


def test_json_has_the_fields_of_the_contract(capsys: pytest.CaptureFixture[str], head_on: str, tmp_path: Path) -> None:
    data = json.loads(run(capsys, head_on, "--json", code=1))
    assert {name: data[name] for name in ("schedule", "pp", "chunks", "microbatches", "cold", "hangs", "swapped")} == {
        "schedule": "head-on", "pp": 2, "chunks": 1, "microbatches": 2, "cold": False, "hangs": True, "swapped": [],
    }  # fmt: skip
    assert list(data["transports"]) == list(TRANSPORTS)
    pair, direction = data["transports"]["pair"], data["transports"]["direction"]
    assert (pair["hangs"], pair["makespan"], pair["waiting"]) == (True, None, None)
    assert {step["rank"] for step in pair["cycle"]} == {0, 1}
    assert set(pair["cycle"][0]) == {"rank", "operation", "after", "before"}
    assert (direction["hangs"], direction["cycle"], direction["chain"]) == (False, None, None)
    assert direction["makespan"] == data["makespan_unlimited"] + direction["waiting"]
    assert data["messages"] == "messages as the file has them"
    path = tmp_path / "out.json"
    assert run(capsys, head_on, "-o", str(path), code=1) == f"wrote {path}\n"
    assert json.loads(path.read_text()) == data


GROUPS = "--no-overlap-p2p-communication --transport batched"
ONE = "0F0,(0SEND_F0;0RECV_B0)BATCH,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"  # torch's 1F1B with one microbatch


# Of reports, by their numbers in Megatron-LM and torchtitan; those of torch are in ``tests/schedule/test_certify_torch.py``.
#
# 5100: with variable sequence lengths and groups all of 4 ranks hang in the first step. The report blames the order within a
#   group, which groups do not have: with more microbatches nothing hangs. With as many as ranks, one rank has an exchange in two
#   groups that its neighbour has in one. Its order, one operation after another, does hang.
# 5240 supposes that communicators of two ranks are made in orders that ranks disagree on. They agree.
# 1450: at 2 ranks both neighbours are one rank, and a group of two sends and two receives pairs them in order.
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (f"interleaved --pp 4 --microbatches 4 {GROUPS} --variable-seq-lengths", 1, "Send of the shape of the gradient"),
        (f"interleaved --pp 4 --microbatches 8 {GROUPS} --variable-seq-lengths --cold", 0, "batched  does not hang"),
        (f"interleaved --pp 4 --microbatches 4 {GROUPS}", 0, "batched  does not hang"),
        (f"interleaved --pp 4 --microbatches 8 {GROUPS},rendezvous", 1, "rendezvous  HANGS"),
        ("interleaved --pp 4 --chunks 2 --microbatches 8 --transport pair --cold", 0, "pair  does not hang"),
        (f"interleaved --pp 4 --chunks 2 --microbatches 8 {GROUPS} --cold", 0, "batched  does not hang"),
        (f"interleaved --pp 2 --microbatches 4 {GROUPS}", 1, "swapped: rank 0 receives the activation of microbatch 2"),
        ("ONE --transport batched --cold", 1, "connecting for the Receive of the gradient of microbatch 0"),
        ("ONE --transport batched", 0, "batched  does not hang"),
    ],
    ids=["5100", "5100-more", "5100-no-lengths", "5100-one-by-one", "5240", "5240-groups", "1450", "775", "775-warm"],
)
def test_public_hangs_can_be_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: str, code: int, says: str
) -> None:
    (tmp_path / "one.csv").write_text(ONE)
    assert says in run(capsys, *arguments.replace("ONE", str(tmp_path / "one.csv")).split(), code=code)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["interleaved", "--pp", "4"], "interleaved needs --pp and --microbatches"),
        (["interleaved", "--pp", "4", "--microbatches", "6"], "needs a multiple of 4 microbatches, the ranks; got 6"),
        (["interleaved", "--pp", "1", "--microbatches", "4"], "--pp 1: one rank sends no messages"),
        (["interleaved", "--pp", "4", "--microbatches", "8", "--chunks", "100000"], "--chunks 100000, --microbatches 8 are over"),
        (["FILE", "--pp", "4"], "are for interleaved: leave them out"),
        (["FILE", "--variable-seq-lengths"], "are for interleaved: leave them out"),
        (["/nowhere/at/all.csv"], "cannot read /nowhere/at/all.csv: No such file or directory"),
        (["FILE", "--transport", "pigeon"], "unknown transport 'pigeon'; they are rendezvous, shared, pair, direction, batched"),
        (["FILE", "-o", "x.png"], "cannot write x.png: the file name must end in .json or .txt"),
    ],
)
def test_bad_flags_are_one_line(capsys: pytest.CaptureFixture[str], head_on: str, arguments: list[str], says: str) -> None:
    assert says in refusal(capsys, "certify", *(head_on if argument == "FILE" else argument for argument in arguments))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        (
            "a.csv",
            "\n".join(HEAD_ON).replace("0F0,0F1", "(0F0;0F1)BATCH"),
            "line 1, cell 1: BATCH joins messages, and 0F0 is none",
        ),
        (
            "a.csv",
            "\n".join(HEAD_ON).replace("0SEND_F0,0SEND_F1", "(0SEND_F0;0SEND_F1)OVERLAP_F_B"),
            "a.csv: line 1, cell 3: OVERLAP_F_B joins passes, and 0SEND_F0 is none",
        ),
        ("a.csv", "2F0,0F0,2B0,0B0\n1F0,3F0,3B0,1B0\n", "a.csv: rank 1 is stuck at F0.0: it needs F0.0 of rank 0"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert says in refusal(capsys, "certify", str(path))


def test_a_wrong_boundary_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, planned: str) -> None:
    (path := tmp_path / "wrong.json").write_text(json.dumps(json.loads(Path(planned).read_text()) | {"boundary": [[]] * 4}))
    assert "wrong.json: rank 0: RS0.0 is missing in the boundary; add it" in refusal(capsys, "certify", str(path))


def test_a_slow_link_holds_up_megatrons_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    """Its messages are groups, and it waits for each: over any order of posts that needs no group, both ends send first."""
    own = ("interleaved", "--chunks", "1", "--pp", "4", "--microbatches", "8", "--transport", "batched", "--cost")
    assert "makespan 33" in run(capsys, *own, "F=1,B=1,W=1")
    assert "makespan 36.5, 1.4% above 36, where" in run(capsys, *own, "comm[0-1]=0.5")
    assert "HANGS" in run(capsys, *own[:-3], "--transport", "queue", code=1)
