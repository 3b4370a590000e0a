"""Every batch planned: losses are stock's bit for bit, and nothing waits for a plan."""

from __future__ import annotations

import re
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from marked import rest
from pool import Pool
from runtime import batches

from megatron.pipeline import install
from megatron.pipeline.planner.planning import Request
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.schedule.core.loads import Extent
from megatron.pipeline.planner.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.runtime.background import BackgroundPlanner
from megatron.pipeline.runtime.every_batch import BatchPlans, EveryBatch, ReadAhead, lengths_of
from megatron.pipeline.runtime.pipeline import Pipeline


def losses(found: list[batches.Trained]) -> list[list[float]]:
    """Of the rank that has the last stage, or has got them."""
    return found[-1].losses


@pytest.mark.parametrize(("schedule", "plans"), [rest("zb-auto", "on_time"), ("zb-v", "process")])
def test_losses_are_those_of_stock(pool: Pool, schedule: str, plans: str) -> None:
    stock, ours = pool.once(4, batches.train, "stock", timeout=300), pool.run(4, batches.train, schedule, plans, timeout=300)
    assert losses(ours) == losses(stock) and len(losses(ours)) == len(batches.NUMBERS)
    if schedule == "zb-auto":
        assert [rank.weights for rank in ours] == [rank.weights for rank in stock]
    # An iterator is read ahead when it comes a second time; a new number of microbatches is not known ahead.
    assert [rank.counts for rank in ours] == [{"planned": 4, "unknown": 5}] * 4
    assert all(rank.orders > 3 for rank in ours), "one order for each number of microbatches, and those of batches"
    assert len(ours[-1].lines) == 2 and not any(rank.lines for rank in ours[:-1])


def test_a_loop_with_an_iterator_for_each_call_waits_for_the_plan_of_its_batch(pool: Pool) -> None:
    stock = pool.once(4, batches.train, "stock", announces=True, timeout=300)
    ours = pool.run(4, batches.train, "zb-v", "waited", announces=True, timeout=300)
    assert losses(ours) == losses(stock)
    assert [rank.counts for rank in ours] == [{"planned": 9}] * 4


@pytest.mark.parametrize(("schedule", "plans"), [("zb-v", "on_time any"), rest("zb-auto", "on_time")])
def test_a_loop_announces_lengths_of_any_number_of_microbatches(pool: Pool, schedule: str, plans: str) -> None:
    stock = pool.once(4, batches.train, "stock", announces=True, timeout=300)
    ours = pool.run(4, batches.train, schedule, plans, announces=True, timeout=300)
    assert [rank.counts for rank in ours] == [{"planned": 9}] * 4
    if "any" in plans:  # sums are in another order, reports in the loop's
        assert losses(ours) != losses(stock)
        assert losses(ours) == [pytest.approx(row, rel=1e-4) for row in losses(stock)]
    else:
        assert losses(ours) == losses(stock)


def test_a_late_plan_stops_nothing(pool: Pool) -> None:
    stock = pool.once(4, batches.train, "stock", timeout=300)
    ours = pool.run(4, batches.train, "zb-auto", "too_late", timeout=300)
    assert losses(ours) == losses(stock)
    assert [rank.counts for rank in ours] == [{"planned": 2, "late": 2, "unknown": 5}] * 4


@pytest.mark.rest
def test_replicas_run_one_order_of_each_model_that_needs_it(pool: Pool) -> None:
    """Each replica of the first model has plans of its own; of the second it waits for the other's sums within passes."""
    alone, ours = (pool.run(4, batches.several_models, plans) for plans in (False, True))
    assert losses(ours) == losses(alone) and [rank.weights for rank in ours] == [pytest.approx(rank.weights) for rank in alone]
    assert [rank.counts for rank in ours] == [{"planned": 8}] * 4


@pytest.mark.parametrize(
    ("announces", "now", "due"), [(False, 5, "planned"), (False, 6, "late"), (False, 0, "late"), (True, 0, "planned")]
)
def test_a_plan_runs_for_the_lengths_that_it_was_made_for(announces: bool, now: int, due: str) -> None:
    """Where nothing is announced, another model's batch, whose lengths are not known, may come in between."""
    cache = PlanCache(Request("zb-v", 2, 1))
    plans = BatchPlans(EveryBatch(), cache, BackgroundPlanner(cache))
    plan: Future[bytes] = Future()
    plan.set_result(b"a plan")
    plans._pending.append(((Extent.of([5]),), plan))
    plans._announces = announces
    assert plans._due(1, (Extent.of([now]),) if now else ())[0] == due


