"""Stepping ahead changes no bit: parameters, optimizer state, losses and norms are those of the same training without it."""

from __future__ import annotations

import pytest
from marked import rest
from optimizer import injected_runs
from optimizer.injected_runs import POST, Injections
from pool import Pool

INF, NAN, LARGE = float("inf"), float("nan"), 1e7


def everywhere(ranks: int, *kinds: float) -> Injections:
    """Every kind of trouble on every stage, each in an iteration of its own, and two in a row."""
    return {1 + number: (rank, kind) for number, (rank, kind) in enumerate((r, k) for r in range(ranks) for k in kinds)}


def check(pool: Pool, ranks: int, flags: str, injections: Injections, undone: int, more: str = "") -> None:
    plain = pool.run(ranks, injected_runs.train, flags, injections)
    ahead = pool.run(ranks, injected_runs.train, f"{flags} {POST} {more}", injections)
    for rank, ((told, digests, counts), (expected, same, without)) in enumerate(zip(ahead, plain, strict=True)):
        assert told == expected, f"rank {rank}"
        assert digests == same, f"rank {rank}"
        assert without == {"ahead": 0, "undone": 0, "in vain": 0}
        assert counts["undone"] == counts["in vain"] == undone
        assert counts["ahead"] > undone


@pytest.mark.parametrize("pp", [2, rest(4)])
def test_clipping_on_every_stage(pool: Pool, data: str, pp: int) -> None:
    flags = f"{data} --pipeline-model-parallel-size {pp} --global-batch-size 12 --pipeline-schedule zb-h1"
    check(pool, pp, flags, everywhere(pp, LARGE, 1.0), undone=pp)


@pytest.mark.parametrize("pp", [rest(1), 2])
def test_overflow_on_every_stage(pool: Pool, data: str, pp: int) -> None:
    """Infinities, NaNs and gradients to clip, with a loss scale that falls and rises."""
    flags = (
        f"{data} --pipeline-model-parallel-size {pp} --global-batch-size 12 --pipeline-schedule zb-h2 --train-iters {3 + 3 * pp} "
        "--fp16 --initial-loss-scale 256 --hysteresis 1 --loss-scale-window 2"
    )
    check(pool, pp, flags, everywhere(pp, INF, NAN, LARGE), undone=3 * pp)


FP16 = "--fp16 --initial-loss-scale 256 --hysteresis 1 --loss-scale-window 2"
TWO = "--pipeline-model-parallel-size 2 --global-batch-size 12"
FOUR = "--pipeline-model-parallel-size 4 --global-batch-size 8"


@pytest.mark.parametrize(
    "flags",
    [
        f"{TWO} --pipeline-schedule zb-h2 --bf16 --accumulate-allreduce-grads-in-fp32 --optimizer sgd --rampup-batch-size 4 4 60 "
        "--pipeline-p2p batched",
        rest(
            f"{TWO} --pipeline-schedule zb-v --num-experts 4 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--use-distributed-optimizer --disable-bias-linear"
        ),
        rest(
            f"{FOUR} --pipeline-schedule interleaved --num-layers 8 --calculate-per-token-loss --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1 --hidden-dropout 0.1 --untie-embeddings-and-output-weights"
        ),
        rest(f"{TWO} --pipeline-schedule seq-1f1b --position-embedding-type rope"),
        rest(
            f"{TWO} --pipeline-schedule zb-h1 --vocab-parallel 2 --use-distributed-optimizer --overlap-grad-reduce "
            f"--overlap-param-gather {FP16}"
        ),
        rest(f"{TWO} --pipeline-schedule v-min --vocab-parallel 1 --hidden-dropout 0.1 --pipeline-p2p batched"),
        rest(
            f"{FOUR} --pipeline-schedule zb-h1 --num-layers 1 --pipeline-model-parallel-layout Et|||L "
            "--untie-embeddings-and-output-weights"
        ),
    ],
)
def test_layouts_and_schedules(pool: Pool, data: str, flags: str) -> None:
    scaled = "--fp16" in flags
    last = int(flags.split()[1]) - 1
    injections = {1: (last, LARGE), 3: (0, INF if scaled else LARGE), 4: (last, NAN if scaled else 1.0), 6: (0, LARGE)}
    copies = "--post-validation-copy host" if "seq-1f1b" in flags else ""
    check(pool, 4, f"{data} --train-iters 7 {flags}", injections, undone=4 if scaled else 3, more=copies)


@pytest.mark.parametrize("place", ["device", "host"])
def test_without_anything_to_clip_or_scale_nothing_is_copied(pool: Pool, data: str, place: str) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --global-batch-size 8 --train-iters 5 --clip-grad 0"
    check(pool, 2, flags, {3: (1, LARGE)}, undone=0, more=f"--post-validation-copy {place}")
