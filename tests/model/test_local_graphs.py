"""megatron-core's CUDA graphs by slot: which runner a microbatch has, what is left eager, and whose weights stay in B."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.pipeline.patches import compat, cuda_graphs

from megatron.pipeline.model import local_graphs


class _Manager(torch.nn.Module):
    """What upstream's does, without graphs."""

    def __init__(self, part: str = "layer") -> None:
        super().__init__()
        self.func, self._part = lambda *_: "eager", part

    def __call__(self, module: Any, args: Any, kwargs: Any) -> Any:
        def run(*_: Any, **__: Any) -> Any:
            return cuda_graphs._runner_of_slot(self._made, self, module, args, kwargs)

        return cuda_graphs._graphed_or_eager(run, self, module, args, kwargs)

    def _made(self, *_: Any) -> Any:
        return SimpleNamespace(status=None, mempool=None)


@pytest.fixture(autouse=True)
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Pools have numbers."""
    module = compat.module("megatron.core.transformer.cuda_graphs")
    pools = iter(range(100))
    monkeypatch.setattr(module.torch.cuda, "graph_pool_handle", lambda: next(pools), raising=False)
    monkeypatch.setattr(module._CudagraphGlobalRecord, "cudagraph_created", False)
    local_graphs.say_eager.cache_clear()
    return module


def _chunk(managers: int = 2) -> Any:
    chunk: Any = torch.nn.Module()
    chunk.config = SimpleNamespace(deallocate_pipeline_outputs=True)
    chunk.layers = torch.nn.ModuleList()
    for number in range(managers):
        layer: Any = torch.nn.Module()
        layer.layer_number, layer.cudagraph_manager, layer.linear = number, _Manager(), torch.nn.Linear(2, 2)
        chunk.layers.append(layer)
    return chunk


def _run(chunk: Any, microbatches: int) -> list[list[Any]]:
    return [[layer.cudagraph_manager(layer, (), {}) for _ in range(microbatches)] for layer in chunk.layers]


def test_microbatches_of_a_slot_have_one_runner_in_the_slots_pool() -> None:
    chunk = _chunk()
    local_graphs.place([chunk], [(0, 1, 0)])
    one, other = _run(chunk, 3)
    assert one[0] is one[2] is not one[1] and other[0] is not one[0]
    assert [runner.mempool for runner in one] == [runner.mempool for runner in other]
    assert one[0].mempool != one[1].mempool
    assert not chunk.config.deallocate_pipeline_outputs


def test_slots_may_come_in_any_order_and_none_is_left_between_f_and_b(upstream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = _chunk(1)
    local_graphs.place([chunk], [(0, 1)])
    [recorded] = _run(chunk, 2)
    recorded[0].status = upstream._GraphStatus.BWD_READY
    monkeypatch.setattr(upstream._CudagraphGlobalRecord, "cudagraph_created", True)
    local_graphs.place([chunk], [(1, 0, 1)])
    assert _run(chunk, 3) == [[recorded[1], recorded[0], recorded[1]]]
    assert recorded[0].status is upstream._GraphStatus.FWD_READY


def test_what_has_no_graphs_runs_as_it_is_and_is_said_once(
    upstream: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    chunk = _chunk(1)
    local_graphs.place([chunk], [(0,)])
    _run(chunk, 1)
    monkeypatch.setattr(upstream._CudagraphGlobalRecord, "cudagraph_created", True)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            local_graphs.place([chunk], [(0, 1)])
            assert _run(chunk, 2) == [["eager", "eager"]]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["CUDA graphs"]
    local_graphs.place([chunk], ())  # an evaluation
    assert _run(chunk, 1) == [["eager"]]


def test_weights_of_captured_parts_stay_in_b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "keeps_inputs", lambda: True)
    chunk = _chunk(1)
    [layer] = chunk.layers
    assert layer.linear in local_graphs.captured_parts(chunk)
    layer.is_moe_layer = True
    with pytest.raises(ValueError, match="--cuda-graph-impl local captures layer 0 whole, and the host reads"):
        local_graphs.captured_parts(chunk)
    del layer.cudagraph_manager
    assert not local_graphs.captured_parts(chunk)
    layer.cudagraph_manager_router, layer.mlp = _Manager(), torch.nn.Module()
    layer.mlp.router, layer.mlp.experts = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    assert local_graphs.captured_parts(chunk) == {layer.mlp.router}
    monkeypatch.setattr(cuda_graphs, "keeps_inputs", lambda: False)
    with pytest.raises(ValueError, match="--cuda-graph-impl local needs megatron-core 0"):
        local_graphs.captured_parts(chunk)