@pytest.mark.parametrize(("seconds", "due"), [(0.0, "unknown"), (0.01, "late"), (60.0, "planned")])
def test_a_plan_for_lengths_that_come_with_the_call_is_waited_for(seconds: float, due: str) -> None:
    cache = PlanCache(Request("zb-v", 2, 1))
    plans = BatchPlans(EveryBatch(wait=seconds), cache, BackgroundPlanner(cache))
    plan: Future[bytes] = Future()
    if due == "planned":
        plan.set_result(b"a plan")
    plans._planner.start = lambda *_: plan  # type: ignore[method-assign, assignment]
    assert plans._due(1, (Extent.of([5]),))[0] == due and not plans._pending
    assert plan.cancelled() == (due == "late")


REPLICAS = "--overlap-grad-reduce --use-distributed-optimizer"
EXPERTS = (
    "--untie-embeddings-and-output-weights --disable-bias-linear --num-experts 4 --expert-model-parallel-size 2 "
    f"--moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type alltoall {REPLICAS}"
)
BALANCED = (
    "--untie-embeddings-and-output-weights --disable-bias-linear --num-experts 4 --moe-aux-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type global_aux_loss --use-distributed-optimizer"
)


@pytest.mark.parametrize(
    ("schedule", "sizes", "flags", "ranks"),
    [
        ("zb-auto", {"pp": 2, "tp": 2}, "--sequence-parallel", 4),
        rest("zb-v", {"pp": 2, "cp": 2}, "", 4),
        ("zb-v", {"pp": 2}, EXPERTS, 4),
        rest("zb-v", {"pp": 2}, BALANCED, 4),
    ],
    ids=["tensors", "contexts", "experts and replicas", "balanced experts"],
)
def test_losses_are_those_of_stock_in_every_layout(
    pool: Pool, schedule: str, sizes: dict[str, int], flags: str, ranks: int
) -> None:
    flags += " --clip-grad 0"
    stock = pool.run(ranks, batches.in_parallel, "stock", flags, plans=False, timeout=300, **sizes)
    ours = pool.run(ranks, batches.in_parallel, schedule, flags, plans=True, timeout=300, **sizes)
    assert sorted(loss for rank in ours for loss, _ in rank.steps if loss is not None) == sorted(
        loss for rank in stock for loss, _ in rank.steps if loss is not None
    )
    assert [rank.counts for rank in ours] == [{"planned": 3}] * ranks
    assert all(rank.orders > 1 for rank in ours), "batches have orders of their own"
    # Replicas that wait for each other within passes have one order, for the longest of each place; others plan for themselves.
    of_replicas = list({str(rank.lengths): rank.lengths for rank in ours}.values())
    longest = [[max(each) for each in zip(*iteration, strict=True)] for iteration in zip(*of_replicas, strict=True)]
    for rank in ours:
        wanted = longest if schedule == "zb-v" else rank.lengths
        assert rank.planned == [pytest.approx([length / iteration[0] for length in iteration]) for iteration in wanted]
    assert len(of_replicas) == (2 if "--use-distributed-optimizer" in flags else 1)


@pytest.mark.rest
@pytest.mark.parametrize(("schedule", "padded"), [("zb-v", False), ("zb-auto", True)])
def test_packed_batches_have_the_losses_of_stock_and_every_sequence(pool: Pool, schedule: str, padded: bool) -> None:
    stock = pool.run(4, batches.packs, "stock", padded, timeout=300)
    ours = pool.run(4, batches.packs, schedule, padded, plans=True, timeout=300)

    def reports(found: list[Any]) -> list[Any]:
        return [report for report, *_ in found if report[0]]

    assert reports(ours) == reports(stock)
    for iteration in range(3):
        trained = [one for replica in reports(ours) for _, sequences in replica[iteration] for one in sequences if any(one)]
        given = [one for replica in range(2) for one in batches.sequences_of(replica, iteration + 1)[len(
            batches.sequences_of(replica, iteration)) :]]  # fmt: skip
        assert sorted(trained) == sorted(given)
    assert all(numbers == ours[0][1] and max(numbers) < 6 for _, numbers, *_ in ours), "fewer than the data set's"
    assert all(counts == {"planned": 3, "unknown": 3} for *_, counts, _ in ours), "those that are run again are not planned"


