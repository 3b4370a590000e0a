"""What lies on the disk: which checkpoint is taken, and which are refused before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.pipeline.patches.torch_optimizers import allocate_state
from torch.distributed import checkpoint as torch_checkpoint

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.session.checkpoints import TRACKER, find, latest
from megatron.pipeline.trainer import checkpoint_files
from megatron.pipeline.trainer.checkpoint_files import check, model_flags, schedule_flags

ADAM = {"wd_mult": 1.0, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
SGD = {"wd_mult": 1.0, "lr": 1e-3, "momentum": 0.9}


def flags(more: str = "") -> Settings:
    args = parse(
        (
            "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
            "--train-iters 10 --mock-data --tokenizer-type ByteLevelTokenizer --load here " + more
        ).split()
    )
    return validate(args, 1) | {"vocab_size": 257}


def mixed_precision(group: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"state": {}, "param_groups": [group]}}


def distributed(group: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": [group]}, "param_state_sharding_type": "fully_reshardable"}


def write(root: Path, iteration: int, name: str = "", optimizer: Any = None, kept: str = "exp_avg", **common: Any) -> Path:
    """A checkpoint as pretrain_gpt.py writes it, and as it has always written it where ``common`` has nothing.

    Args:
        optimizer: its state but for tensors; adam's in float32 unless given.
        kept: what the optimizer keeps of every parameter.
        common: what else common.pt has.
    """
    directory = root / (name or f"iter_{iteration:07d}")
    state = {f"optimizer.state.{kept}.weight": torch.zeros(8)} if kept else {}
    torch_checkpoint.save({"weight": torch.zeros(8)} | state, checkpoint_id=directory, no_dist=True)
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    optimizer = {"state": {}, "param_groups": [ADAM]} if optimizer is None else optimizer
    torch.save({"iteration": iteration, "consumed_samples": 0} | ({"optimizer": optimizer} if optimizer else {}) | common,
               directory / "common.pt")  # fmt: skip
    summary = {"iteration": iteration, "model": model_flags(flags()), "schedule": schedule_flags(flags())}
    (directory / "training.json").write_text(json.dumps(summary))
    return directory


def refusal(given: str) -> str:
    """The one line that refuses these flags."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check(flags(given))
    assert "\n" not in str(error.value)
    return str(error.value)


class Unknown:
    """A class that no checkpoint may bring with it."""


def cut(path: Path) -> None:
    (file,) = path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-10])


