"""What lies on the disk: which checkpoint is taken, and which are refused before anything starts."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.schedule.placement import linear, v
from megatron.pipeline.training import checkpoint
from megatron.pipeline.training.arguments import parse
from megatron.pipeline.training.validation import validate


def flags(more: str = "") -> Namespace:
    args = parse(
        (
            "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
            "--train-iters 10 --mock-data --tokenizer-type ByteLevelTokenizer --load here " + more
        ).split()
    )
    validate(args, 1)
    args.vocab_size = 257
    return args


def write(root: Path, iteration: int, name: str = "", **changes: Any) -> Path:
    directory = root / (name or f"iter_{iteration:07d}")
    directory.mkdir(parents=True)
    args = flags()
    model, schedule = checkpoint._model(args), checkpoint._schedule(args)
    summary = {"iteration": iteration, "optimizer": True, "model": model, "schedule": schedule} | changes
    (directory / "training.json").write_text(json.dumps(summary))
    for part in (".metadata", "common.pt"):  # torch's, which check does not read
        (directory / part).touch()
    return directory


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / ".metadata").unlink(), ".metadata missing"),
        (lambda path: (path / "training.json").write_text("{}"), "training.json cannot be read"),
        (lambda path: (path / "training.json").write_text('{"model": {"--num-la'), "training.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    path = write(tmp_path, 10)
    damage(path)
    with pytest.raises(ValueError, match=re.escape(f"{path} is damaged: {message}")):
        checkpoint.check(flags(f"--load {tmp_path}"))


def test_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(str(tmp_path / "nowhere")) is None
    checkpoint.check(flags(f"--load {tmp_path}"))


def test_the_tracker_decides(tmp_path: Path) -> None:
    ten, twenty = write(tmp_path, 10), write(tmp_path, 20)
    assert checkpoint.latest(str(tmp_path)) == twenty, "a crash before the tracker was written"
    (tmp_path / checkpoint.TRACKER).write_text("10")
    assert checkpoint.latest(str(tmp_path)) == ten
    (tmp_path / checkpoint.TRACKER).write_text("30")
    assert checkpoint.latest(str(tmp_path)) == twenty, "the tracker names what is not there"


def test_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    ten = write(tmp_path, 10)
    write(tmp_path, 20, "iter_0000020.incomplete")
    (tmp_path / "iter_0000030").mkdir()
    assert checkpoint.latest(str(tmp_path)) == ten


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--num-layers 4 --swiglu --ffn-hidden-size 256", "--num-layers 8 there and 4 here, --swiglu False there and True here"),
        ("--lr 2e-3", "--lr 0.001 there and 0.002 here; give its values, or decide with --override-opt_param-scheduler"),
        ("--train-iters 20 --lr-decay-iters 10", "--train-iters 10 there and 20 here"),
    ],
)
def test_other_flags_are_refused(tmp_path: Path, given: str, message: str) -> None:
    write(tmp_path, 10)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        checkpoint.check(flags(f"--load {tmp_path} {given}"))
    assert "\n" not in str(error.value)


def test_another_schedule_of_the_learning_rate_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, 10)
    for choice in ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", "--finetune", "--no-load-optim"):
        checkpoint.check(flags(f"--load {tmp_path} --lr 2e-3 {choice}"))


def test_saved_without_the_optimizer(tmp_path: Path) -> None:
    write(tmp_path, 10, optimizer=False)
    with pytest.raises(ValueError, match="was saved with --no-save-optim"):
        checkpoint.check(flags(f"--load {tmp_path}"))
    checkpoint.check(flags(f"--load {tmp_path} --no-load-optim"))


def test_what_an_older_release_cannot_read_back_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda name: None)
    for more in ("--use-distributed-optimizer --untie-embeddings-and-output-weights", ""):
        with pytest.raises(ValueError, match=r"a checkpoint .*needs megatron-core 0\.15 or later"):
            checkpoint.check_release(flags(more), v(2))
    for more, placement in (("", linear(2)), ("--untie-embeddings-and-output-weights", v(2))):
        checkpoint.check_release(flags(more), placement)