@pytest.mark.parametrize("schedule", ["zb-v", rest("zb-auto")])
def test_packed_sequences_of_any_total_length_reach_every_stage_of_tensor_parallel_ranks(pool: Pool, schedule: str) -> None:
    stock = pool.run(4, batches.packs, "stock", False, thd=True, timeout=300)
    ours = pool.run(4, batches.packs, schedule, False, plans=True, thd=True, timeout=300)
    last = [reports for reports, *_ in ours if reports[0]]
    assert len(last) == 2 and last[0] == last[1] == stock[-1][0]
    assert [rank[1:3] for rank in ours] == [(stock[0][1], {"planned": 3, "unknown": 3})] * 4
    seen = [sorted({(tokens, *bounds) for tokens, bounds in rank[3]}) for rank in ours]
    assert seen == [sorted({(tokens, *bounds) for tokens, bounds in stock[0][3]})] * 4
    assert len({tokens for tokens, *_ in seen[0]}) > 1 and all(tokens == bounds[-1] for tokens, *bounds in seen[0])


@pytest.mark.parametrize("evaluates", [rest("other"), "same"])
def test_evaluations_come_in_between(pool: Pool, evaluates: str) -> None:
    stock = pool.run(4, batches.train, "stock", evaluates=evaluates, timeout=300)
    ours = pool.run(4, batches.train, "zb-auto", "on_time", evaluates=evaluates, timeout=300)
    assert losses(ours) == losses(stock) and len(losses(ours)) == len(batches.NUMBERS) + 3
    # What an evaluation has read was planned for.
    late = {"late": 1} if evaluates == "same" else {}
    assert [rank.counts for rank in ours] == [{"planned": 4 - late.get("late", 0), "unknown": 5, **late}] * 4


