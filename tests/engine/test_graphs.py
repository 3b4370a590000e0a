"""Transformer Engine's CUDA graphs under planned schedules, captured and replayed on a CPU (``gpu_model/graphs.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from engine import graphed_gpt, graphs
from engine.graphed_gpt import Graphs
from engine.releases import fetched, ranks_with
from marked import whole
from megatron.pipeline.patches import compat
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
_EXPERTS = "--num-experts 4 --expert-model-parallel-size 2"
_DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


class Training(NamedTuple):
    """What is trained with graphs, and without.

    Attributes:
        modules: of --cuda-graph-modules.
        microbatches: of every iteration.
        layer: see ``graphed_gpt.train``.
    """

    schedule: str
    ranks: int
    pipeline: int
    flags: str
    modules: str = ""
    microbatches: tuple[int, ...] = (4,) * 3
    tensor: int = 1
    layer: str = ""

    def run(self, engine: Pool, given: Graphs | None, timeout: float = 120.0) -> list[Any]:
        flags = f"{_PLAIN} {self.flags}"
        settings = self.pipeline, given, self.microbatches, self.tensor, self.layer
        return engine.run(self.ranks, graphed_gpt.train, self.schedule, flags, *settings, timeout=timeout)


_OF_BOTH = {
    "whole layers": Training("zb-h1", 2, 2, ""),
    "a V of 4 ranks": Training("zb-v", 4, 4, "--num-layers 8", "attn"),
    "other numbers of microbatches": Training("v-half", 2, 2, "", "attn", (4, 2, 16, 4)),
    "fused backwards": Training("interleaved", 2, 2, ""),
    "sequence parallelism": Training("zb-h1", 4, 2, "--sequence-parallel", "attn", tensor=2),
}
_OF_ONE = {
    "transformer_engine": {
        "experts, and overlaps": Training("zb-v", 4, 2, f"{_EXPERTS} --moe-grouped-gemm {_OVERLAPS}", "attn moe_router"),
    },
    "local": {
        "experts, and overlaps": Training(
            "zb-v", 4, 2, f"{_EXPERTS} {_OVERLAPS}", "attn moe_router", layer="MoETransformerLayer"
        ),
        "dropout": Training("zb-v", 2, 2, _DROPOUT, microbatches=(8,) * 5, layer="TransformerLayer"),
        "biases": Training("zb-h1", 4, 4, "--add-qkv-bias", microbatches=(5,) * 3),
    },
}
_NEW = pytest.mark.skipif(compat.version() < "0.19", reason="--cuda-graph-impl local needs megatron-core 0.19")
_TRAININGS = {(name, given): one for given, rows in _OF_ONE.items() for name, one in (_OF_BOTH | rows).items()}


@pytest.mark.parametrize(
    "training", [pytest.param(one, marks=_NEW if "local" in one else (), id=", by ".join(one)) for one in _TRAININGS]
)
def test_a_gpt_that_is_captured_trains_as_one_that_is_not(engine: Pool, training: tuple[str, str]) -> None:
    one, implementation = _TRAININGS[training], training[1]
    eager, captured = (one.run(engine, given) for given in (None, Graphs(one.modules, implementation)))
    assert [result[:2] for result in captured] == [result[:2] for result in eager]
    kinds = 2 if implementation == "local" else 3  # W is a graph of its own, or in B
    for *_, replays, parts in captured:
        assert parts
        assert replays == parts * kinds * sum(one.microbatches[1:])  # for 16 there are slots enough


@_NEW
@pytest.mark.parametrize("mutation", graphed_gpt.MUTATIONS)
def test_what_makes_megatron_cores_graphs_wrong_is_seen(engine: Pool, mutation: str) -> None:
    one = _OF_BOTH["other numbers of microbatches"]._replace(microbatches=(8,) * 3)
    eager = one.run(engine, None)
    try:
        # A slot fewer ends one rank, and the other waits for it.
        wrong = one.run(engine, Graphs("", "local", mutation), timeout=30.0 if mutation == "a slot fewer" else 120.0)
    except AssertionError:
        return
    assert [result[:2] for result in wrong] != [result[:2] for result in eager]


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
    for *reads, sent, received, again in engine.run(2, graphs.what_a_capture_refuses):
        assert len(reads) == 2 and all("host reads" in one for one in reads)
        assert sent == "a message within a capture: send" and received == "a message within a capture: recv_"
        assert again == "a graph is captured twice"
