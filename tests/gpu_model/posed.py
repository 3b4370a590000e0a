"""Programs that believe they have a GPU, and that their ranks have one each.

python -m gpu_model.posed pytest -m cuda tests/on_gpus
python -m gpu_model.posed benchmarks/queues.py --priority high
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pool

from gpu_model import pose

_forked = pool.forked


def posing(function: Callable[..., None], *args: Any) -> None:
    """Call a function on a rank."""
    pose()
    function(*args)


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    return _forked(posing, function, *args)


def main() -> None:
    for name in pool.PRELOADED:  # what is imported later would find a torch that poses
        importlib.import_module(name)
    pose()
    pool.forked = forked
    _, program, *_ = sys.argv
    del sys.argv[0]
    if program.endswith(".py"):
        sys.path.insert(0, program.rpartition("/")[0])
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
