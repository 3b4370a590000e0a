"""``python -m gpu_model.marked``: pytest, with its arguments, where this process and its ranks believe that they have a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pool
import pytest

from gpu_model import pose

_forked = pool.forked


def posed(function: Callable[..., None], *args: Any) -> None:
    """Call a function on a rank that poses."""
    pose()
    function(*args)


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    return _forked(posed, function, *args)


def main() -> int:
    for name in pool.PRELOADED:  # what is imported later would find a torch that poses
        importlib.import_module(name)
    pose()
    pool.forked = forked
    return int(pytest.main(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
