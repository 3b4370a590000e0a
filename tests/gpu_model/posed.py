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
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pool
import torch
from torch.multiprocessing.reductions import reduce_tensor

from gpu_model import pose


def posing(function: Callable[..., None], *args: Any) -> None:
    """Call a function on a rank."""
    pose()
    ForkingPickler.register(torch.Tensor, _sent)
    function(*args)


def _sent(tensor: torch.Tensor) -> Any:
    assert not tensor.is_cuda, "tensors of a GPU go to other processes by CUDA's IPC, which not every machine has"
    return reduce_tensor(tensor)


def spawned(function: Callable[..., None], *args: Any) -> BaseProcess:
    """In place of ``pool.spawned``: where no CUDA is, ranks may be forked."""
    return pool.forked(posing, function, *args)


def main() -> None:
    for name in pool.PRELOADED:  # what is imported later would find a torch that poses
        importlib.import_module(name)
    pose()
    pool.spawned = spawned
    _, program, *_ = sys.argv
    del sys.argv[0]
    if program.endswith(".py"):
        sys.path.insert(0, program.rpartition("/")[0])
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    importlib.import_module("gpu_model.posed").main()  # by a name that ranks find
