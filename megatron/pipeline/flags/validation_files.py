"""Flags that name data, directories and files, checked before any process group exists."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from megatron.pipeline.flags.settings import Settings

DEFAULT_SPLIT = "969,30,1"


def of_data(args: Settings) -> Settings:
    """Settings of the one source of data, cut in one way: ``split``, where it was left open.

    Raises:
        ValueError: there is none, or more than one.
    """
    per_split = any((args.train_data_path, args.valid_data_path, args.test_data_path))
    sources = bool(args.mock_data) + bool(args.data_path) + per_split
    if sources != 1:
        raise ValueError(
            f"{'no' if not sources else 'more than one'} data source: give --data-path, --train-data-path (and so on) "
            "or --mock-data"
        )
    if per_split and args.split:
        raise ValueError("--split cuts --data-path; --train-data-path, --valid-data-path and --test-data-path are cut already")
    if not per_split:
        args |= {"split": args.split or DEFAULT_SPLIT}
        _check_split(args.split)
    if args.tokenizer_type is None:
        raise ValueError("missing --tokenizer-type: NullTokenizer needs --vocab-size, ByteLevelTokenizer nothing else")
    return args


def _check_split(split: str) -> None:
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or shares[0] <= 0:
        raise ValueError(
            f"--split {split}: expected up to three shares of at least 0, the first above 0, such as {DEFAULT_SPLIT}"
        )


def check_outputs(args: Settings) -> None:
    """Directories that cannot be written are found now rather than at the first checkpoint or metric.

    Raises:
        ValueError: one cannot be, and why.
    """
    files = {"--metrics": args.pipeline.metrics, "--pipeline-costs-cache": args.pipeline.costs_cache}
    for flag, file in files.items():
        if file and Path(file).is_dir():
            raise ValueError(f"{flag} {file} is a directory: name a file")
    directories = {
        "--save": args.save,
        "--tensorboard-dir": args.tensorboard_dir,
        "--pipeline-trace": args.pipeline.trace,
        "--data-cache-path": args.data_cache_path,
    }
    if args.rehearsal.on:
        directories["--rehearse-dir"] = args.rehearsal.directory
    directories |= {flag: str(Path(file).parent) for flag, file in files.items() if file}
    for flag, directory in directories.items():
        if directory is None:
            continue
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ValueError(f"{flag}: cannot write into {directory} ({error.strerror}): choose another directory") from None
