"""CUDA graphs by slot: their order, which microbatch has which, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.pipeline.patches import cuda_graphs, distributed_data_parallel

from megatron.pipeline.model import te_graphs, te_linear


def test_the_order_of_a_slot() -> None:
    assert te_graphs.slot_order([True, True]) == (1, 2, -2, -1, -2.5, -1.5)
    assert te_graphs.slot_order([False, True, False]) == (1, 2, 3, -3, -2, -1, -2.5)
    assert all(isinstance(one, int) for one in te_graphs.slot_order([False] * 3))


def _chunk(graphs: int) -> Any:
    layer: Any = torch.nn.Identity()
    layer.slot_graphs = [f"graph {slot}" for slot in range(graphs)]
    return torch.nn.ModuleList([torch.nn.Identity(), layer])


def test_every_microbatch_has_the_graphs_of_its_slot() -> None:
    chunk = _chunk(graphs=2)
    for row, expected in (((0, 1, 0), [0, 1, 0]), ((1, 1, 0, 0), [1, 1, 0, 0]), ((0, 1, 2), [])):
        te_graphs.place([chunk], [row])
        assert chunk[1].cuda_graphs == [f"graph {slot}" for slot in expected]
        assert not hasattr(chunk[0], "cuda_graphs")


def _helper(*chunks: torch.nn.Module) -> Any:
    return SimpleNamespace(model=list(chunks), created=False)


def _create(helper: Any) -> None:
    helper.created = True


def test_models_of_planned_schedules_alone_are_captured_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = _helper(_chunk(0))
    cuda_graphs._by_plan(_create, plain)
    assert plain.created
    chunk = _chunk(0)
    distributed_data_parallel.mark(chunk)
    with pytest.raises(ValueError, match="--cuda-graph-warmup-steps must be at least 1"):
        cuda_graphs._by_plan(_create, _helper(chunk))
    te_graphs.place([chunk], [(0,)])
    for release, words in (((2, 8), "needs transformer-engine >= 2.11"), (None, "needs transformer-engine >= 2.11")):
        monkeypatch.setattr(te_linear, "release", lambda release=release: release)
        with pytest.raises(ValueError, match=words):
            cuda_graphs._by_plan(_create, _helper(chunk))


def _linear(bias: bool = False) -> Any:
    linear: Any = torch.nn.Linear(2, 2, bias=bias)
    linear.parallel_mode, linear.tp_size, linear.sequence_parallel = None, 1, False
    linear.wgrad_store = SimpleNamespace(context=None)
    te_linear.prepare(linear)
    return linear


def test_ddp_hears_of_a_layers_linears_once_and_in_one_order() -> None:
    """Or replicas reduce buckets in different orders: Transformer Engine has the linears in a set."""
    heard, linears = list[int](), [_linear() for _ in range(3)]
    for number, linear in enumerate(linears):
        linear.weight.main_grad = torch.zeros(2, 2)
        linear.wgrad_accumulation_and_reduce_hooks = [lambda number=number: heard.append(number)]
        linear.forward.notifies_alone()

    def replay() -> None:
        assert len(heard) in (0, 3), "before its gradient is there"
        for linear in linears[1:] + linears[:1]:
            for hook in linear.wgrad_accumulation_and_reduce_hooks:
                hook()

    graphs = SimpleNamespace(backward_dw=replay)
    for _ in range(2):
        te_graphs.GraphedGradient(graphs, [linear.forward for linear in linears]).run()
    assert heard == [2, 1, 0] * 2


@pytest.mark.parametrize(
    ("frozen", "bias", "words"), [(True, False, "has a frozen weight"), (False, True, "adds its bias itself")]
)
def test_what_a_graph_of_w_has_no_gradient_of_is_refused(frozen: bool, bias: bool, words: str) -> None:
    linear = _linear(bias)
    linear.weight.requires_grad_(not frozen)
    layer = SimpleNamespace(layer_number=3, _get_submodules_under_cudagraphs=lambda: [linear])
    with pytest.raises(ValueError, match=f"Linear of layer 3 {words}"):
        te_graphs._delayed(layer)
