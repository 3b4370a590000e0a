"""Files that are either there completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

UNFINISHED = ".incomplete"


def write_text(path: Path, text: str) -> None:
    """Write a file and make it durable before its name shows it; directories are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + UNFINISHED)
    unfinished.write_text(text)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's contents, or a directory's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
