"""Flags of the earlier forks: every row of the page about them is what happens."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.fork_flags import FLAGS, translate

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
ROWS = re.findall(r"^\| `(--[^|`]*)` \| ([^|]*) \|", PAGE.read_text(), re.M)
RANKS = ["--pipeline-model-parallel-size", "8"]
PARSED = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --pipeline-model-parallel-size 8"
).split()


def test_every_flag_has_a_row() -> None:
    assert {word for theirs, _ in ROWS for word in theirs.split() if word in FLAGS} == set(FLAGS)


@pytest.mark.parametrize(("theirs", "ours"), ROWS)
def test_a_row_says_what_happens(theirs: str, ours: str) -> None:
    if ours == "error":
        with pytest.raises(ValueError, match=r"mpipe plan --schedule .* and give --pipeline-schedule file:FILE instead"):
            translate([*RANKS, *theirs.split()])
        return
    tokens, lines = translate([*RANKS, *theirs.split()])
    assert lines
    virtual = re.search(r"--num-\S*virtual\S* \d", theirs)  # Megatron's own flag, which stays
    kept = [*RANKS, *(virtual[0].split() if virtual else ())]
    assert tokens[: len(kept)] == kept
    new = " ".join(tokens[len(kept) :])
    if ours == "not needed":
        assert not new
        assert all("is not needed: " in line for line in lines)
    else:
        assert flags_with_values(new) == flags_with_values(ours.strip("`"))
        parse([*PARSED, *tokens])  # each is a flag of ours, with a value that it takes


def flags_with_values(line: str) -> set[str]:
    return {flag.strip() for flag in re.split(r"(?=--)", line) if flag.strip()}


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ("--enable-zero-bubble --pipeline-schedule v-half", "--enable-zero-bubble is --pipeline-schedule zb-auto now, and "
            "--pipeline-schedule v-half is given as well: leave one of them out"),
        ("--enable-vocab-parallel --vocab-parallel=off", "--vocab-parallel off is given as well"),
        ("--enable-1f1b-v --zero-bubble-v-schedule", "--zero-bubble-v-schedule and --enable-1f1b-v each name a schedule"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup quarter", "choose from zb, half, min"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward many", "many: expected a whole number"),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 0", "expected auto, or microbatches of at least 1"),
        ("--offload-time --cpu-offload", "--offload-time needs a value"),
        ("--cpu-offload=yes", "--cpu-offload takes no value, got 'yes'"),
        ("--interleave-group-size 3", "with 8 pipeline ranks give 4 to 8"),
    ],
)  # fmt: skip
def test_what_is_refused(theirs: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        translate([*RANKS, *theirs.split()])


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("--zero-bubble-v-schedule --pipeline-schedule zb-v", "--pipeline-schedule zb-v"),  # the same twice
        ("--enable-vocab-parallel --pipeline-schedule v-half", "--pipeline-schedule v-half --vocab-parallel 2"),
        ("--zero-bubble-v-schedule --zero-bubble-max-pending-backward=8", "--pipeline-schedule zb-v"),
        ("--zero-bubble-v-schedule --enable-zb-runtime", "--pipeline-schedule zb-v"),
        ("--zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min --zero-bubble-pipeline-timers-end-iter 9",
            "--pipeline-schedule v-min"),
        ("--interleave-group-size 99", "--pipeline-schedule gis"),
        ("--recompute-activations --recompute-lgd",
            "--recompute-activations --recompute-granularity selective --recompute-modules core_attn layernorm"),
        ("--recompute-granularity full --recompute-lgd", "--recompute-granularity full"),
        ("--offload-chunk-num 2 --schedule-timer-end 3 --final-stage-num-layers 1 --num-seq-splits 1", ""),
        ("--data-path A B --lr 1", "--data-path A B --lr 1"),
    ],
)  # fmt: skip
def test_combinations(line: str, ours: str) -> None:
    assert translate([*RANKS, *line.split()])[0] == [*RANKS, *ours.split()]


def test_in_a_file_and_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("enable_zero_bubble: true\nzero-bubble-max-pending-backward: 8\ncpu-offload: false\n")
    with caplog.at_level(logging.WARNING):
        args = parse([*PARSED, "--config", str(config), "--allow-padding-num-layers"])
        monkeypatch.setenv("RANK", "1")
        parse([*PARSED, "--config", str(config)])
    assert args.pipeline_schedule == "zb-h1"
    assert args.offload == "off"
    assert [record.getMessage() for record in caplog.records] == [
        "--enable-zero-bubble --zero-bubble-max-pending-backward 8 is --pipeline-schedule zb-h1 now",
        "--allow-padding-num-layers is not needed: any number of layers is spread over the ranks",
    ]
    config.write_text("cpu-offload: sometimes\n")
    with pytest.raises(ValueError, match="--cpu-offload is on or off"):
        parse(["--config", str(config)])


@pytest.mark.parametrize(
    "flag", ["--offload-chunk-num", "--num-seq-splits", "--final-stage-num-layers", "--interleave-group-size"]
)
def test_numbers_that_cannot_be_are_refused(flag: str) -> None:
    switches = ["--cpu-offload", "--enable-layer-redistribution"]
    with pytest.raises(ValueError, match=f"{flag} -3: expected a whole number of at least 0"):
        translate([*switches, flag, "-3"])


def test_equal_numbers_are_no_contradiction() -> None:
    old = "--enable-zero-bubble --zero-bubble-max-pending-backward 4 --pipeline-model-parallel-size 8"
    tokens, _ = translate([*old.split(), "--pipeline-memory-limit", "0.50"])
    assert tokens.count("--pipeline-memory-limit") == 1
    with pytest.raises(ValueError, match="leave one of them out"):
        translate([*old.split(), "--pipeline-memory-limit", "0.6"])
