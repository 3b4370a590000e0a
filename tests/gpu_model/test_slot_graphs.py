"""The benchmark of CUDA graphs by slot, on a CPU whose pools give memory away at once (``graphs.py``)."""

from __future__ import annotations

from argparse import Namespace
from typing import Any
from unittest.mock import patch

import pytest
import slot_graphs
import torch
from megatron.core import parallel_state, tensor_parallel
from pool import Pool

from gpu_model import graphs

SMALL = {"hidden": 64, "tokens": 32, "layers": 2, "ranks": 4, "microbatches": 8, "dtype": "bf16", "rounds": 1}


def _measured(name: str, shared: bool) -> str:
    """Slots that it had; or what was wrong.

    Args:
        shared: all slots are in one pool.
    """
    one = graphs.Pool()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    posed: dict[str, Any] = {"CUDAGraph": graphs.CUDAGraph, "graph": graphs.graph, "synchronize": lambda: None}
    posed["graph_pool_handle"] = (lambda: one) if shared else graphs.Pool
    with patch.multiple(torch.cuda, **posed):
        try:
            return slot_graphs.measured(name, Namespace(**SMALL))[0][1]
        except SystemExit as error:
            return str(error)


@pytest.mark.parametrize(("name", "slots"), [("zb-h1", "4"), ("zb-v", "9")])
def test_graphs_are_compared_with_eager_passes(pool: Pool, name: str, slots: str) -> None:
    assert pool.run(1, _measured, name, False) == [slots]
    assert f"{name}: gradients of graphs differ" in pool.run(1, _measured, name, True)[0]
