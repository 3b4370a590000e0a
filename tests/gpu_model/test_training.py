"""A tiny GPT trains on the device model: the numbers are those of a CPU, and no stream is ahead of another."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
from marked import whole
from pool import Pool

from gpu_model.recorded import racing


def train(schedule: str, **given: Any) -> tuple[list[tiny_gpt.Step], list[str]]:
    """Losses and norms, and the races that were found."""
    with racing() as races:
        steps = tiny_gpt.train(schedule, iterations=2, **given)
    return steps, races


def test_numbers_are_those_of_a_cpu(gpus: Pool, pool: Pool) -> None:
    """But for fused kernels of megatron-core's."""
    flags = ("--use-cpu-initialization",)
    found = gpus.run(2, train, "zb-h1", pp=2, flags=flags)
    expected = pool.run(2, tiny_gpt.train, "zb-h1", pp=2, iterations=2, flags=flags)
    for (steps, _), wanted in zip(found, expected, strict=True):
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in wanted], rel=1e-4)


_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
TRAININGS = [  # ranks, schedule, flags; on_gpus/test_several_gpus.py trains them on GPUs
    (2, "zb-h1", ""),
    (2, "v-half", ""),
    (2, "zb-v", "--vocab-parallel 2 --untie-embeddings-and-output-weights"),
    (2, "zb-v", "--vocab-parallel 1 --untie-embeddings-and-output-weights"),
    (2, "zb-v", "--offload full --offload-min-size 0.1KiB"),
    (4, "zb-h1", _DISTRIBUTED),
    (4, "v-half", "--tensor-model-parallel-size 2 --sequence-parallel"),
]
PART = [whole(*run) if number in (1, 3, 5) else run for number, run in enumerate(TRAININGS)]


@pytest.mark.parametrize(("ranks", "schedule", "flags"), PART)  # the others with make test-all
def test_no_stream_is_ahead(gpus: Pool, ranks: int, schedule: str, flags: str) -> None:
    tp = 2 if "tensor" in flags else 1
    given = tuple(flags.replace("--tensor-model-parallel-size 2", "").split())
    found = gpus.run(ranks, train, schedule, pp=2, tp=tp, flags=given)
    assert [races for _, races in found] == [[]] * ranks
    own = tuple(
        flag for flag in given if flag not in ("--vocab-parallel", "1", "2", "--offload", "full", "--offload-min-size", "0.1KiB")
    )
    stock = gpus.run(ranks, train, "stock", pp=2, tp=tp, flags=own)
    assert losses(found) == (pytest.approx(losses(stock), rel=1e-6) if "--vocab-parallel" in flags else losses(stock))


def losses(found: list[tuple[list[tuple[float | None, float]], list[str]]]) -> list[float]:
    """Of the ranks that have any, iteration by iteration."""
    return [loss for steps, _ in found for loss, _ in steps if loss is not None]
