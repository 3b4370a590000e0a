"""LoRA and frozen parts in loops as frameworks have them: equal to megatron-core's own schedules, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import Pool
from releases import needs_local_grouped_experts
from session import packed_loops, tuned_checkpoints, tuned_loops
from session.tuned_loops import Tuned, Tuning

from megatron.pipeline.planner import Kind, Pass
from megatron.pipeline.runtime.stage_passes import StagePasses

FULL = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))
SELECTIVE = (("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"]))
CASES = {
    "adapters, tied ends": Tuning(tied=True),
    "adapters, layers recomputed": Tuning(recomputes=FULL),
    "adapters, tensor parallel": Tuning(pipeline=2, tensor=2),
    "adapters, tensor parallel, layers recomputed": Tuning(pipeline=2, tensor=2, recomputes=FULL),
    "adapters, attention recomputed, replicas": Tuning(pipeline=2, recomputes=SELECTIVE),
    "adapters of experts": Tuning(pipeline=2, experts="apart"),
    "adapters of experts, split": Tuning(pipeline=2, split=True, experts="apart"),
    "adapters of experts, tensor parallel": Tuning(pipeline=2, tensor=2, experts="apart"),
    "adapters of experts, layers recomputed": Tuning(pipeline=2, experts="apart", recomputes=FULL),
    "adapters of grouped experts": Tuning(pipeline=2, experts="grouped"),
    "a frozen first half": Tuning(adapters=False, layers=(5, 6, 7, 8)),
    "a frozen first half, replicas": Tuning(pipeline=2, adapters=False, layers=(5, 6, 7, 8)),
    "a frozen first half whose output needs a gradient": Tuning(adapters=False, layers=(5, 6, 7, 8), hooked=True),
    "layers that join": Tuning(adapters=False, alone=(7, 8)),
    "the middle alone": Tuning(adapters=False, layers=(4, 5)),
}


def losses(found: list[Tuned]) -> list[list[list[float]]]:
    return [rank.losses for rank in found]


def weights(found: list[Tuned], tuning: Tuning) -> dict[str, list[float]]:
    """Of all layers, of each rank that has a part of them."""
    return {f"{rank % parts(tuning)} {name}": weight for rank, one in enumerate(found) for name, weight in one.weights.items()}


def parts(tuning: Tuning) -> int:
    """Ranks that share a layer: tensor-parallel ones, or of experts."""
    return 2 if tuning.experts else tuning.tensor


@pytest.mark.parametrize(
    "tuning",
    [pytest.param(one, marks=needs_local_grouped_experts if "grouped" in one else ()) for one in CASES.values()],
    ids=CASES,
)
def test_what_trains_is_equal_to_stocks(pool: Pool, tuning: Tuning) -> None:
    stock, ours, on_a_v = (pool.run(4, tuned_loops.train, name, tuning) for name in ("stock", "zb-h1", "zb-v"))
    linears = {"": 4, "apart": 2 + 2 * 2, "grouped": 2 + 2}[tuning.experts] * 2 if tuning.adapters else 12
    assert len(weights(stock, tuning)) == len(tuning.layers) * linears * parts(tuning)
    for found in (stock, ours, on_a_v):
        assert not [name for rank in found for name in rank.still if not name.endswith("linear_qkv.bias")]
        assert losses(found) == losses(stock) and weights(found, tuning) == weights(stock, tuning)
        close = 1e-6 if found is on_a_v or tuning.pipeline * tuning.tensor < 4 else 0
        assert [rank.norms for rank in found] == [pytest.approx(rank.norms, rel=close, abs=0) for rank in stock]


@pytest.mark.parametrize("name", ["adapters, layers recomputed", "a frozen first half"])
def test_chunks_that_take_turns_are_equal_to_stocks(pool: Pool, name: str) -> None:
    stock, ours = (pool.run(4, tuned_loops.train, schedule, CASES[name], 2) for schedule in ("stock", "interleaved"))
    assert ours == stock and not stock[0].still


def test_checkpoints_of_adapters_and_of_merged_weights_go_both_ways(pool: Pool, tmp_path: Path) -> None:
    """Weights of the merged model are equal bit for bit, and so are losses of steps and of forwards alone."""
    stock, on_a_v = (pool.run(4, tuned_checkpoints.saved, name, str(tmp_path / name)) for name in ("stock", "zb-v"))
    assert whole(on_a_v) == whole(stock) and len(set(map(str, stock[-1].losses))) == 2 and len(stock[-1].merged) == 3
    for loads, of in (("zb-v", "stock"), ("stock", "zb-v"), ("zb-h1", "zb-v")):
        assert whole(pool.run(4, tuned_checkpoints.resumed, loads, str(tmp_path / of))) == whole(stock), f"{loads} of {of}"


def whole(found: list[tuned_checkpoints.Kept]) -> tuned_checkpoints.Kept:
    """Losses of the last rank, and weights of all."""
    return found[-1]._replace(weights=dict(pair for rank in found for pair in rank.weights.items()))


def test_a_frozen_half_is_looked_at_once(pool: Pool) -> None:
    assert pool.run(4, tuned_loops.gathered, "zb-h1", CASES["a frozen first half"]) == [0] * 4


def test_packed_sequences_of_a_loop_are_apart_on_every_stage(pool: Pool) -> None:
    stock, line, on_a_v = (pool.run(4, packed_loops.train, name) for name in ("stock", "zb-h1", "zb-v"))
    assert line == stock and [losses for losses, _ in on_a_v] == [losses for losses, _ in stock]
    assert [norms for _, norms in on_a_v] == [pytest.approx(norms, rel=1e-6) for _, norms in stock]
    assert pool.run(4, packed_loops.train, "zb-v", False)[-1][0] != stock[-1][0]


def test_a_weight_outside_the_chunks_that_feeds_a_frozen_stage_is_refused() -> None:
    prompt = torch.nn.Parameter(torch.ones(2, 3))
    stages: Any = SimpleNamespace(forward=lambda *_: [torch.ones(2, 3) * prompt.tanh()])
    passes = StagePasses(stages, (), frozen={0}, ends={0})
    with pytest.raises(ValueError, match=r"of shape \(2, 3\) trains outside .* freeze it"):
        passes.forward(Pass(Kind.F, 0, 0), [])
    prompt.requires_grad_(False)
    passes.forward(Pass(Kind.F, 0, 0), [])
