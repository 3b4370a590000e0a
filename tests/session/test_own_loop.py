"""``megatron.pipeline.install``: a loop that knows nothing of a schedule trains under it, with the bits of stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from reductions import costs
from session import own_loops

from megatron.pipeline import install


def bits(found: list[own_loops.Trained]) -> list[Any]:
    return [(rank.losses, rank.norms, rank.weights) for rank in found]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-auto"])
def test_a_loop_with_one_module_trains_as_under_stock(pool: Pool, schedule: str) -> None:
    stock, ours = (pool.run(4, own_loops.train, name) for name in ("stock", schedule))
    assert [len(losses) for losses in ours[-1].losses] == [5, 4, 6, 3] and bits(ours) == bits(stock)
    assert all(rank.planned == [1.0] * 4 for rank in ours)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_with_replicas_whose_reductions_overlap_it_trains_as_under_stock(pool: Pool, tmp_path: Path, pipeline: int) -> None:
    """Four replicas, and two; with DDP's buckets, and of two also with those of a plan: other buckets add four up in another
    order."""
    (file := tmp_path / "costs.json").write_text(costs("zb-h1", pipeline).to_json())
    runs = (("stock", None), ("zb-h1", None), *([("zb-h1", str(file))] if pipeline > 1 else []))
    stock, ours, *planned = (pool.run(4, own_loops.train, name, pipeline, "", True, given) for name, given in runs)
    for found in (ours, *planned):
        assert [(rank.losses, rank.weights) for rank in found] == [(rank.losses, rank.weights) for rank in stock]
        # On every rank, although the loop has asked for aligned reductions.
        assert all(rank.early >= 2 for rank in found)
    for found in planned:
        assert all(2 <= rank.buckets < by_size.buckets for rank, by_size in zip(found, ours, strict=True))
    # Shards are cut from buckets, of which stock has one on all ranks but the first: squares are summed in another order.
    assert [rank.norms for rank in ours] == [pytest.approx(rank.norms, rel=1e-6) for rank in stock]


def test_the_w_of_what_is_frozen_is_planned_to_take_no_time(pool: Pool) -> None:
    stock, ours = (pool.run(4, own_loops.train, name, 4, "mlp") for name in ("stock", "zb-auto"))
    assert bits(ours) == bits(stock)
    # A layer has 12 h^2 elements, 8 of them in the MLP; the output layer's are the embedding's, which is fused.
    assert [rank.planned for rank in ours] == [ours[0].planned] * 4
    assert ours[0].planned[1:3] == pytest.approx([1 / 3] * 2)


def test_the_last_that_is_installed_counts(pool: Pool) -> None:
    for stock, ours, again in pool.run(4, own_loops.in_turn, "stock", "zb-h1", "stock"):
        assert ours[:3] == stock[:3] and again == stock and ours.planned
    assert pool.run(1, own_loops.taken_over) == [("megatron.core.pipeline_parallel.schedules", "None")]


@pytest.mark.parametrize(("schedule", "given", "planned"), [("interleaved", 4, 4), ("v-auto", 4, 4), ("zb-v", 4, 2)])
def test_the_model_says_how_many_chunks_there_are(pool: Pool, schedule: str, given: int, planned: int) -> None:
    assert pool.run(1, own_loops.chunks_planned, schedule, given) == [planned]


@pytest.mark.parametrize(("ranks", "chunks"), [(4, None), (2, 4)])
def test_a_model_with_other_chunks_than_a_v_is_refused_on_every_rank(pool: Pool, ranks: int, chunks: int | None) -> None:
    messages = pool.run(ranks, own_loops.with_chunks, "zb-v", chunks)
    assert set(messages) == {messages[0]} and f"2 chunk(s) per rank, but the model has {chunks or 1}" in messages[0]


def test_a_model_that_was_built_before_is_refused(pool: Pool) -> None:
    [one, other] = pool.run(2, own_loops.built_before)
    assert one == other and "call install before the model is built" in one


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("zb-h", "unknown schedule 'zb-h'.* did you mean zb-h"),
        ("auto", "unknown schedule 'auto'"),
        ("dualpipe", "install of dualpipe holds every layer on two ranks"),
        ("file:nowhere.json", "nowhere.json"),
    ],
)
def test_what_does_not_train_is_refused_at_once(schedule: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        install(schedule)


def test_what_is_no_schedule_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"install\(3\): give a schedule's name"):
        install(3)  # type: ignore[arg-type]


def test_costs_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        install("zb-h1", tmp_path / "nowhere.json")


def test_an_option_that_no_pipeline_has_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="mesure"):
        install("zb-h1", mesure=True)
