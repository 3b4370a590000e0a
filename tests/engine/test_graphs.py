"""Transformer Engine's CUDA graphs under planned schedules, captured and replayed on a CPU (``gpu_model/graphs.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine import graphed_gpt, graphs
from engine.releases import fetched, ranks_with
from marked import whole
from pool import Pool

_WITH_W = [release for release in fetched() if tuple(map(int, release.split(".")[:2])) >= (2, 11)]
_SKIP = pytest.mark.skip(reason="build/ has no Transformer Engine from 2.11 on: python scripts/fetch_transformer_engine.py")
_RELEASES: list[Any] = [whole(one, id=one) for one in _WITH_W[:-1]]
_RELEASES += _WITH_W[-1:] or [pytest.param("", marks=_SKIP, id="none")]


@pytest.fixture(scope="module", params=_RELEASES)
def engine(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Ranks with a release of Transformer Engine."""
    ranks = ranks_with(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("zb-h1", 8), ("zb-h1", 5), ("zb-v", 8), ("v-half", 8), ("interleaved", 8), ("zb-auto", 16), ("1f1b", 4), ("v-min", 12)],
)
def test_graphs_change_no_bit(engine: Pool, name: str, microbatches: int) -> None:
    eager, graphed = (engine.once(1, graphs.train, name, microbatches, graphs_on)[0] for graphs_on in (False, True))
    assert graphed == eager
    assert len(set(eager[0])) == 5


_PLAIN = "--bf16 --disable-bias-linear --normalization RMSNorm --swiglu"
_OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000"
_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2 --moe-grouped-gemm"
_TRAININGS = {  # schedule, ranks, pipeline ranks, flags, parts of layers, microbatches of every iteration
    "whole layers": ("zb-h1", 2, 2, "", "", (4,) * 3),
    "a V of 4 ranks": ("zb-v", 4, 4, "--num-layers 8", "attn", (4,) * 3),
    "other numbers of microbatches": ("v-half", 2, 2, "", "attn mlp", (4, 2, 16, 4)),
    "experts, and overlaps": ("zb-v", 4, 2, f"{_EXPERTS} {_OVERLAPS}", "attn moe_router", (4,) * 3),
    "fused backwards": ("interleaved", 2, 2, "", "", (4,) * 3),
}


@pytest.mark.parametrize("training", _TRAININGS)
def test_a_gpt_that_is_captured_trains_as_one_that_is_not(engine: Pool, training: str) -> None:
    schedule, ranks, pipeline, flags, parts, microbatches = _TRAININGS[training]
    eager, captured = (
        engine.run(ranks, graphed_gpt.train, schedule, f"{_PLAIN} {flags}", pipeline, modules, microbatches)
        for modules in (None, parts)
    )
    assert [result[:2] for result in captured] == [result[:2] for result in eager]
    for *_, replays, layers in captured:
        assert replays == layers * 3 * sum(microbatches[1:])  # for 16 there are slots enough


@pytest.mark.parametrize("mutation", graphs.MUTATIONS)
def test_what_makes_graphs_wrong_is_seen(engine: Pool, mutation: str) -> None:
    for name in ("zb-h1", "v-half"):
        eager = engine.once(1, graphs.train, name, 8, False)[0]
        assert engine.run(1, graphs.train, name, 8, True, mutation)[0] != eager, name


def test_transformer_engines_own_order_is_for_a_w_behind_its_b_alone(engine: Pool) -> None:
    """It takes a W to be that of the last B."""
    behind, later = [1, 1, -1, -1.5, 1, -1, -1.5, -1, -1.5], [1, 1, -1, -1, -1.5, -1.5]
    assert engine.run(1, graphs.captured_by_microbatch, behind) == [""]
    assert engine.run(1, graphs.captured_by_microbatch, later) == ["a graph is captured twice"]


def test_a_capture_refuses_what_ends_one_on_a_gpu(engine: Pool) -> None:
    read, again = engine.run(1, graphs.what_a_capture_refuses)[0]
    assert "host reads" in read and again == "a graph is captured twice"
