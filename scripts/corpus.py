"""From text to Megatron's ``.bin`` and ``.idx``: find documents, tokenize in several processes, write atomically."""

from __future__ import annotations

import json
import multiprocessing
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

from megatron.pipeline.session.atomic import UNFINISHED, sync
from megatron.pipeline.session.tokenizer import build_tokenizer

_PIECE = 16_384
_LEAST_PIECES = 50  # of all files together: enough for a tenth of them to be some
_NOT_IN_CORPUS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Document(NamedTuple):
    """One text for every JSON key, and the bytes of input that it took (for the progress bar)."""

    texts: tuple[str, ...]
    size: int


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The files to read: those given, and all text files in the directories given, sorted by name.

    Raises:
        ValueError: an input does not exist, or there is nothing in it.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if not path.exists():
            raise ValueError(f"--input {path} does not exist")
        found = [path] if path.is_file() else sorted(one for one in path.rglob("*") if _is_text(one, path))
        if not found:
            raise ValueError(f"--input {path} is a directory without text files")
        files += found
    return files


def standard_library(limit: int) -> list[Path]:
    """Source files of this Python's standard library without its tests, by name, of at most ``limit`` bytes in all."""
    root = Path(sysconfig.get_path("stdlib"))
    files, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if _NOT_IN_CORPUS.isdisjoint(path.relative_to(root).parts) and size + path.stat().st_size <= limit:
            files.append(path)
            size += path.stat().st_size
    return files


def read_documents(files: Iterable[Path], keys: Sequence[str], errors: str) -> Iterator[Document]:
    """Documents in order: a line each of JSON lines (``.json``, ``.jsonl``); plain text in pieces of whole lines.

    A plain file is cut into pieces of 16 Ki characters, of less where all files together are small, so that even a single
    file can be split into training and validation, which Megatron does by document.

    Args:
        keys: which fields of a JSON line hold text; plain text has the one field ``text``.
        errors: what to do with bytes that are not UTF-8, as for ``open``.

    Raises:
        ValueError: a line is not JSON or lacks a key; plain text with keys other than ``text``.
    """
    files = list(files)
    piece_size = max(64, min(_PIECE, sum(path.stat().st_size for path in files) // _LEAST_PIECES))
    for path in files:
        with path.open(encoding="utf-8", errors=errors, newline="") as file:
            if path.suffix in (".json", ".jsonl"):
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield Document(_fields(line, keys, f"{path}, line {number}"), len(line))
            elif list(keys) != ["text"]:
                raise ValueError(f"{path} is plain text and has no --json-keys {' '.join(keys)}")
            else:
                while piece := "".join(file.readlines(piece_size)):
                    yield Document((piece,), len(piece))


def write_dataset(
    documents: Iterable[Document],
    prefix: str,
    keys: Sequence[str],
    tokenizer_args: Namespace,
    append_eod: bool,
    workers: int,
    progress: Callable[[int], object],
) -> dict[str, tuple[int, int]]:
    """Tokenize documents and write ``PREFIX_KEY_document.bin`` and ``.idx`` for every key.

    The files get their names when all is written, the index last: a run that is killed leaves no index behind. The
    result does not depend on the number of workers.

    Args:
        tokenizer_args: what ``build_tokenizer`` reads.
        progress: called with the bytes of input of every document that is done.

    Returns:
        The number of documents and of tokens, by prefix written.

    Raises:
        ValueError: the files cannot be written, or there is no text.
    """
    prefixes = [f"{prefix}_{key}_document" for key in keys]
    dtype = DType.optimal_dtype(build_tokenizer(tokenizer_args).vocab_size)
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        builders = {one: IndexedDatasetBuilder(get_bin_path(one) + UNFINISHED, dtype=dtype) for one in prefixes}
    except OSError as error:
        raise ValueError(f"cannot write {prefix}: {error.strerror}: {error.filename}") from None
    for encoded, size in _encode_all(documents, tokenizer_args, append_eod, workers):
        for builder, tokens in zip(builders.values(), encoded, strict=True):
            if tokens:
                builder.add_document(numpy.asarray(tokens, dtype=dtype), [len(tokens)])
        progress(size)
    if not all(builder.sequence_lengths for builder in builders.values()):
        raise ValueError(f"no text found in the input, which is empty or blank: nothing was written to {prefix}")
    for one, builder in builders.items():
        _finish(builder, Path(get_bin_path(one)), Path(get_idx_path(one)))
    return {one: (len(builder.sequence_lengths), sum(builder.sequence_lengths)) for one, builder in builders.items()}


def _finish(builder: IndexedDatasetBuilder, data: Path, index: Path) -> None:
    unfinished_data, unfinished_index = (path.with_name(path.name + UNFINISHED) for path in (data, index))
    builder.finalize(str(unfinished_index))
    index.unlink(missing_ok=True)  # an old index must never describe new data
    for unfinished, path in ((unfinished_data, data), (unfinished_index, index)):
        sync(unfinished)
        unfinished.rename(path)
    sync(data.parent)


def _encode_all(
    documents: Iterable[Document], tokenizer_args: Namespace, append_eod: bool, workers: int
) -> Iterator[tuple[list[list[int]], int]]:
    if workers == 1:
        yield from map(_Encoder(tokenizer_args, append_eod), documents)
        return
    with multiprocessing.Pool(workers, partial(_start_worker, tokenizer_args, append_eod)) as pool:
        yield from pool.imap(_encode_in_worker, documents, chunksize=16)


class _Encoder:
    def __init__(self, tokenizer_args: Namespace, append_eod: bool) -> None:
        self._tokenizer: Any = build_tokenizer(tokenizer_args)
        self._end = [self._tokenizer.eod] if append_eod else []

    def __call__(self, document: Document) -> tuple[list[list[int]], int]:
        encoded = [self._tokenizer.tokenize(text) for text in document.texts]
        return [tokens + self._end if tokens else [] for tokens in encoded], document.size


_encoder: _Encoder  # of a worker process


def _start_worker(tokenizer_args: Namespace, append_eod: bool) -> None:
    """Build the tokenizer once in each worker process, where it stays for all its documents."""
    global _encoder
    _encoder = _Encoder(tokenizer_args, append_eod)


def _encode_in_worker(document: Document) -> tuple[list[list[int]], int]:
    return _encoder(document)


def _fields(line: str, keys: Sequence[str], place: str) -> tuple[str, ...]:
    try:
        record = json.loads(line)
        return tuple(str(record[key]) for key in keys)
    except (json.JSONDecodeError, TypeError):
        raise ValueError(f"{place}: not a JSON object") from None
    except KeyError as error:
        raise ValueError(f"{place}: no key {error}; --json-keys names the keys that hold text") from None


def _is_text(path: Path, root: Path) -> bool:
    """Whether a file in a directory is taken for text: not hidden, and no zero byte at its beginning."""
    if not path.is_file() or any(part.startswith(".") for part in path.relative_to(root).parts):
        return False
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)
