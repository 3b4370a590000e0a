"""Training with the vocabulary spread over all ranks: losses and gradient norms are megatron-core's, sums aside."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch
from marked import rest
from pool import Pool

from megatron.pipeline.runtime.model_stages import noting

EXACT = 1e-5  # relative: the softmax's sums, and the gradients', are made of shards
LOW = 2e-2  # in 16 bits, where losses of different summation orders drift apart


def assert_near_stock(
    pool: Pool, ranks: int, schedules: tuple[str, ...], flags: str, variants: tuple[str, ...] = ("1", "2"), **options: Any
) -> None:
    stock = pool.once(ranks, tiny_gpt.train, "stock", flags=tuple(flags.split()), **options)[-1]
    losses = [loss for loss, _ in stock]
    assert len(set(losses)) == len(losses), "they change"
    tolerance = LOW if "16" in flags else EXACT
    for schedule in schedules:
        for variant in variants:
            spread = (*flags.split(), "--vocab-parallel", variant)
            ranked = pool.run(ranks, tiny_gpt.train, schedule, flags=spread, **options)
            found = next(steps for steps in reversed(ranked) if steps[0][0] is not None)
            what = f"{schedule}, {variant}"
            assert [loss for loss, _ in found] == pytest.approx(losses, rel=tolerance), what
            assert [norm for _, norm in found] == pytest.approx([norm for _, norm in stock], rel=10 * tolerance), what


@pytest.mark.parametrize(
    ("pp", "microbatches", "schedule", "iterations"),
    [rest(4, 1, "zb-h1", 2), (4, 3, "1f1b", 2), rest(2, 2, "1f1b", 2), rest(2, 3, "zb-h1", 20)],
)
def test_pipeline_sizes(pool: Pool, pp: int, microbatches: int, schedule: str, iterations: int) -> None:
    variants = ("1", "2", "interlaced")
    assert_near_stock(pool, pp, (schedule,), "", variants, pp=pp, microbatches=microbatches, iterations=iterations)


def test_schedules_of_every_placement(pool: Pool) -> None:
    """Their layers are elsewhere, so that norms sum in another order than with stock's placement."""
    assert_near_stock(pool, 2, ("interleaved", "v-half"), "--clip-grad 0", ("1",), pp=2, microbatches=6, iterations=2)
    assert_near_stock(pool, 2, ("zb-v", "v-min"), "--clip-grad 0", ("2",), pp=2, microbatches=6, iterations=2)


GATHERS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
RECOMPUTES = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LAYOUTS = [  # several settings in a row where they meet in no branch
    (2, 2, "", "1"),
    (2, 2, "--sequence-parallel --calculate-per-token-loss", "2"),
    (2, 2, "--sequence-parallel --position-embedding-type rope --untie-embeddings-and-output-weights", "1"),
    (2, 1, f"{GATHERS} {RECOMPUTES} --hidden-dropout 0.1", "2"),
    (2, 1, "--overlap-grad-reduce --ddp-bucket-size 1 --untie-embeddings-and-output-weights", "1"),
    (2, 2, "--sequence-parallel --bf16 --untie-embeddings-and-output-weights --swiglu --normalization RMSNorm", "2"),
    (4, 1, "--bf16 --accumulate-allreduce-grads-in-fp32", "1"),
    (4, 1, "--fp16 --initial-loss-scale 4096", "2"),
    (4, 1, "--hidden-dropout 0.1 --attention-dropout 0.1", "1"),
    (2, 1, "--num-experts 4 --expert-model-parallel-size 2 --calculate-per-token-loss --moe-aux-loss-coeff 1e-2 "
     "--disable-bias-linear", "2"),
]  # fmt: skip
LATER = (0, 2, 4, 5, 6, 8, 9)


@pytest.mark.parametrize(
    ("pp", "tp", "flags", "variant"), [rest(*row) if number in LATER else row for number, row in enumerate(LAYOUTS)]
)
def test_layouts_and_settings(pool: Pool, pp: int, tp: int, flags: str, variant: str) -> None:
    assert_near_stock(pool, 4, ("zb-h1",), flags, (variant,), pp=pp, tp=tp, microbatches=5, iterations=2)


def test_context_parallel(pool: Pool) -> None:
    assert_near_stock(pool, 4, ("1f1b",), "", ("2",), pp=2, cp=2, microbatches=4, iterations=2)


@pytest.mark.rest
def test_evaluation(pool: Pool) -> None:
    """Between two iterations, and with other numbers of microbatches than they have."""
    schedule, pp = "zb-v", 2
    stock, *spread = (
        pool.run(pp, evaluated, name, ("--vocab-parallel", variant))
        for name, variant in [("stock", "off"), (schedule, "1"), (schedule, "2"), (schedule, "interlaced")]
    )
    losses = stock[-1]
    assert len(set(losses)) == len(losses)
    for ranked in spread:
        found = next(one for one in ranked if one[0] is not None)
        assert found == pytest.approx(losses, rel=EXACT)
        assert sum(one[0] is not None for one in ranked) == 1, "the rank with the last stage reports"


def evaluated(schedule: str, flags: tuple[str, ...]) -> list[float | None]:
    pp = torch.distributed.get_world_size()
    run = tiny_gpt.Run(schedule, pp=pp, microbatches=5, flags=("--num-layers", str(2 * pp), "--clip-grad", "0", *flags))
    found = []
    for iteration, microbatches in enumerate((5, 1, 9)):
        run.step(iteration)
        run.microbatches = microbatches
        found.append(run.step(iteration, forward_only=True)[0])
        run.microbatches = 5
    return found


def test_every_order_on_one_placement_computes_the_same(pool: Pool) -> None:
    """A tied shard, too, to which T and IB add in the schedule's order."""
    variant = "2"
    flags = ("--vocab-parallel", variant)
    one, *others = (
        pool.run(4, tiny_gpt.train, schedule, pp=4, microbatches=6, iterations=2, flags=flags)
        for schedule in ("1f1b", "zb-h1", "zb-h2")
    )
    assert others == [one, one]


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [rest("v-half", 4, 4), ("zb-h1", 2, 1)])
def test_messages_that_start_in_batches(pool: Pool, schedule: str, ranks: int, microbatches: int) -> None:
    """Others may need a message before they join a collective that its sender waits for."""
    alone, together = (
        pool.run(ranks, trained_and_evaluated, schedule, microbatches, posting) for posting in ("single", "batched")
    )
    assert together == alone


def trained_and_evaluated(schedule: str, microbatches: int, posting: str) -> list[tiny_gpt.Step]:
    flags = ("--num-layers", "8", "--vocab-parallel", "2", "--pipeline-p2p", posting)
    run = tiny_gpt.Run(schedule, pp=torch.distributed.get_world_size(), microbatches=microbatches, flags=flags)
    return [run.step(0), run.step(0, forward_only=True), run.step(1)]


def test_batches_are_read_from_what_can_only_say_what_is_next() -> None:
    class Counting:
        def __init__(self) -> None:
            self.last = 0

        def __next__(self) -> int:
            self.last += 1
            if self.last > 2:
                raise StopIteration
            return self.last

    noted: list[int] = []
    assert list(noting(Counting(), noted)) == noted == [1, 2]  # type: ignore[arg-type]
