"""Megatron's ``.bin`` and ``.idx`` files, looked at before they are used: complete, and of this tokenizer?"""

from __future__ import annotations

import struct
from argparse import Namespace
from pathlib import Path
from typing import NamedTuple

import numpy
from megatron.core.datasets.indexed_dataset import DType, get_bin_path, get_idx_path
from megatron.core.datasets.utils import get_blend_from_list

Blend = tuple[list[str], list[float] | None]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, token type, sequences, documents + 1
_SAMPLE_TOKENS = 1_000_000
_TOOL = "scripts/preprocess_data.py"


class Index(NamedTuple):
    """Contents of an ``.idx`` file: the type of a token, and the tokens of every sequence."""

    dtype: type[numpy.number]
    lengths: numpy.ndarray


def blend(paths: list[str]) -> Blend:
    """Prefixes and their weights from ``--data-path``: ``A``, ``A B`` or ``0.3 A 0.7 B``.

    Raises:
        ValueError: weights and prefixes are mixed up.
    """
    try:
        result: Blend = get_blend_from_list(paths)
    except AssertionError:
        raise ValueError(f"data paths {' '.join(paths)}: give prefixes alone, or a weight before every prefix") from None
    return result


def blend_per_split(args: Namespace) -> list[Blend | None]:
    """Data from which training, validation and test are drawn."""
    if args.data_path:
        return [blend(args.data_path)] * 3
    return [blend(paths) if paths else None for paths in (args.train_data_path, args.valid_data_path, args.test_data_path)]


def read_index(prefix: str) -> Index:
    """Read and check ``prefix.idx``, and the size of ``prefix.bin``.

    Raises:
        ValueError: a file is missing, is not Megatron's, or is shorter than it says.
    """
    idx, data = Path(get_idx_path(prefix)), Path(get_bin_path(prefix))
    for path in (idx, data):
        if not path.is_file():
            raise ValueError(f"data file {path} does not exist: give its path without .bin or .idx; {_TOOL} makes them")
    with idx.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise ValueError(f"data file {idx} is not an index of Megatron's format: prepare the data again with {_TOOL}")
        _, _, code, sequences, documents = _HEADER.unpack(header)
        expected = _HEADER.size + sequences * (4 + 8) + documents * 8
        if idx.stat().st_size != expected:
            raise ValueError(f"data file {idx} is truncated: {idx.stat().st_size} bytes instead of {expected}; prepare it again")
        lengths = numpy.fromfile(file, dtype=numpy.int32, count=sequences)
    dtype = DType.dtype_from_code(code)
    size = int(lengths.sum(dtype=numpy.int64)) * DType.size(dtype)
    if data.stat().st_size != size:
        raise ValueError(
            f"data file {data} is truncated: {data.stat().st_size} bytes instead of the {size} that {idx.name} counts; "
            "prepare it again"
        )
    return Index(dtype, lengths)


def check_prefix(prefix: str, vocab_size: int) -> None:
    """Check both files of ``prefix``, and that their first tokens exist in the vocabulary.

    Raises:
        ValueError: as ``read_index``; or a token is not in the vocabulary.
    """
    index = read_index(prefix)
    tokens = numpy.fromfile(get_bin_path(prefix), dtype=index.dtype, count=_SAMPLE_TOKENS)
    if len(tokens) and (tokens.max() >= vocab_size or tokens.min() < 0):
        raise ValueError(
            f"{prefix} holds the token {tokens.max() if tokens.min() >= 0 else tokens.min()}, but the tokenizer has "
            f"{vocab_size} tokens: give the --tokenizer-type and --tokenizer-model that the data was prepared with"
        )


def split_has_tokens(prefix: str, split: str | None, number: int) -> bool:
    """Tell whether the ``number``-th part of the data holds a token; ``split`` None gives all of the data to every part.

    The bounds are rounded as megatron-core rounds them.
    """
    lengths = read_index(prefix).lengths
    if split is None:
        return bool(lengths.sum() > 0)
    shares = [float(share) for share in split.split(",")]
    shares += [0.0] * (3 - len(shares))
    begin, end = (round(sum(shares[:bound]) / sum(shares) * len(lengths)) for bound in (number, number + 1))
    return bool(lengths[begin:end].sum() > 0)
