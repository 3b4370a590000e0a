"""Flags of the earlier forks: the page has each; a line or a file that has some is refused, with what to give instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.pipeline.flags.arguments import FORKS, parse

PAGE = Path(__file__).parents[2] / "docs" / "moving.md"
ROWS = re.findall(r"^\| `(--[^|`]*)` \| ([^|]*) \|", PAGE.read_text(), re.M)
PARSED = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 --lr 1e-3 "
    "--mock-data --pipeline-model-parallel-size 8"
).split()


def test_every_flag_has_a_row() -> None:
    assert {word for theirs, _ in ROWS for word in theirs.split() if word in FORKS} == set(FORKS)


@pytest.mark.parametrize("ours", dict.fromkeys(ours.strip("` ") for _, ours in ROWS if ours.startswith("`")))
def test_what_the_page_gives_is_accepted(ours: str) -> None:
    parse([*PARSED, *ours.split()])


@pytest.mark.parametrize("flag", FORKS)
def test_what_the_table_gives_are_flags(flag: str) -> None:
    """Every flag that a row names is one of ours or of Megatron-LM's."""
    named = set(re.findall(r"--[a-z][a-z-]+", FORKS[flag].replace("mpipe plan --splits", ""))) - set(FORKS)
    schedule = re.search(r"--pipeline-schedule ([a-z0-9-]+)", FORKS[flag])
    values = {
        "--pipeline-schedule": schedule[1] if schedule else "zb-v",
        "--microbatch-group-size-per-virtual-pipeline-stage": "6",
    }
    values |= {"--pipeline-memory-limit": "1.0", "--pipeline-costs": "profile"}
    values |= {"--vocab-parallel": "2", "--decoder-last-pipeline-num-layers": "1", "--offload": "full", "--metrics": "m.jsonl"}
    values |= {"--recompute-granularity": "selective", "--recompute-modules": "core_attn"}
    parse([*PARSED, *(word for name in named for word in (name, *([values[name]] if name in values else [])))])


def test_all_are_named_at_once(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("enable_zero_bubble: true\nzero-bubble-max-pending-backward: 8\n")
    with pytest.raises(ValueError, match=r"--enable-zero-bubble: .*zb-auto.*; --zero-bubble-max-pending-backward: .*zb-h1"):
        parse([*PARSED, "--config", str(config)])
    with pytest.raises(
        ValueError, match=r"--num-seq-splits: --pipeline-schedule seq-1f1b \(2\).*; --allow-padding-num-layers: not needed"
    ):
        parse([*PARSED, "--num-seq-splits=4", "--allow-padding-num-layers"])


def test_other_numbers_of_slices_are_not_two() -> None:
    """``seq-1f1b`` has 2 slices: a line with 4 must not be sent there."""
    assert "--splits" in FORKS["--num-seq-splits"]