def test_data_that_end(pool: Pool) -> None:
    ends = sum(batches.NUMBERS[:4]) + 2
    stock = pool.once(4, batches.train, "stock", timeout=300)
    ours = pool.run(4, batches.train, "zb-v", "on_time", ends=ends, timeout=300)
    assert losses(ours) == losses(stock)[:4] and len(losses(ours)) == 4


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("zb-h1", 4, 8), "zb-h1 has an order that no lengths change: take gis, "),
        (Request("stock", 4, 8), "stock has an order that no lengths change"),
        (Request("file:plan.json", 4, 8), "file:plan.json has an order that no lengths change"),
        (Request("seq-1f1b", 4, 8), "seq-1f1b has an order that no lengths change"),
        (Request("zb-v", 4, 8, vocabulary=Vocabulary("1")), "zb-v has a spread vocabulary here: leave that out"),
        (Request("zb-v", 4, 8, offload=Offload.FULL), "zb-v has copies to host memory here: leave that out"),
        (Request("zb-v", 4, 8, overlap=True), "zb-v has overlapped passes here: leave that out"),
    ],
)
def test_what_has_no_plan_for_a_batch_is_refused_by_name(request_: Request, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        Pipeline(request_, every_batch=EveryBatch())
    if not request_.schedule.startswith("file:"):
        with pytest.raises(ValueError, match=re.escape(reason)):
            install(request_, every_batch=EveryBatch())


class NoMapping:
    """A batch as a TensorDict is one."""

    def __init__(self, **fields: torch.Tensor) -> None:
        self._fields = fields

    def get(self, name: str, default: Any) -> Any:
        return self._fields.get(name, default)


@pytest.mark.parametrize(
    ("item", "lengths"),
    [
        ({"tokens": torch.zeros(2, 7)}, [7, 7]),
        ({"tokens": torch.zeros(1, 12), "cu_seqlens": torch.tensor([[0, 5, 8, 12, 12, 12]])}, [5, 3, 4]),
        ({"tokens": torch.zeros(1, 12), "cu_seqlens": torch.tensor([0, 5, 12, -1])}, [5, 7]),
        ({"tokens": torch.zeros(1, 12), "cu_seqlens": None, "position_ids": torch.arange(12) % 6}, [12]),
        (torch.zeros(3, 4, 8), [4, 4, 4]),
        ((torch.zeros(1, 9), torch.zeros(1, 9)), [9]),
        ({"input_ids": torch.zeros(1, 12), "seq_lens": [5, 7]}, [5, 7]),
        ({"input_ids": torch.zeros(2, 7), "seq_lens": [5, 7]}, [7, 7]),
        ({"seq_lens": torch.tensor([3, 4])}, [3, 4]),
        (NoMapping(input_ids=torch.nested.nested_tensor([torch.zeros(3), torch.zeros(8)], layout=torch.jagged)), [3, 8]),
    ],
)
def test_lengths_of_what_loops_give(item: Any, lengths: list[int]) -> None:
    assert lengths_of(item) == lengths


@pytest.mark.parametrize("item", [{"text": torch.zeros(2, 7)}, "text", torch.zeros(7), []])
def test_lengths_that_are_not_there_are_asked_for(item: Any) -> None:
    with pytest.raises(ValueError, match="has neither cu_seqlens, seq_lens nor tokens"):
        lengths_of(item)


def test_an_iterator_is_read_one_further_for_each_that_is_taken() -> None:
    taken: list[int] = []

    def items() -> Any:
        for number in range(7):
            taken.append(number)
            yield number

    ahead = ReadAhead(items(), lambda number: Extent.of([number + 1]))
    assert ahead.sizes(4) == tuple(Extent(number + 1, (number + 1) ** 2) for number in range(4)) and taken == [0, 1, 2, 3]
    assert next(ahead) == 0 and taken[-1] == 4 and next(ahead) == 1 and taken[-1] == 5
    assert ahead.sizes(4)[0] == Extent(3, 9) and taken[-1] == 5
    assert list(ahead) == [2, 3, 4, 5, 6] and not ahead.sizes(4) and not ahead.holds
    taken.clear()
    ends = ReadAhead(items(), lambda number: Extent.of([number + 1]), goes_on=False)
    assert len(ends.sizes(4)) == 4 and [next(ends) for _ in range(4)] == taken == [0, 1, 2, 3] and not ends.holds


@pytest.mark.parametrize("lengths", [[7, -3], [0], [], None, [2**40]])
def test_lengths_that_are_none_end_all_ranks(pool: Pool, lengths: Any) -> None:
    first, other = pool.run(2, batches.wrong_lengths, lengths, timeout=100)
    assert first.startswith("a batch cannot be planned for its lengths: ")
    assert lengths is None or f"a microbatch has sequences of {lengths} tokens: give whole numbers of at least 1" in first
    assert other == first


def test_replicas_of_one_order_announce_as_many_microbatches(pool: Pool) -> None:
    for message in pool.run(4, batches.announces_other_numbers, REPLICAS, timeout=100):
        assert message.startswith("replicas that run one order announce a batch with other numbers of microbatches")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"order": "anything"}, "EveryBatch(order='anything'): give 'given' or 'any'"),
        ({"attention": 2}, "EveryBatch(attention=2): give a share from 0 to 1"),
        ({"attention": float("nan")}, "EveryBatch(attention=nan): give a share from 0 to 1"),
        ({"tokens": 0}, "EveryBatch(tokens=0): give a number above 0, or None"),
        ({"tokens": float("inf")}, "EveryBatch(tokens=inf): give a number above 0, or None"),
        ({"wait": -1}, "EveryBatch(wait=-1): give seconds, 0 to 3600"),
        ({"wait": 1e300}, "EveryBatch(wait=1e+300): give seconds, 0 to 3600"),
        ({"wait": "x"}, "EveryBatch(wait='x'): give seconds, 0 to 3600"),
        ({"lengths_of": 3}, "EveryBatch(lengths_of=3): give a function of an item"),
        ({"interval": 0}, "EveryBatch(interval=0): give iterations, at least 1"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        EveryBatch(**options)


def test_lengths_that_nobody_asked_for_are_refused(pool: Pool) -> None:
    [message] = pool.run(1, batches.announces_in_vain)
    assert "install(..., every_batch=EveryBatch(...))" in message
