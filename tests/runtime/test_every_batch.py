"""Every batch planned: losses are stock's bit for bit, and nothing waits for a plan."""

from __future__ import annotations

import pytest
from pool import Pool
from runtime import batches


def losses(found: list[batches.Trained]) -> list[list[float]]:
    """Of the rank that has the last stage, or has got them."""
    return found[-1].losses


@pytest.mark.parametrize(("schedule", "plans"), [("zb-auto", "process"), ("zb-v", "on_time")])
def test_losses_are_those_of_stock(pool: Pool, schedule: str, plans: str) -> None:
    stock, ours = pool.run(4, batches.train, "stock", timeout=300), pool.run(4, batches.train, schedule, plans, timeout=300)
    assert losses(ours) == losses(stock) and len(losses(ours)) == len(batches.NUMBERS)
    if schedule == "zb-auto":
        assert [rank.weights for rank in ours] == [rank.weights for rank in stock]
    # An iterator is read ahead when it comes a second time; a new number of microbatches is not known ahead.
    assert [rank.counts for rank in ours] == [{"planned": 5, "unknown": 5}] * 4
    assert all(rank.orders > 3 for rank in ours), "one order for each number of microbatches, and those of batches"
    assert len(ours[-1].lines) == 2 and not any(rank.lines for rank in ours[:-1])


@pytest.mark.parametrize(("schedule", "plans"), [("zb-v", "on_time any"), ("zb-auto", "on_time")])
def test_a_loop_announces_lengths_of_any_number_of_microbatches(pool: Pool, schedule: str, plans: str) -> None:
    stock = pool.run(4, batches.train, "stock", announces=True, timeout=300)
    ours = pool.run(4, batches.train, schedule, plans, announces=True, timeout=300)
    assert [rank.counts for rank in ours] == [{"planned": 10}] * 4
    if "any" in plans:  # sums are in another order, reports in the loop's
        assert losses(ours) != losses(stock)
        assert losses(ours) == [pytest.approx(row, rel=1e-4) for row in losses(stock)]
    else:
        assert losses(ours) == losses(stock)


def test_a_late_plan_stops_nothing(pool: Pool) -> None:
    stock, ours = pool.run(4, batches.train, "stock", timeout=300), pool.run(4, batches.train, "zb-auto", "too_late", timeout=300)
    assert losses(ours) == losses(stock)
    assert [rank.counts for rank in ours] == [{"planned": 2, "late": 3, "unknown": 5}] * 4


@pytest.mark.parametrize("evaluates", ["other", "same"])
def test_evaluations_come_in_between(pool: Pool, evaluates: str) -> None:
    stock = pool.run(4, batches.train, "stock", evaluates=evaluates, timeout=300)
    ours = pool.run(4, batches.train, "zb-auto", "on_time", evaluates=evaluates, timeout=300)
    assert losses(ours) == losses(stock) and len(losses(ours)) == len(batches.NUMBERS) + 3
    # What an evaluation has read was planned for.
    late = {"late": 3} if evaluates == "same" else {}
    assert [rank.counts for rank in ours] == [{"planned": 5 - late.get("late", 0), "unknown": 5, **late}] * 4


def test_data_that_end(pool: Pool) -> None:
    ends = sum(batches.NUMBERS[:4]) + 2
    stock = pool.run(4, batches.train, "stock", ends=ends, timeout=300)
    ours = pool.run(4, batches.train, "zb-v", "on_time", ends=ends, timeout=300)
    assert losses(ours) == losses(stock) and len(losses(ours)) == 4
