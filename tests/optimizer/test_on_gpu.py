"""The parts of post-validation that differ on a GPU: copies in pinned memory, and reductions that no stream waits for."""

from __future__ import annotations

import pytest
import torch

from megatron.pipeline.distributed.reduction import Reduction
from megatron.pipeline.runtime.optimizer.snapshot import Keep, Snapshot

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("keep", list(Keep))
def test_a_copy_is_complete_before_the_step_and_restored_exactly(keep: Keep) -> None:
    parameter = torch.nn.Parameter(torch.randn(4_000_000, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    snapshot = Snapshot([optimizer], keep)
    for _ in range(3):
        parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        kept = [parameter.detach().clone(), *(optimizer.state[parameter][name].clone() for name in ("exp_avg", "exp_avg_sq"))]
        snapshot.take()
        torch.cuda._sleep(10_000_000)  # backwards run meanwhile
        snapshot.ready()
        parameter.grad = torch.full_like(parameter, float("nan"))
        optimizer.step()
        snapshot.restore()
        snapshot.release()
        found = [parameter.detach(), *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))]
        assert all(torch.equal(one, other) for one, other in zip(kept, found, strict=True))


def test_a_reduction_is_read_while_the_current_stream_is_busy() -> None:
    torch.distributed.init_process_group("nccl", store=torch.distributed.TCPStore("localhost", 0, 1, True), rank=0, world_size=1)
    try:
        numbers = torch.tensor([1.0, 2.0], device="cuda", dtype=torch.float64)
        reduction = Reduction(numbers, torch.distributed.ReduceOp.MAX)
        torch.cuda._sleep(2_000_000_000)
        assert reduction.wait() == [1.0, 2.0]
        assert not torch.cuda.current_stream().query(), "the forwards that run ahead are still running"
    finally:
        torch.distributed.destroy_process_group()
