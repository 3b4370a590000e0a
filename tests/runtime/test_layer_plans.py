"""Experts' all-to-alls behind another microbatch: layer plans, alone and in braids, change no number.

Every gradient and every parameter is compared bit for bit with megatron-core's own schedule without plans. The embedding and the
output layer are on different stages: where one stage has both and they are tied, autograd adds their gradients in bfloat16, and
plans, whose parts are apart, in main_grad's float32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tiny_gpt
from marked import rest
from megatron.core.pipeline_parallel import utils
from pool import Pool
from runtime import braids, plans

from megatron.pipeline.cli import main
from megatron.pipeline.runtime import layer_plans

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "v-half", "interleaved", "dualpipe-v")
OPTIONS = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "--overlap-grad-reduce --ddp-bucket-size 1",
    "--recompute-granularity selective",
    "--moe-layer-freq ([0,1])*2 --recompute-granularity selective --recompute-modules core_attn mlp",
    "--moe-shared-expert-intermediate-size 16 --moe-z-loss-coeff 1e-3",
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope",
    "--num-layers 5 --num-layers-in-last-pipeline-stage 2 --fp16 --initial-loss-scale 4096",
    "--num-experts 2 --calculate-per-token-loss",
    "--moe-grouped-gemm --swiglu --normalization RMSNorm",
    "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
)
TOGETHER = [" ".join(OPTIONS[one] for one in some) for some in ((0, 4, 5), (1, 3, 8), (2, 6), (7, 10), (9, 11))]
MICROBATCHES, ITERATIONS = 5, 2


def stock(pool: Pool, ranks: int, *given: Any) -> Any:
    """What megatron-core's own 1F1B trains without plans."""
    return pool.once(ranks, plans.train, "stock", *given, iterations=ITERATIONS)


def check(pool: Pool, schedule: str, ranks: int, pp: int, microbatches: int = MICROBATCHES, flags: str = "") -> None:
    expected = stock(pool, ranks, pp, microbatches, flags)
    overlapped = f"{plans.OVERLAP} {flags}"
    found = pool.run(ranks, plans.train, schedule, pp, microbatches, overlapped, iterations=ITERATIONS, braided=True)
    assert plans.losses(found) == plans.losses(expected)
    assert len({loss for losses in plans.losses(found) for loss in losses}) > 1, "the loss changes"
    assert plans.merged(found) == plans.merged(expected)
    assert sum(sum(counts.values()) for _, _, counts in found), "there were braids"


@pytest.mark.parametrize("schedule", [name if name in ("zb-v", "dualpipe-v") else rest(name) for name in SCHEDULES])
def test_schedules(pool: Pool, schedule: str) -> None:
    check(pool, schedule, ranks=4, pp=2, microbatches=6)


@pytest.mark.parametrize("flags", [*map(rest, TOGETHER[:2]), TOGETHER[2], *map(rest, TOGETHER[3:])])
def test_options_together(pool: Pool, flags: str) -> None:
    check(pool, "zb-h1", ranks=4, pp=2, flags=flags)


@pytest.mark.parametrize(
    ("ranks", "pp", "flags"),
    [rest(2, 1, "--untie-embeddings-and-output-weights"), rest(4, 2, "--num-virtual-stages-per-pipeline-rank 2")],
)
def test_megatrons_own_order(pool: Pool, ranks: int, pp: int, flags: str) -> None:
    """Its combined 1F1B, on CPUs."""
    overlapped = pool.run(ranks, plans.train, "stock", pp, 4, f"{plans.OVERLAP} {flags}", iterations=ITERATIONS)
    assert overlapped == stock(pool, ranks, pp, 4, flags)


@pytest.mark.rest
def test_recomputed_passes(pool: Pool, tmp_path: Path) -> None:
    """R makes the plan: a forward that keeps nothing runs as ever, and so beside nothing."""
    path = tmp_path / "recomputed.json"
    assert main(f"plan --schedule zb-v --pp 2 --microbatches {MICROBATCHES} --recompute all --json -o {path}".split()) == 0
    check(pool, f"file:{path}", ranks=4, pp=2, flags="--hidden-dropout 0.1")


@pytest.mark.rest
def test_evaluations_in_between(pool: Pool) -> None:
    assert pool.run(4, evaluate, "zb-h1", plans.OVERLAP) == pool.run(4, evaluate, "stock", "")


def evaluate(schedule: str, flags: str) -> Any:
    run = tiny_gpt.Run(schedule, pp=2, flags=tuple(f"{plans.EXPERTS} --bf16 {flags}".split()))
    return [run.step(0), run.step(1, forward_only=True), run.step(2)]


def parts(schedule: str) -> tuple[list[str], int]:
    """What a rank runs in an iteration, part by part, and how many braids."""
    flags = tuple(f"{plans.EXPERTS} --bf16 {plans.OVERLAP}".split())
    run = tiny_gpt.Run(schedule, pp=2, microbatches=MICROBATCHES, flags=flags)
    names: list[str] = []

    def running(tasks: list[Any]) -> None:
        names.extend(["weights"] if tasks else [])
        run_weights(tasks)

    run_weights, nvtx = layer_plans.run_weights, utils.torch.cuda.nvtx
    braids.install(run)
    try:
        with patch.object(nvtx, "range_push", names.append), patch.object(layer_plans, "run_weights", running):
            run.step(0)
    finally:
        braids.uninstall()
    passes = [name for name in names if name.endswith(("forward", "backward", "weights"))]
    return passes, sum(braids.BraidingExecutor.braids.values())


FUSED = (
    "moe_combine backward", "attn forward", "mlp backward", "moe_dispatch forward", "weights", "moe_dispatch backward",
    "mlp forward", "moe_combine forward", "attn backward", "weights",
)  # fmt: skip
SPLIT = tuple(part for part in FUSED if part != "weights")


@pytest.mark.parametrize(("schedule", "layer"), [("zb-h1", SPLIT), ("dualpipe-v", FUSED)])
def test_parts_of_a_braid_take_turns(pool: Pool, schedule: str, layer: tuple[str, ...]) -> None:
    """Each all-to-all (dispatch, combine) of one half stands beside what the other half computes, weights of experts included."""
    layers, total = {"zb-h1": 2, "dualpipe-v": 1}[schedule], 0  # of a chunk
    for names, count in pool.run(4, parts, schedule):
        windows = [tuple(names[start : start + len(layer)]) for start in range(len(names))]
        assert windows.count(layer) == layers * count
        total += count
    assert total