def only(path: Path, *names: str) -> None:
    """Leave nothing but empty files of these names."""
    shutil.rmtree(path)
    path.mkdir()
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).touch()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "is missing"),
        (only, "is empty"),
        (lambda path: only(path, ".metadata"), "is empty but for .metadata"),
        (lambda path: (path / ".metadata").unlink(), "is damaged: .metadata missing"),
        (lambda path: (path / "common.pt").unlink(), "is damaged: common.pt missing"),
        (
            lambda path: (path / ".metadata").write_bytes(b"not a pickle"),
            "is damaged: .metadata cannot be read (UnpicklingError: ",
        ),
        (lambda path: (path / "common.pt").write_bytes(b""), "is damaged: common.pt cannot be read (EOFError in "),
        (
            lambda path: torch.save({"x": Unknown()}, path / "common.pt"),
            "is damaged: common.pt cannot be read (UnpicklingError: ",
        ),
        (lambda path: next(path.glob("*.distcp")).unlink(), "is damaged: __0_0.distcp has 0 of "),
        (cut, "is damaged: __0_0.distcp has "),
        (lambda path: (path / "training.json").write_text("{}"), "is damaged: training.json cannot be read"),
        (lambda path: (path / "training.json").write_text('{"model": {"--num-la'), "is damaged: training.json cannot be read"),
        (lambda path: (path / "training.json").unlink(), "does not say what model it is of"),
        (lambda path: (path / "metadata.json").write_text('{"sharded_backend": "zarr"}'), "has the format zarr: --load reads"),
        (lambda path: only(path, "mp_rank_00_000/model_optim_rng.pt"), "has the format torch: --load reads torch_dist"),
        (lambda path: only(path, ".metadata", "__0_0.distcp"), "has the format torch_dcp or fsdp_dtensor: --load reads"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_named_with_another_one(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = write(tmp_path, 20)
    (tmp_path / TRACKER).write_text("20")
    check(flags(f"--load {tmp_path}"))
    damage(path)
    assert refusal(f"--load {tmp_path}").startswith(f"the checkpoint {path} {message}")
    assert refusal(f"--load {tmp_path} --finetune").endswith(f"; {tmp_path} has no other: give another --load")
    write(tmp_path, 10)
    assert refusal(f"--load {tmp_path}").endswith(f"; to go on from iteration 10, write 10 into {tmp_path / TRACKER}")
    (tmp_path / TRACKER).write_text("10")
    check(flags(f"--load {tmp_path}"))


def test_no_checkpoint(tmp_path: Path) -> None:
    for directory in (tmp_path / "nowhere", tmp_path):
        assert find(str(directory)) is None
        check(flags(f"--load {directory}"))
        expected = f"there is no checkpoint in {directory}, and --exit-on-missing-checkpoint is given"
        assert refusal(f"--load {directory} --exit-on-missing-checkpoint") == expected


def test_the_tracker_decides(tmp_path: Path) -> None:
    ten, twenty = write(tmp_path, 10), write(tmp_path, 20)
    assert find(str(tmp_path)) == twenty, "a crash before the tracker was written"
    (tmp_path / TRACKER).write_text("10")
    assert find(str(tmp_path)) == ten
    (tmp_path / TRACKER).write_text("3rd\n")
    expected = f"{tmp_path / TRACKER} says '3rd', which is no iteration; to go on from iteration 20, write 20 into"
    assert refusal(f"--load {tmp_path}").startswith(expected)
    assert latest(str(tmp_path)) is None
    assert f"--load {ten} is a checkpoint itself: give the directory" in refusal(f"--load {ten}")


def test_advice_is_to_take_one_that_can_be_read(tmp_path: Path) -> None:
    write(tmp_path, 10)
    cut(write(tmp_path, 20))
    (write(tmp_path, 30) / ".metadata").unlink()
    (tmp_path / TRACKER).write_text("30")
    assert refusal(f"--load {tmp_path}").endswith(f"; to go on from iteration 10, write 10 into {tmp_path / TRACKER}")


def test_without_a_tracker_what_is_damaged_is_not_taken_for_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, 10)
    (path / "metadata.json").unlink()
    (path / ".metadata").unlink()
    assert refusal(f"--load {tmp_path}").startswith(f"--load {tmp_path} has no {TRACKER} and no complete checkpoint, but iter_")
    (tmp_path / TRACKER).symlink_to(tmp_path / "nowhere")
    assert refusal(f"--load {tmp_path}").startswith(f"{tmp_path / TRACKER} cannot be read")
    file = tmp_path / "file"
    file.touch()
    assert refusal(f"--load {file}") == f"--load {file} is a file: give the directory with the checkpoints"


def test_a_tracker_with_more_digits_than_python_reads(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (tmp_path / TRACKER).write_text("9" * 5000)
    assert refusal(f"--load {tmp_path}").startswith(f"{tmp_path / TRACKER} says '99999999999999999999', which is no iteration")


def test_a_directory_that_must_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    (tmp_path / TRACKER).write_text("10")
    monkeypatch.setattr(Path, "iterdir", denied)
    assert refusal(f"--load {tmp_path}") == f"--load {tmp_path} cannot be read: {tmp_path}: Permission denied"
    assert latest(str(tmp_path)) is None


def test_the_state_made_for_a_save_is_that_of_no_step() -> None:
    """torch's SGD adds the weight decay to the gradient before its momentum sees it."""
    weight = torch.nn.Parameter(torch.ones(3))
    inner = torch.optim.SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.5)
    allocate_state(SimpleNamespace(optimizer=inner, init_state_fn=None))
    assert inner.state[weight]["momentum_buffer"].tolist() == [0, 0, 0] and weight.tolist() == [1, 1, 1]
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["weight_decay"]) == (0.1, 0.5)


def test_a_release_has_weights_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 0, "release", optimizer={})
    (tmp_path / TRACKER).write_text("release")
    assert refusal(f"--load {tmp_path}") == (
        f"the checkpoint {path} is a release, which has weights alone: give --finetune to start with them"
    )
    check(flags(f"--load {tmp_path} --finetune"))


def test_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    ten = write(tmp_path, 10)
    write(tmp_path, 20, "iter_0000020.incomplete")
    (tmp_path / "iter_0000030").mkdir()
    assert find(str(tmp_path)) == ten


