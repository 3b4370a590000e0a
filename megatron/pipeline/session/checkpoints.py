"""Checkpoints on disk: their names, which of them a directory's tracker names, and whether they can be read.

A checkpoint is a directory such as ``iter_0000020/`` in torch's distributed format; a tracker file next to it names the latest.
"""

from __future__ import annotations

import json
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from megatron.core import dist_checkpointing
from megatron.pipeline.patches import compat
from torch.distributed.checkpoint import FileSystemReader, Metadata

from megatron.pipeline.session.atomic import UNFINISHED

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "torch_dist"
RESHARDABLE = "fully_reshardable"  # of the distributed optimizer's: the one that another layout can read
RELEASE = "release"  # weights alone, in Megatron-LM
_LONGEST = 600  # characters of an error's words
_OTHER_FORMAT = "has the format"
_DIGITS = 18  # of an iteration, at most
_PARTS = ("metadata.json", ".metadata", "common.pt")
_COMMON = "common_state"  # what 0.19 and later have in place of the last of these


def find(directory: str) -> Path | None:
    """The checkpoint to go on from: the one the tracker names, or without a tracker the newest complete one; None if none is.

    Raises:
        ValueError: the tracker names none that can be read; says which other one can be taken, and how.
    """
    try:
        return _find(Path(directory))
    except OSError as error:
        raise ValueError(f"--load {directory} cannot be read: {error.filename}: {error.strerror}") from None


def _find(root: Path) -> Path | None:
    tracker = root / TRACKER
    if root.exists() and not root.is_dir():
        raise ValueError(f"--load {root} is a file: give the directory with the checkpoints")
    if not _wrong(root):
        raise ValueError(f"--load {root} is a checkpoint itself: give the directory that it is in")
    if not tracker.exists() and not tracker.is_symlink():
        return _newest(root)
    try:
        named = tracker.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{tracker} cannot be read ({error}){_instead(root)}") from None
    if named != RELEASE and not (named.isascii() and named.isdecimal() and len(named) <= _DIGITS):
        raise ValueError(f"{tracker} says {named[:20]!r}, which is no iteration{_instead(root)}")
    path = root / (RELEASE if named == RELEASE else name_of(int(named)))
    if not path.exists() and replaced(path).exists():
        path = replaced(path)  # a crash while one of the same iteration took its place
    if wrong := _wrong(path):
        raise damaged(path, wrong)
    return path


def _newest(root: Path) -> Path | None:
    """The newest complete checkpoint of a directory without a tracker; None if nothing there looks like one."""
    if complete := _complete(root):
        return complete[max(complete)]
    damaged = [path for path in (*sorted(root.glob("iter_*")), root / RELEASE) if path.exists() and path.suffix != UNFINISHED]
    if damaged:
        names = ", ".join(path.name for path in damaged)
        raise ValueError(f"--load {root} has no {TRACKER} and no complete checkpoint, but {names}: restore it, or remove {names}")
    return None


def latest(directory: str) -> Path | None:
    """Checkpoint that ``find`` finds; None also where that cannot be read."""
    try:
        return find(directory)
    except ValueError:
        return None


def name_of(iteration: int) -> str:
    return f"iter_{iteration:07d}"


def replaced(path: Path) -> Path:
    """Path of a checkpoint while one of the same iteration takes its place."""
    return path.with_name(f"{path.name}.replaced{UNFINISHED}")


def reason(error: BaseException, frames: traceback.StackSummary | None = None) -> str:
    """Reason of a failure in one line: the error's kind and words, or where it was raised if it has none.

    Args:
        frames: where, if the error comes from another process and has lost that.
    """
    words = " ".join(str(error).split()).rpartition("WeightsUnpickler error: ")[2]  # torch's advice stands before that
    if words:
        return f"{type(error).__name__}: {words[:_LONGEST]}"
    where = frames or traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__} in {where[-1].filename}:{where[-1].lineno}: {where[-1].line}" if where else repr(error)


class Unreadable(Exception):
    """A file of a checkpoint cannot be read, or is cut off."""


