"""``mpipe check``: trainings on ranks of the pool that are the same, and one in which a gradient is wrong; and smaller models."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from marked import rest
from megatron.pipeline.patches import compat, schedules
from pool import Pool

from megatron.pipeline import patches
from megatron.pipeline.cli import check
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.trainer import gradients, loop, program

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --global-batch-size 8 "
    "--train-iters 100 --lr 1e-3 --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --bf16 "
    "--disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --clip-grad 0 --eod-mask-loss"
)
WRONG = 2, 6, "mlp.linear_fc1.weight"  # iteration, layer, weight


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def sides(folder: Path, flags: str, own: str = "--shrink --iterations 2") -> tuple[check.Side, check.Side, list[str]]:
    patches.install()
    return check.sides(check.parser().parse_args(own.split()), parse(flags.split()), folder)


def work(job: check.Job, plants: bool) -> None:
    """What a rank of the pool does for one side.

    Args:
        plants: the rank that has ``WRONG`` scales it.
    """
    schedules.restore()
    watch = gradients.watching(job.folder, job.start, lambda _: None)

    def plant(training: Any) -> None:
        finalize, (iteration, number, name) = training.config.finalize_model_grads_func, WRONG

        def wrong(*arguments: Any, **more: Any) -> None:
            layers = [layer for chunk in training.chunks for layer in chunk.module.decoder.layers]
            for layer in layers:
                if layer.layer_number == number and training.iteration + 1 == iteration:
                    layer.get_parameter(name).main_grad.mul_(1.001)
            finalize(*arguments, **more)

        training.config.finalize_model_grads_func = wrong
        watch(training)

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(loop, "_quick_garbage_collection", nullcontext)
        prepared = program.prepared(job.args, torch.distributed.get_world_size())
        program.run(*prepared, guard=lambda *_, **__: nullcontext(), watch=plant if plants else watch)


def compared(pool: Pool, folder: Path, flags: str, wrong: bool = False) -> tuple[str, bool]:
    reference, checked, _ = sides(folder, f"{MODEL} {flags}")

    def run(job: check.Job, side: check.Side) -> None:
        pool.run(side.ranks, work, job, wrong and side is checked)

    return check.compare(reference, checked, folder, run)


def test_a_v_on_four_ranks_trains_as_one_rank_does(pool: Pool, tmp_path: Path) -> None:
    text, equal = compared(pool, tmp_path, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-v")
    assert equal
    assert "equal bit for bit: losses and all 68 gradients" in text


@pytest.mark.parametrize("per_token", [rest(False), True])
def test_experts_on_tensor_parallel_ranks(pool: Pool, tmp_path: Path, per_token: bool) -> None:
    """They train as on one rank does, but for the losses that balance experts per token, of which users are warned."""
    flags = "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-schedule zb-h1"
    experts = "--num-experts 8 --moe-layer-freq [0,1]*4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    others = "--use-distributed-optimizer --moe-aux-loss-coeff 1e-1" + " --calculate-per-token-loss" * per_token
    text, equal = compared(pool, tmp_path, f"{flags} {experts} {others}")
    wrong = per_token and not compat.is_from("0.19")
    assert equal is not wrong, text
    if wrong:
        assert "first in iteration 1, in the gradient of layer 4 mlp.router.weight" in text


def test_a_wrong_gradient_is_named(pool: Pool, tmp_path: Path) -> None:
    text, equal = compared(pool, tmp_path, "--pipeline-model-parallel-size 4 --pipeline-schedule zb-v", wrong=True)
    assert not equal
    iteration, layer, name = WRONG
    assert f"DIFFERENT, first in iteration {iteration}, in the gradient of layer {layer} {name}: by" in text
    (row,) = (line for line in text.splitlines() if line.startswith(f"layer {layer} "))
    assert row.split()[-1] == "2", "stage 5 of a V of 4 ranks"
    assert " 1.0e-03 " in row
