"""torch.distributed.checkpoint.filesystem: what reads checkpoints.

``FileSystemReader._slice_file``: torch writes a checksum of every tensor and never looks at it. A tensor that the disk has
changed is loaded as it is; where the change hits more than numbers, an error of pickle's does not say in which file. Here what is
read is compared with its checksum first. The function is private: a torch without it keeps its own way.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any
from zipfile import ZipFile

from megatron.pipeline.patches import compat
from torch.distributed.checkpoint import FileSystemReader


class CheckpointError(ValueError):
    """Error about a checkpoint in words for its user, to whom the place in the code says nothing more."""


class DamagedFile(Exception):
    """Error: a file of a checkpoint does not have what was written."""


def install() -> None:
    if hasattr(FileSystemReader, "_slice_file"):
        compat.wrap(FileSystemReader, "_slice_file", _compared)


def _compared(original: Any, reader: Any, file: Any, info: Any) -> Any:
    """A tensor's or an object's part of a file, which is an archive of torch's unless it was compressed; read as a whole."""
    part = original(reader, file, info)
    if getattr(info, "transform_descriptors", None):
        return part
    content = BytesIO(part.read())  # torch's view of a file counts backwards from its end in another way than archives need
    try:
        with ZipFile(content) as archive:
            damaged = archive.testzip() is not None
    except Exception:  # what is read as sizes and names may be anything
        damaged = True
    if damaged:
        end = info.offset + info.length
        raise DamagedFile(f"{info.relative_path} is not as it was written, between bytes {info.offset} and {end}")
    content.seek(0)
    return content