def contents_of(path: Path) -> tuple[dict[str, Any], Metadata]:
    """A checkpoint's common state and its description of the tensors, which stay on the disk.

    Raises:
        Unreadable: a file cannot be read, or is cut off.
    """
    name = "common.pt"
    if not (path / name).exists() and not compat.is_from("0.19"):
        raise Unreadable(f"was saved by megatron-core 0.19 or later, and {compat.version()} is installed")
    try:
        common = dict(dist_checkpointing.load_common_state_dict(str(path)))
        name = ".metadata"
        metadata = FileSystemReader(path).read_metadata()
        ends: dict[str, int] = {}
        for part in metadata.storage_data.values():
            ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
        for name, end in ends.items():
            size = (path / name).stat().st_size if (path / name).exists() else 0
            if size < end:
                raise Unreadable(f"is damaged: {name} has {size} of {end} bytes")
            (path / name).open("rb").close()
    except Unreadable:
        raise
    except Exception as error:  # pickle has errors of every kind
        raise Unreadable(f"is damaged: {name} cannot be read ({reason(error)})") from None
    return common, metadata


def iteration_of(path: Path) -> int | None:
    """The iteration of which a directory's name says that it is a checkpoint, as ``name_of`` makes it."""
    number = path.name.removeprefix("iter_")
    return int(number) if number != path.name and number.isascii() and number.isdecimal() else None


def newest(root: Path, besides: Path | None = None) -> Path | None:
    """The newest whole checkpoint of a directory, of any format; None if there is none."""
    found = {path: iteration for path in root.glob("iter_*") if (iteration := iteration_of(path)) is not None and path != besides}
    return next((path for path in sorted(found, key=found.__getitem__, reverse=True) if not fault(path)), None)


def fault(path: Path) -> str:
    """Fault of a checkpoint of any format, as far as it shows without its tensors; empty if there is none."""
    if parts := sorted(path.glob("mp_rank_*/*.pt")):  # the format torch
        with suppress(OSError, ValueError):
            if (iteration_of(path) or 0) > int((path.parent / TRACKER).read_text()):  # which is written once all files are
                return "is not complete"
        cut = [part for part in parts if not is_zipfile(part)]
        return f"is damaged: {cut[0].relative_to(path)} is cut off" if cut else ""
    try:
        wrong = _wrong(path)
        if not wrong:
            contents_of(path)
    except (OSError, Unreadable) as trouble:
        return str(trouble)
    return "" if wrong.startswith(_OTHER_FORMAT) else wrong


def _complete(root: Path) -> dict[int, Path]:
    found = {path: iteration_of(path) for path in root.glob("iter_*")}
    return {iteration: path for path, iteration in found.items() if iteration is not None and not _wrong(path)}


def _wrong(path: Path) -> str:
    """Sign at a glance that a directory is no checkpoint that can be read; empty if nothing does."""
    if not path.is_dir():
        return "is missing"
    files = {file.name for file in path.iterdir()}
    if files <= {".metadata"}:  # which no pattern such as * matches
        return "is empty" + ("" if not files else " but for .metadata")
    try:
        form = json.loads((path / _PARTS[0]).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError):
        form = "torch" if any(file.startswith("mp_rank_") for file in files) else FORMAT
        if files.isdisjoint(_PARTS[::2]) and ".metadata" in files:
            form = "torch_dcp or fsdp_dtensor"
    if form != FORMAT:
        return f"{_OTHER_FORMAT} {form}: --load reads {FORMAT}, to which Megatron-LM converts (--ckpt-convert-format)"
    missing = [name for name in _PARTS if name not in files]
    if missing == ["common.pt"] and _COMMON.encode() in (path / ".metadata").read_bytes():
        missing = []
    return f"is damaged: {' and '.join(missing)} missing" if missing else ""


def damaged(path: Path, what: str) -> ValueError:
    """Words about a checkpoint that cannot be read: what is wrong, and which other one can be taken."""
    return ValueError(f"the checkpoint {path} {what}{_instead(path.parent, path)}")


def _instead(root: Path, damaged: Path | None = None) -> str:
    """Another checkpoint that can be taken, and how."""
    if other := newest(root, damaged):
        return f"; to go on from iteration {iteration_of(other)}, write {iteration_of(other)} into {root / TRACKER}"
    return f"; {root} has no other: give another --load"
