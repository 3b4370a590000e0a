"""Checkpoints that cannot be written or read: one line says what failed, where, and which iteration is whole.

``save_sharded`` and ``load_sharded`` stand around megatron-core's ``dist_checkpointing``, in any loop; ``writing`` and
``reading`` around other ways to save and load.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.pipeline.patches import dist_checkpointing
from megatron.pipeline.patches.torch_checkpoint import CheckpointError, DamagedFile
from torch.distributed.checkpoint.api import CheckpointException

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.distributed.groups import done_by_rank_0
from megatron.pipeline.session import save_lock
from megatron.pipeline.session.atomic import UNFINISHED
from megatron.pipeline.session.checkpoints import damaged, fault, iteration_of, newest, reason, replaced

_ARCHIVE = 1900  # bytes of what torch.save writes around a tensor, and of its place in the description of all
_NO_SPACE = "no space left on"
_FULL = 64 * 2**10  # bytes free below which a write has failed for lack of space


def install() -> None:
    """Say so to loops that call ``dist_checkpointing``."""
    dist_checkpointing.install(save_sharded, load_sharded)


def save_sharded(save: Callable[..., Any], state: dict[str, Any], directory: str, *rest: Any, **options: Any) -> Any:
    """``dist_checkpointing.save``, and what it leaves for the end of an asynchronous save, in ``writing``."""
    path = Path(directory)
    if path.suffix == UNFINISHED:  # of a program with words of its own
        return save(state, directory, *rest, **options)
    needed = bytes_to_write(state)
    with writing(path, needed):
        request = save(state, directory, *rest, **options)
    if request is not None:
        request.finalize_fns[:] = [writing(path, needed)(end) for end in request.finalize_fns]
    return request


def load_sharded(load: Callable[..., Any], state: dict[str, Any], directory: str, *rest: Any, **options: Any) -> Any:
    """``dist_checkpointing.load`` in ``reading``."""
    with reading(Path(directory)):
        return load(state, directory, *rest, **options)


@contextmanager
def writing(path: Path, needed: int = 0, meet: Callable[[], object] = bool) -> Iterator[None]:
    """Write a checkpoint. If that fails, what there is of it has the name with ``.incomplete``, and what was kept as ``replaced``
    has its own again.

    Args:
        needed: bytes that all ranks write; 0 where it is not known: as many as the one before.
        meet: called where this rank alone may have failed; returns when the others have written what they write.

    Raises:
        CheckpointError: for want of space, or for what the writer or the file system says.
    """
    kept = replaced(path).exists()
    try:
        yield
    except CheckpointError:
        raise
    except BaseException as error:
        if is_whole(path, error):  # what came behind it failed
            raise
        of_all, settle = isinstance(error, CheckpointException), partial(_settle, error, path, needed, kept)
        if isinstance(error, Exception):  # neither torch's, which all ranks have, nor an end by the user
            meet()
        words, usable = done_by_rank_0(settle) if of_all else settle()
        if not (of_all or isinstance(error, OSError) or words.startswith(_NO_SPACE)):
            raise
        left = f"the checkpoint {usable} is complete and unchanged" if usable else "there is no earlier checkpoint"
        raise CheckpointError(f"the checkpoint {path} could not be written ({words}); {left}") from None


def is_whole(path: Path, error: BaseException) -> bool:
    """Tell whether a checkpoint was written before something else failed, as a log of checkpoints elsewhere."""
    failed = isinstance(error, (CheckpointException, CheckpointError)) or getattr(error, "errno", None) == errno.ENOSPC
    return not failed and not fault(path)


def _settle(error: BaseException, path: Path, needed: int, kept: bool) -> tuple[str, Path | None]:
    """Reason of a failed save, and the newest checkpoint that is whole once what there is of this one has lost its name."""
    before = newest(path.parent, path)
    words = _why(error, path, needed or (_size(before) if before else 0))
    if iteration_of(path) is not None:  # else the directory may have more than this
        unfinished, older = path.with_name(path.name + UNFINISHED), path.with_name(f"{path.name}.older{UNFINISHED}")
        with suppress(OSError):
            if kept:  # one rank finds it: what later ranks find under the name is this
                replaced(path).rename(older)
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(FileNotFoundError):  # the first rank to fail has done it, or nothing was written
                path.rename(unfinished)
            if kept:
                older.rename(path)
    return words, newest(path.parent)


@contextmanager
def reading(path: Path | None) -> Iterator[None]:
    """Read a checkpoint, if there is one.

    Raises:
        CheckpointError: a file is missing, cut off or changed; says which other checkpoint can be taken. Or torch's reader
            failed, or the program ended as if all were well.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException, SystemExit) as error:
        if path is None:
            raise
        files = sorted({str(failure) for failure in _failures(error) if isinstance(failure, DamagedFile)})
        if wrong := f"is damaged: {'; '.join(files)}" if files else fault(path):
            raise CheckpointError(str(damaged(path, wrong))) from None
        if isinstance(error, CheckpointException) or getattr(error, "code", 1) is None:
            raise CheckpointError(f"the checkpoint {path} could not be loaded ({reason_of(error)})") from None
        raise


def why(error: BaseException, written: Path, needed: int) -> str:
    """Reason why a checkpoint could not be written. Collective over the world where every rank gets torch's own exception, which
    has it on rank 0 alone.

    Args:
        written: the directory with what there is of it.
        needed: bytes of the whole.
    """
    if isinstance(error, CheckpointException):
        return done_by_rank_0(partial(_why, error, written, needed))
    return _why(error, written, needed)


def _why(error: BaseException, written: Path, needed: int) -> str:
    # The writer's own words for a full disk may be "unexpected pos 704 vs 598".
    free = free_bytes(written.parent)
    full = free < max(needed - _size(written), _FULL)
    if full or any(getattr(failure, "errno", None) == errno.ENOSPC for failure in _failures(error)):
        needs = f", the checkpoint needs {_megabytes(needed)}" if needed else ""
        return f"{_NO_SPACE} {written.parent}: {_megabytes(free)} free{needs}"
    return reason_of(error)


def _size(path: Path) -> int:
    with suppress(OSError):  # another rank has removed it
        return sum(file.stat().st_size for file in path.rglob("*.*"))
    return 0


def reason_of(error: BaseException) -> str:
    """Reason of a failure, without the tracebacks that torch's exception prints for every rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({reason(failure, frames) for failure, frames in error.failures.values()}))
    return str(error) if isinstance(error, save_lock.CannotSave) else reason(error)


def _failures(error: BaseException) -> list[BaseException]:
    return [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]


def bytes_to_write(state: dict[str, Any]) -> int:
    """Bytes that all ranks will write of a sharded state: the bytes of tensors, with the archive that torch makes of each.
    Collective over the world."""
    tensors = (one for one in nested_values(state) if isinstance(one, (ShardedTensor, ShardedTensorFactory)))
    own = sum(one.data.nbytes + _ARCHIVE for one in tensors if one.data is not None and is_main_replica(one.replica_id))
    total = torch.tensor(own, dtype=torch.int64, device=this_device())
    torch.distributed.all_reduce(total)
    return int(total)


def free_bytes(directory: Path) -> float:
    """Bytes that can still be written there; infinite on a file system that does not say it. Quotas are not in it."""
    try:
        found = os.statvfs(directory)
    except OSError:  # such as a server that is away
        return math.inf
    blocks = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return blocks * found.f_frsize if found.f_blocks else math.inf


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
