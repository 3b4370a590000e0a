"""The sleeping layers of benchmarks/braids.py take what their costs say."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.pipeline.schedule.core.kinds import Kind
from megatron.pipeline.schedule.core.placement import v

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("exchange", [5.0, 20.0])
def test_sleeping_layers_compute_all_of_w(monkeypatch: pytest.MonkeyPatch, exchange: float) -> None:
    """Although a BW alone, which computes some of it behind an all-to-all, takes less than B and W."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    import sleeping_layers

    costs_of = runpy.run_path(str(BENCHMARKS / "braids.py"))["costs_of"]  # a module of the tests has that name, too
    stage = costs_of((40.0, 40.0, 40.0), exchange, v(2)).stages[0]
    assert stage.seconds(Kind.BW) < stage.backward + stage.weight
    weight = torch.zeros(1)
    model: Any = SimpleNamespace(costs=stage, weight=weight, gives_loss=False, vp_stage=0, lanes=None)
    plan = sleeping_layers.SleepingPlan(model, None)
    parts = [part for at in range(plan.num_layers()) for layer in [plan.get_layer(at)] for part in (layer.attn, layer.mlp)]
    assert sum(part._weights for part in parts) == pytest.approx(stage.weight) == pytest.approx(0.02)
    assert sum(part._backward for part in parts) == pytest.approx(0.02)
