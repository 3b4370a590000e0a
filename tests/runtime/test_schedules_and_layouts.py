"""Every schedule in every layout trains as megatron-core's own 1F1B does: a part of the matrix here, all with ``make test-all``.

With the same placement losses and gradient norms are equal bit for bit; with another one every gradient is, so that without
clipping every loss is, and the norm, which sums in another order, up to its last bits. Slices change sums inside attention.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import tiny_gpt
from pool import Pool

LINEAR = ("1f1b", "zb-h1", "zb-h2", "zb-auto")
INTERLEAVED = ("interleaved", "gis", "gis-h")
V = ("1f1b-v", "zb-v", "v-half", "v-min", "v-auto", "dualpipe-v")
SCHEDULES = (*LINEAR, *INTERLEAVED, *V, "seq-1f1b")
LONG = {("gis", 2), ("zb-v", 4), ("seq-1f1b", 2)}  # 20 iterations of each placement and of slices; others are short

LAYOUTS = {
    "plain": "",
    "tensor": "--tensor-model-parallel-size 2",
    "sequence": "--tensor-model-parallel-size 2 --sequence-parallel --untie-embeddings-and-output-weights --swiglu",
    "data": "--overlap-grad-reduce --ddp-bucket-size 1",
    "distributed-optimizer": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "per-token": "--calculate-per-token-loss --position-embedding-type rope --group-query-attention --num-query-groups 2",
    "bf16": "--bf16 --use-distributed-optimizer --normalization RMSNorm",
    "fp16": "--fp16 --initial-loss-scale 4096 --untie-embeddings-and-output-weights",
    "dropout": "--hidden-dropout 0.1 --attention-dropout 0.1",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1",
    "selective": "--recompute-granularity selective",
    "batched": "--pipeline-p2p batched",
    "uneven": "--num-layers 9 --num-layers-in-last-pipeline-stage 2",
    "context": "--context-parallel-size 2 --position-embedding-type rope",
    "experts": "--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear",
    "several-tokens": "--mtp-num-layers 1 --position-embedding-type rope --untie-embeddings-and-output-weights",
}
WHOLE_SEQUENCES = ("bf16", "fp16", "dropout", "recompute", "context", "experts", "several-tokens")  # what slices cannot equal

SMALL_STEPS = " --lr 1e-3"  # for what differs in last bits: the usual steps multiply these, on some processors a hundredfold

_stock: dict[Any, Any] = {}


def train(pool: Pool, schedule: str, pp: int, microbatches: int, flags: str, iterations: int) -> list[tiny_gpt.Step]:
    """Losses and norms on the rank that has the loss; ranks that are not needed for the model are data parallel."""
    settings = f"--num-layers 8 --clip-grad 0 {flags}"
    tp, cp = (2 if f"--{kind}-parallel-size 2" in flags else 1 for kind in ("tensor-model", "context"))
    ranks = 4 if flags.removesuffix(SMALL_STEPS) else pp
    sizes = {"pp": pp, "tp": tp, "cp": cp, "microbatches": microbatches}
    found = pool.run(ranks, tiny_gpt.train, schedule, **sizes, flags=tuple(settings.split()), iterations=iterations)
    return next(steps for steps in reversed(found) if steps[0][0] is not None)


def stock(pool: Pool, *case: Any) -> list[tiny_gpt.Step]:
    if case not in _stock:
        _stock[case] = train(pool, "stock", *case)
    return _stock[case]


def check(pool: Pool, schedule: str, pp: int, microbatches: int, layout: str, iterations: int) -> None:
    flags = LAYOUTS[layout]
    if schedule == "seq-1f1b":
        flags += SMALL_STEPS
    ours = train(pool, schedule, pp, microbatches, flags, iterations)
    expected = stock(pool, pp, microbatches, flags, iterations)
    losses, norms = zip(*ours, strict=True)
    stock_losses, stock_norms = zip(*expected, strict=True)
    assert len(set(losses)) == iterations, "the loss changes"
    if schedule in LINEAR:
        assert ours == expected
    elif schedule == "seq-1f1b":
        assert losses == pytest.approx(stock_losses, rel=1e-5)
    else:
        assert losses == stock_losses
        assert norms == pytest.approx(stock_norms, rel=1e-6)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(pool: Pool, schedule: str, pp: int) -> None:
    microbatches = (1, 3, 5, 8)[(SCHEDULES.index(schedule) + pp // 2) % 4]
    check(pool, schedule, pp, microbatches, layout="plain", iterations=20 if (schedule, pp) in LONG else 4)


# Every layout with a placement other than the textbook's; which schedule stands for which placement goes round.
@pytest.mark.parametrize(
    ("layout", "schedule"),
    [(layout, names[n // 2 % len(names)]) for n, layout in enumerate(LAYOUTS) if n for names in [(INTERLEAVED, V)[n % 2]]],
)
def test_every_layout(pool: Pool, layout: str, schedule: str) -> None:
    check(pool, schedule, 2, microbatches=5, layout=layout, iterations=3)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "layout"),
    [
        (*case, layout)
        for *case, layout in product(SCHEDULES, (2, 4), range(1, 10), LAYOUTS)
        if not (case[1] == 4 and "-parallel-size 2" in LAYOUTS[layout])  # 4 ranks is what there is
    ],
)
def test_whole_matrix(pool: Pool, schedule: str, pp: int, microbatches: int, layout: str) -> None:
    if schedule == "seq-1f1b" and layout in WHOLE_SEQUENCES:
        pytest.skip("slices round and draw dropout masks differently, and some layouts need whole sequences")
    check(pool, schedule, pp, microbatches, layout, iterations=10)


@pytest.mark.parametrize("pp", [2, 4])
def test_interleaved_equals_megatrons_own(pool: Pool, pp: int) -> None:
    """The same placement, so clipping included: and a schedule that groups microbatches differently."""
    flags = ("--num-layers", "8", "--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce")
    found = [
        pool.run(pp, tiny_gpt.train, schedule, pp=pp, microbatches=8, flags=flags, iterations=20 if pp == 2 else 4)
        for schedule in ("stock", "interleaved", "gis-h")
    ]
    assert found[1] == found[0] and found[2] == found[0]


def test_recomputed_passes(pool: Pool, tmp_path: Any) -> None:
    """R runs a forward again, on the same data and with the same masks."""
    from megatron.pipeline.cli import main

    path = tmp_path / "recomputed.json"
    assert main(f"plan --schedule zb-v --pp 2 --microbatches 5 --recompute all --json -o {path}".split()) == 0
    flags = LAYOUTS["dropout"]
    ours = train(pool, f"file:{path}", 2, 5, flags, 5)
    assert [loss for loss, _ in ours] == [loss for loss, _ in stock(pool, 2, 5, flags, 5)]
