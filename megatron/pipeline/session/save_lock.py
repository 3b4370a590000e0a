"""One run at a time saves into a directory: a file there names the process that does, rank 0's, and shows that it lives.

Every directory that several machines share can create a file that did not exist, rename it and show when it was changed. Locks of
the operating system it may not have, or only within a machine. Whether a process of this machine lives, the machine says;
of another machine's, the file, which is touched every few seconds, says it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.pipeline.distributed.groups import done_by_rank_0
from megatron.pipeline.planner import reading

LOCK = "saving_run.json"
_BEAT = 5.0  # seconds between two touches
_SILENCE = 30.0  # seconds without one after which the run of another machine has ended
_MOST = 4096  # bytes that are read of the file, which has a tenth of it

logger = logging.getLogger(__name__)


class CannotSave(ValueError):
    """Another run saves into the directory, or nothing can be written there."""


@contextmanager
def saving_into(directory: str | None) -> Iterator[None]:
    """``take``, and ``release`` at the end."""
    take(directory)
    try:
        yield
    finally:
        release(directory)


def take(directory: str | None) -> None:
    """Be the run that saves into a directory; a collective over all ranks. What a run has left that has ended is taken over.

    Args:
        directory: of ``--save``, which exists; None where nothing is saved.

    Raises:
        CannotSave: on every rank; says which other run saves there, or what is wrong.
    """
    if directory:
        try:
            done_by_rank_0(lambda: check(directory))
        except OSError as error:
            raise CannotSave(f"--save {directory}: {LOCK} cannot be written there ({error.strerror})") from None


def check(directory: str) -> None:
    """Make sure, on rank 0, that this run is the one that saves into a directory, also if somebody has removed the file.

    Raises:
        CannotSave: another run is.
        OSError: the file cannot be read or written.
    """
    path = Path(directory) / LOCK
    while not _create(path):
        text, touched = _look(path)
        holder = _read(text)
        if _who(holder) == _who(_this_process()):
            return
        if touched is None:
            continue  # it is gone
        if _lives(path, text, touched):
            lost = f". If that machine is lost, remove {path}" if holder.get("machine") != _machine() else ""
            raise CannotSave(f"another run saves into {directory}: {_words(holder)}; give another --save, or end that run{lost}")
        if _look(path)[0] == text and _remove(path, text):  # else that run has ended, or had only begun to write
            logger.warning("taking over %s from a run that has ended without a word: %s", directory, _words(holder))


def release(directory: str | None) -> None:
    """Let other runs save there. Does nothing on ranks other than 0, and where another run has taken over."""
    if directory:
        with suppress(OSError):
            if _is_ours(path := Path(directory) / LOCK):
                path.unlink()


def _create(path: Path) -> bool:
    """Write the file unless there is one; whether there was none."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    try:
        with open(descriptor, "w") as file:
            json.dump(_this_process(), file)
    except BaseException:  # such as a full disk
        path.unlink(missing_ok=True)
        raise
    threading.Thread(target=_touch, args=(path,), name="save-lock", daemon=True).start()
    return True


def _touch(path: Path) -> None:
    """Show others that this run lives, for as long as the file is its own."""
    while True:
        time.sleep(_BEAT)
        with suppress(OSError):  # a server that is away for a while
            if not _is_ours(path):
                return
            os.utime(path)


def _remove(path: Path, text: str) -> bool:
    """Remove the file of a run that has ended, unless another run was quicker and has written its own; whether it was there."""
    aside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.rename(aside)  # of two runs that try it one finds the file
    except FileNotFoundError:
        return False
    if _look(aside)[0] != text:
        aside.rename(path)
        return False
    aside.unlink()
    return True


def _look(path: Path) -> tuple[str, int | None]:
    """Read the file, and when it was touched, in nanoseconds; None if it is not there. Opening it asks the server.

    Raises:
        OSError: it cannot be read, or is something else than a file, such as a link to nowhere or a pipe, which has no end.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return "", None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return os.read(descriptor, _MOST).decode(errors="replace"), state.st_mtime_ns
    finally:
        os.close(descriptor)


def _read(text: str) -> dict[str, Any]:
    """Empty if nothing can be read, as while the file is written."""
    with suppress(ValueError, RecursionError):
        holder = json.loads(text)
        if isinstance(holder, dict):
            return holder
    return {}


def _words(holder: dict[str, Any]) -> str:
    return reading.printable(
        f"host {holder.get('host', '?')}, process {holder.get('process', '?')}, since {holder.get('since', '?')}"
    )


def _is_ours(path: Path) -> bool:
    return _who(_read(_look(path)[0])) == _who(_this_process())


def _who(holder: dict[str, Any]) -> list[Any]:
    return [holder.get(name) for name in ("machine", "process", "started")]


def _this_process() -> dict[str, Any]:
    own = {"process": os.getpid(), "started": _started(os.getpid()), "machine": _machine()}
    return {"host": socket.gethostname(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}", **own}


def _lives(path: Path, text: str, touched: int) -> bool:
    """Tell whether the process that has written a file lives, which its machine knows; on another one the file shows it."""
    holder = _read(text)
    if holder.get("machine") == _machine():
        return _started(holder.get("process")) == holder.get("started")
    words = "%s was written on another machine, by %s: waiting up to %.0f s for a sign of life"
    logger.warning(words, path, _words(holder), _SILENCE)
    until = time.monotonic() + _SILENCE
    while (seen := _look(path)) == (text, touched) and time.monotonic() < until:
        time.sleep(_BEAT / 5)
    return seen[0] == text and seen[1] != touched


def _machine() -> str:
    """This machine, its start and its numbering of processes, which a container has for itself."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {os.getpid()}"  # not a Linux: of no other process anything is known


def _started(process: Any) -> str:
    """When a process started, as its number may be another's later; empty if it has ended."""
    with suppress(OSError, ValueError):  # the latter for what is no number, in a file that is damaged
        state, *rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return "" if state in "ZX" else rest[18]
    return ""
