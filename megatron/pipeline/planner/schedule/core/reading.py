"""Files that people give: their text, and the JSON in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MOST = 2**28  # bytes of a file: a hundred times what a plan takes


def read_text(path: str | Path, expected: str = "JSON as mpipe plan --json writes it, or CSV") -> str:
    """The content of a file.

    Args:
        expected: what it should be, in words.

    Raises:
        ValueError: it cannot be read, has no end in sight, or is not text.
    """
    try:
        return content_of(path)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file; expected {expected}") from None


def content_of(path: str | Path) -> str:
    """The same with errors of Python's.

    Raises:
        OSError: it cannot be read.
        ValueError: it has no end in sight, or is not text.
    """
    with open(path, "rb") as file:
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise ValueError(f"{path} has more than {_MOST // 2**20} MiB, which no file of this kind has: give another")
    return content.decode("utf-8-sig")  # editors of Windows write a mark at the start


class NamedErrors:
    """A context whose ValueErrors begin with words, such as the flag or the file that is read."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise ValueError(f"{self._words} {error}") from None


def parse_json(text: str, what: str) -> Any:
    """Parse the text of a JSON file.

    Args:
        what: the file should hold, such as ``costs``.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or gives a key of an object twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"not {what}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not {what}: invalid JSON ({error})") from None


def printable(text: str) -> str:
    """The text with control characters, which terminals obey, as they are written in Python."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is given twice: leave one of them out")
        found[name] = value
    return found
