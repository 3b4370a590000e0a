"""Do schedules work at all on a GPU? Four ranks share one: their passes run on it, and messages go through host memory.

What NCCL adds is in ``test_several_gpus.py``: it refuses two ranks on one GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch
from pool import Pool

pytestmark = pytest.mark.cuda
RANKS = 4
EIGHT_STAGES = ("--num-layers", "8")


def trained(schedule: str, *flags: str) -> tuple[list[tiny_gpt.Step], int]:
    """Losses and norms, and the number of this rank's GPU."""
    steps = tiny_gpt.train(schedule, pp=RANKS, iterations=3, microbatches=8, flags=(*EIGHT_STAGES, *flags))
    return steps, torch.cuda.current_device()


def test_ranks_are_on_one_gpu_and_exchange_tensors_of_it(sharing: Pool) -> None:
    assert sharing.run(2, exchanged) == [(1.0, 1.0, "cuda"), (1.0, 0.0, "cuda")]


def exchanged() -> tuple[float, float, str]:
    """The sum of the ranks' numbers, the other rank's, and where it came to."""
    rank = torch.distributed.get_rank()
    total, mine, other = (torch.full((1,), float(rank), device="cuda") for _ in range(3))
    torch.distributed.all_reduce(total)
    requests: list[Any] = [torch.distributed.isend(mine, 1 - rank), torch.distributed.irecv(other, 1 - rank)]
    for request in requests:
        request.wait()
    return total.item(), other.item(), other.device.type


@pytest.mark.parametrize("flags", ["", "--bf16 --accumulate-allreduce-grads-in-fp32"], ids=["float32", "16 bits"])
def test_losses_are_those_of_stock(sharing: Pool, flags: str) -> None:
    """The first loss bit for bit; later ones follow from weight gradients, which round differently in another kernel."""
    stock = sharing.run(RANKS, trained, "stock", *flags.split())
    expected = [loss for steps, _ in stock for loss, _ in steps if loss is not None]
    assert len(expected) == 3
    for schedule in ("zb-h1", "zb-v"):
        found = sharing.run(RANKS, trained, schedule, *flags.split())
        assert {gpu for _, gpu in found} == set(range(min(RANKS, torch.cuda.device_count())))
        losses = [loss for steps, _ in found for loss, _ in steps if loss is not None]
        assert losses[0] == expected[0], schedule
        assert losses == pytest.approx(expected, rel=2e-2 if flags else 1e-4), schedule
        norms, wanted = ([norm for steps, _ in one for _, norm in steps] for one in (found, stock))
        assert norms == pytest.approx(wanted, rel=5e-2 if flags else 1e-3), schedule
