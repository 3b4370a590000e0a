"""``mpipe vocabulary``: from a model of a GPT, what was published for the spread vocabulary comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_figures import SOURCES

from megatron.pipeline.cli import main

SHAPE = "vocabulary --pp 8 --layers 32 --hidden 3072 --heads 24 --sizes 32k,256k --state-bytes 16 "
METHODS = ["off", "redistribution", "1", "2", "interlaced"]


@pytest.mark.parametrize("seq", [2048, 4096])
def test_the_published_shape(seq: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Spread, a vocabulary of 256k is trained as fast as one of 32k; without, half as fast. Memory is that of real GPUs."""
    assert main(f"{SHAPE} --seq {seq} --microbatches 64 --json".split()) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    mfu = {method: [row["mfu"] for row in rows if row["method"] == method] for method in METHODS}
    for method in ("1", "2", "interlaced"):
        assert mfu[method][1] == pytest.approx(mfu[method][0], rel=0.03)
    small, large = mfu["off"]
    assert 0.5 < large / small < 0.6
    assert large < 0.75 * mfu["redistribution"][1] < 0.75 * mfu["1"][1]
    published = {column.name: column.memory for column in SOURCES[1].columns}
    for row in rows:
        method = "baseline" if row["method"] == "off" else row["method"]
        expected = published[f"{seq}, {row['vocabulary'] // 1024}k"][method]
        assert row["peak_bytes"] / 2**30 == pytest.approx(expected, rel=0.1 if method == "interlaced" else 0.06)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved"])
def test_any_schedule(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters are balanced where the vocabulary is spread, and all methods hold the same in total."""
    given = "vocabulary --pp 4 --layers 16 --hidden 1024 --heads 16 --seq 1024 --microbatches 16 --sizes 128k"
    assert main(f"{given} --schedule {schedule} --json".split()) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert len(set(rows["2"]["parameter_bytes"])) == 1 < len(set(rows["off"]["parameter_bytes"]))
    assert {sum(row["parameter_bytes"]) for row in rows.values()} == {sum(rows["off"]["parameter_bytes"])}
    assert rows["2"]["mfu"] > rows["redistribution"]["mfu"] > rows["off"]["mfu"]


def test_the_text_says_what_the_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{SHAPE} --seq 2048 --microbatches 16 --efficiency 0.5".split()) == 0
    text = capsys.readouterr().out
    assert "products at 0.5 of 312 TFLOP/s" in text and "16 bytes a parameter" in text
    assert [line.split()[0] for line in text.split("\n\n")[1].splitlines()] == ["MFU", *METHODS]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--seq 0", "--seq: expected a whole number of at least 1, got '0'"),
        ("--seq 2048 --sizes 32m", "expected numbers of rows such as 32k,64k or 50304"),
        ("--seq 2048 --heads 23", "a hidden size of 3072 is not a multiple of 23 heads"),
        ("--seq 2048 --efficiency 2", "efficiency of a device is a share above 0 and of at most 1, got 2"),
        ("--seq 2048 --layers 3", "3 cannot be split over 8"),
        ("--seq 2048 --layers 999999999", "999999999 layers are too many for 8 ranks; take fewer"),
        ("--seq 2048 --schedule auto", "--schedule auto would compare different schedules: name one without slices"),
        ("--seq 2048 --schedule seq-1f1b", "slices"),
        ("--seq 2048 --schedule nothing", "unknown schedule 'nothing'"),
    ],
)
def test_bad_input_is_one_line(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(f"{SHAPE} --microbatches 16 {flags}".split())
    except SystemExit as exit:
        code = int(exit.code or 0)
    err = capsys.readouterr().err
    assert code == 2 and message in err and err.count("\n") == 1


def test_what_a_plan_says_of_its_shards_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spread.json"
    plan = "plan --schedule 1f1b --pp 2 --microbatches 3 --vocab-parallel 2 --vocab-cost S=0.3,exchange=0.1"
    assert main([*plan.split(), "-o", str(file)]) == 0
    planned = json.loads(file.read_text())
    assert planned["vocab_costs"] == {"S": 0.3, "T": 0.5, "IF": 0.0, "IB": 0.0, "activation": 0.0, "exchange": 0.1}
    capsys.readouterr()
    assert main(["simulate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["span"] == planned["span"]
