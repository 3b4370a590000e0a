"""Files that are either there completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

UNFINISHED = ".incomplete"


def write_text(path: Path, text: str) -> None:
    """Write a file and make it durable before its name shows it; directories are made as needed.

    Devices and pipes are written to as they are.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + UNFINISHED)
    try:
        unfinished.write_text(text)
        sync(unfinished)
    except BaseException:  # such as a full disk, which half a file would keep full
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