def test_a_crash_while_one_takes_anothers_place(tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text("10")
    old = write(tmp_path, 10, "iter_0000010.replaced.incomplete")
    write(tmp_path, 10, "iter_0000010.incomplete")
    assert find(str(tmp_path)) == old


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
    assert message in refusal(f"--load {tmp_path} {given}")


def test_another_schedule_of_the_learning_rate_can_be_chosen(tmp_path: Path) -> None:
    write(tmp_path, 10)
    given = f"--load {tmp_path} --lr 2e-3"
    assert "decide with --override-opt_param-scheduler" in refusal(given)
    for choice in ("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", "--finetune", "--no-load-optim"):
        check(flags(f"{given} {choice}"))


@pytest.mark.parametrize(
    ("saved", "given", "message"),
    [
        ({}, "--bf16", "--bf16 or --fp16 False there and True here"),
        ({}, "--use-distributed-optimizer", "--use-distributed-optimizer False there and True here"),
        ({}, "--optimizer sgd", "--optimizer adam there and sgd here"),
        ({}, "--adam-beta2 0.95", "--adam-beta2 0.999 there and 0.95 here"),
        ({"optimizer": mixed_precision(ADAM)}, "", "--bf16 or --fp16 True there and False here"),
        ({"optimizer": mixed_precision(ADAM)}, "--bf16", ""),
        ({"optimizer": mixed_precision(ADAM)}, "--fp16", ""),
        ({"optimizer": distributed(ADAM)}, "", "--use-distributed-optimizer True there and False here"),
        ({"optimizer": distributed(ADAM)}, "--use-distributed-optimizer", ""),
        ({"optimizer": distributed(ADAM)}, "--use-distributed-optimizer --fp16", ""),
        ({"optimizer": {0: distributed(ADAM), 1: distributed(ADAM)}}, "--use-distributed-optimizer --bf16", ""),
        ({"optimizer": mixed_precision(SGD), "kept": "momentum_buffer"}, "--bf16 --optimizer sgd", ""),
        ({"optimizer": mixed_precision(SGD)}, "--bf16", "--optimizer sgd there and adam here"),
        ({"optimizer": mixed_precision(SGD)}, "--bf16 --optimizer sgd --sgd-momentum 0", "--sgd-momentum 0.9 there and 0 here"),
        ({"optimizer": {}}, "", "was saved with --no-save-optim"),
        ({"optimizer": mixed_precision(ADAM), "kept": ""}, "--fp16", "was saved before the optimizer's first step"),
        (
            {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}},
            "--use-distributed-optimizer",
            "in the form dp_reshardable, which fits one layout of ranks alone: save it once in Megatron-LM with "
            "--dist-ckpt-optim-fully-reshardable",
        ),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, saved: dict[str, Any], given: str, message: str) -> None:
    write(tmp_path, 10, **saved)
    if message:
        assert re.search(f"{re.escape(message)}.*--no-load-optim, or with --finetune", refusal(f"--load {tmp_path} {given}"))
    else:
        check(flags(f"--load {tmp_path} {given}"))
    for way_out in ("--no-load-optim", "--finetune"):
        check(flags(f"--load {tmp_path} {given} {way_out}"))


def from_megatron(root: Path, **changes: Any) -> Path:
    """A checkpoint as Megatron-LM 0.16.1 writes it under the flags of this file: nothing of ours, its arguments in common.pt.

    Args:
        changes: other arguments than it would have.
    """
    ours = vars(flags())
    names = (*checkpoint_files._MODEL_FLAGS, *checkpoint_files._SCHEDULE_FLAGS, "make_vocab_size_divisible_by")
    args = {name: ours[name] for name in names} | {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "num_query_groups": 4,
        "vocab_size": 256,
        "padded_vocab_size": 384,
        "tensor_model_parallel_size": 1,
        "consumed_train_samples": 20,
        "use_rope_scaling": False,
        "window_size": None,
    }
    scheduler = {
        "max_lr": 1e-3, "lr_warmup_steps": 0, "num_steps": 20, "lr_decay_style": "linear", "lr_decay_steps": 20, "min_lr": 0.0,
        "start_wd": 0.01, "end_wd": 0.01, "wd_incr_style": "constant", "wd_incr_steps": 20,
    }  # fmt: skip
    path = write(root, 10, args=Namespace(**(args | changes)), checkpoint_version=3.0, opt_param_scheduler=scheduler)
    (path / "training.json").unlink()
    return path


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, "", ""),
        ({}, "--add-qkv-bias", ""),
        ({"tensor_model_parallel_size": 4, "padded_vocab_size": 512}, "", ""),
        ({"padded_vocab_size": 512}, "", "the tokenizer's vocabulary of 512 with padding there and 257 here"),
        ({"add_bias_linear": False}, "", "--disable-bias-linear True there and False here"),
        ({"add_bias_linear": False}, "--disable-bias-linear --add-qkv-bias", ""),
        ({"num_layers": 12}, "", "--num-layers 12 there and 8 here; give its values, or another --load"),
        ({"use_rope_scaling": True}, "", "a model that this program does not have: --use-rope-scaling True"),
        ({}, "--lr 2e-3", "--lr 0.001 there and 0.002 here; give its values, or decide with"),
        ({}, "--train-iters 20", "--lr-decay-iters 10 there and 20 here, --train-iters 10 there and 20 here"),
        ({}, "--train-iters 20 --override-opt_param-scheduler", ""),
        ({}, "--bf16", "--bf16 or --fp16 False there and True here"),
    ],
)
def test_megatrons_arguments_are_compared(tmp_path: Path, changes: dict[str, Any], given: str, message: str) -> None:
    from_megatron(tmp_path, **changes)
    if message:
        assert message in refusal(f"--load {tmp_path} {given}")
    else:
        check(flags(f"--load {tmp_path} {given}"))
