"""A disk that is full when a checkpoint is written: all ranks say so, with numbers; the checkpoint before it stays."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from marked import rest
from pool import Pool
from training.short_runs import ran, train

from megatron.pipeline.session.checkpoints import TRACKER, latest
from megatron.pipeline.trainer import checkpoint

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Makes a file system of so many KiB."""
    mounted: list[Path] = []

    def make(kibibytes: int) -> Path:
        path = tmp_path / f"disk{len(mounted)}"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kibibytes}k", "none", str(path)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def size(directory: Path) -> int:
    """KiB that files take on a file system of pages."""
    return sum(-(-path.stat().st_size // 4096) * 4 for path in directory.rglob("*"))


FLAGS = "--pipeline-model-parallel-size 4 --pipeline-schedule zb-v --num-layers 8"


def train_while_the_disk_fills(flags: str, ballast: str, kibibytes: int) -> str:
    """Train on this rank; when the writer starts another program has left so many KiB."""
    real_save = checkpoint.dist_checkpointing.save

    def save(*args: Any, **options: Any) -> Any:
        if torch.distributed.get_rank() == 0:
            free = os.statvfs(Path(ballast).parent)
            with open(ballast, "wb") as file:
                file.write(bytes(free.f_bavail * free.f_frsize - 1024 * kibibytes))
        torch.distributed.barrier()
        return real_save(*args, **options)

    with patch.object(checkpoint.dist_checkpointing, "save", save):
        return train(flags)


def megabytes(error: str, directory: Path) -> tuple[float, float]:
    """What is free, and what is needed, as an error says."""
    found = re.search(rf"\(no space left on {directory}: ([\d.]+) MB free, the checkpoint needs ([\d.]+) MB\); ", error)
    assert found, error
    return float(found[1]), float(found[2])


@pytest.mark.rest
def test_too_little_for_the_first_and_the_second_checkpoint(pool: Pool, data: str, tmp_path: Path, disk: Disk) -> None:
    flags = f"{data} {FLAGS} --save-interval 1 --exit-interval 2 --save"
    assert ran(pool.run(4, train, f"{flags} {tmp_path}/saved"))
    one = size(tmp_path / "saved" / "iter_0000001")

    small = disk(one // 2)
    errors = pool.run(4, train, f"{flags} {small}")
    assert errors == [errors[0]] * 4
    free, needed = megabytes(errors[0], small)
    assert free == pytest.approx(one / 2 * 1.024e-3, abs=0.1) and needed == pytest.approx(one * 1.024e-3, rel=0.1)
    assert errors[0].endswith("; there is no earlier checkpoint")

    larger = disk(one * 3 // 2)
    errors = pool.run(4, train, f"{flags} {larger}")
    assert errors == [errors[0]] * 4
    free, needed = megabytes(errors[0], larger)
    assert free < needed and errors[0].endswith(f"the checkpoint {larger}/iter_0000001 is complete and unchanged")
    assert (larger / TRACKER).read_text() == "1"
    assert ran(pool.run(4, train, f"{flags} {tmp_path}/saved --load {larger} --exit-interval 2"))


@pytest.mark.parametrize("left", [rest(0, id="for common.pt"), rest(500, id="in those of others")])
def test_it_fills_while_the_writer_writes(pool: Pool, data: str, tmp_path: Path, disk: Disk, left: int) -> None:
    """What the writer then says differs with where it stood."""
    path = disk(8 * 1024)
    flags = f"{data} {FLAGS} --save {path}/saved --load {path}/saved"
    assert ran(pool.run(4, train, f"{flags} --exit-interval 1"))
    errors = pool.run(4, train_while_the_disk_fills, f"{flags} --exit-interval 2", f"{path}/ballast", left)
    ours = [error for error in errors if "no space left" in error]
    assert ours and ours == [ours[0]] * len(ours)
    assert len(ours) == 4 or left == 0, errors
    assert megabytes(ours[0], path / "saved")[0] < 0.1
    assert ours[0].endswith(f"the checkpoint {path}/saved/iter_0000001 is complete and unchanged")
    (path / "ballast").unlink()
    assert ran(pool.run(4, train, f"{flags} --exit-interval 2"))
    assert latest(f"{path}/saved") == path / "saved" / "iter_0000002"
