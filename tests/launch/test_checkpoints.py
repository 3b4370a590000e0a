"""Checkpoints of a script of Megatron-LM's: what cannot be saved or loaded is said in one line on every rank."""

from __future__ import annotations

import errno
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch.launched import SIZES, STAND_IN, Steps, launch, rank, run
from marked import rest
from torch.distributed.checkpoint.api import _wrap_exception

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.launch import checkpoint
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.session.checkpoints import TRACKER

FLAGS = f"{SIZES} --train-iters 3 --untie-embeddings-and-output-weights --pipeline-schedule"
TWO = "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 2"
Saved = Callable[..., tuple[Path, Steps]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A directory with two checkpoints, and the steps that a run of a schedule and a format has taken."""
    found: dict[str, tuple[Path, Steps]] = {}

    def save(schedule: str, form: str) -> tuple[Path, Steps]:
        if (key := schedule + form) not in found:
            path = tmp_path_factory.mktemp("saved")
            until = f"--save {path} --save-interval 1 --exit-interval 2"
            steps = launch(path / "run", STAND_IN, f"{FLAGS} {schedule} --ckpt-format {form} {until}")
            found[key] = path, steps
        return found[key]

    return save


def full(where: str, number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """``rank`` on a disk that has too little for the second checkpoint: the writers of rank 1 say so, or the file of rank 0 that
    names the newest."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written, real, text = [], torch.save, Path.write_text

    def fail(path: Path, *rest: Any) -> int:
        if path.name == TRACKER and rest[0] == "2" and where == "tracker":
            path.open("w").close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return text(path, *rest)

    def save(state: Any, file: Any, *rest: Any, **options: Any) -> None:
        written.append(file)
        if number == 1 and len(written) > 1 and where == "torch":
            Path(file).write_bytes(b"PK")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(state, file, *rest, **options)

    prepare = FileSystemWriterAsync.prepare_write_data

    def prepared(writer: Any, *rest: Any) -> None:
        prepare(writer, *rest)
        written.append(writer)
        if number == 1 and len(written) > 1:
            failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            writer.retrieve_write_results = lambda: _wrap_exception(failure)

    if where == "torch_dist":
        FileSystemWriterAsync.prepare_write_data = prepared
    torch.save, Path.write_text = save if where == "torch" else real, fail  # type: ignore[assignment, method-assign]
    rank(number, ranks, port, output, arguments)


@pytest.mark.parametrize(
    ("where", "flags", "ranks"),
    [
        rest("torch_dist", "zb-v --ckpt-format torch_dist --async-save", 2),
        ("torch", "zb-v --ckpt-format torch", 2),
        rest("tracker", "zb-v --ckpt-format torch_dist", 2),
    ],
)
def test_a_full_disk(tmp_path: Path, where: str, flags: str, ranks: int) -> None:
    path = tmp_path / "saved"
    (path / "iter_0000002").mkdir(parents=True)
    (path / "iter_0000002" / "of an earlier run").touch()
    flags = f"{FLAGS} {flags} --pipeline-model-parallel-size {ranks} --save {path} --save-interval 1"
    codes, output, steps = run(tmp_path / "run", STAND_IN, flags, ranks, target=partial(full, where))
    assert all(codes) and len(steps) == 2, output
    lines = re.findall(
        rf"the checkpoint {path}/iter_0000002 could not be written \(no space left on {path}: [\d.,]+ MB free, the checkpoint "
        rf"needs 0\.\d MB\); the checkpoint {path}/iter_0000001 is complete and unchanged$",
        output,
        re.M,
    )
    assert len(lines) >= (ranks if where == "torch_dist" else 1), output
    assert "Traceback" not in output and (path / TRACKER).read_text() == "1", output
    late = ".incomplete" if "--async-save" in flags else ""
    assert sorted(one.name for one in path.glob("iter*")) == ["iter_0000001", f"iter_0000002{late}"]
    assert late or [one.name for one in (path / "iter_0000002").iterdir()] == [
        "of an earlier run"
    ]  # as if there had been no other


def damage(path: Path, how: str) -> None:
    file = max(path.glob("__1_*.distcp"), key=lambda one: one.stat().st_size, default=path / "mp_rank_00_001/model_optim_rng.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if how != "missing":
        file.write_bytes(content if how == "flipped" else content[:999])


@pytest.mark.parametrize(
    ("flags", "how", "ranks"), [rest("zb-v --ckpt-format torch_dist", "flipped", 2), ("zb-v --ckpt-format torch", "cut", 2)]
)
def test_a_damaged_checkpoint(tmp_path: Path, saved: Saved, flags: str, how: str, ranks: int) -> None:
    path = Path(shutil.copytree(saved("zb-v", flags.rpartition(" ")[2])[0], tmp_path / "saved"))
    damage(path / "iter_0000002", how)
    flags = f"{FLAGS} {flags} --pipeline-model-parallel-size {ranks} --load {path}"
    codes, output, steps = run(tmp_path / "run", STAND_IN, flags, ranks)
    assert not steps and any(codes), output
    line = rf"mpipe: launch: the checkpoint {path}/iter_0000002 is damaged: (__1_|mp_rank_00_001).*; to go on from iteration 1, "
    if "--ckpt-format torch " in flags:  # where the file is one rank's
        ranks = 1
    else:
        assert "Traceback" not in output
    assert len(re.findall(line, output)) == ranks, output


@pytest.mark.parametrize(
    ("wrote", "form", "loads"),
    [("stock", "torch", "zb-v"), ("zb-v", "torch", f"interleaved {TWO}"), rest("zb-v", "torch", "zb-v --vocab-parallel 1")],
)
def test_chunks_of_another_placement_are_refused(tmp_path: Path, saved: Saved, wrote: str, form: str, loads: str) -> None:
    path, _ = saved(wrote, form)
    codes, output, steps = run(tmp_path, STAND_IN, f"{FLAGS} {loads} --ckpt-format {form} --load {path}", 2)
    assert codes == [2, 2] and not steps, output
    assert output.count(f"as --pipeline-schedule {wrote} places ") == 2 and "--ckpt-convert-format torch_dist" in output, output


@pytest.mark.parametrize(
    ("wrote", "form", "loads"),
    [
        ("zb-v", "torch", "v-half"),
        rest(f"stock {TWO}", "torch", f"interleaved {TWO}"),
        rest("zb-v", "torch_dist", f"stock {TWO}"),
    ],
)
def test_chunks_of_the_same_placement_are_loaded(tmp_path: Path, saved: Saved, wrote: str, form: str, loads: str) -> None:
    path, before = saved(wrote, form)
    same = launch(tmp_path / "same", STAND_IN, f"{FLAGS} {wrote} --ckpt-format {form} --load {path}")
    found = launch(tmp_path / "found", STAND_IN, f"{FLAGS} {loads} --ckpt-format {form} --load {path}")
    assert [loss for loss, _ in found] == [loss for loss, _ in same] and found[0] != before[0]


@pytest.mark.parametrize(
    ("letters", "words"),
    [("M-*", "--hybrid-layer-pattern M-*: load one"), (None, "a GPT: load one"), ("M*-/*", ""), ("M|*|-", "")],
)
def test_a_checkpoint_of_other_letters_is_refused(
    letters: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / TRACKER).write_text("2")
    (tmp_path / "iter_0000002").mkdir()
    for name in (".metadata", "metadata.json"):
        (tmp_path / "iter_0000002" / name).touch()
    monkeypatch.setattr(checkpoint, "load_common_state_dict", lambda _: {"args": Namespace(hybrid_layer_pattern="M*|-")})
    args = Settings.of(Namespace(load=str(tmp_path), use_distributed_optimizer=True, finetune=False, no_load_optim=False))
    if words:
        with pytest.raises(ValueError, match=re.escape(f"of --hybrid-layer-pattern M*|-, and this model of {words}")):
            checkpoint.check_placement(args | {"hybrid_layer_pattern": letters}, linear(2))
    else:
        checkpoint.check_placement(args | {"hybrid_layer_pattern": letters}, linear(2))
