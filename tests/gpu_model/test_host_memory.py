"""Pinned memory on a GPU: how much the copies of a step take."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool

from gpu_model import device
from gpu_model.mutations import NEVER_USED, UNPINS_AT_ONCE, Mutation, mutated


def pinned_for_copies(numbers: int) -> tuple[int, int, bool]:
    """Bytes of the copies of Adam's parameters and state and bytes registered for them; and whether a step is undone exactly."""
    from megatron.pipeline.runtime.optimizer.snapshot import Keep, Snapshot

    registered: dict[int, int] = {}
    cuda: Any = torch.cuda.cudart()
    register, unregister = cuda.cudaHostRegister, cuda.cudaHostUnregister

    def counting(address: int, size: int, flags: int) -> int:
        registered[address] = size
        return register(address, size, flags)

    def letting_go(address: int) -> int:
        del registered[address]
        return unregister(address)

    with patch.object(cuda, "cudaHostRegister", counting), patch.object(cuda, "cudaHostUnregister", letting_go):
        parameters = [torch.nn.Parameter(torch.randn(numbers, device="cuda")) for _ in range(3)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        snapshot = Snapshot([optimizer], Keep.HOST)
        for _ in range(2):  # the first time there is no state
            snapshot.take()
            snapshot.ready()
            before = [parameter.detach().clone() for parameter in parameters]
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        snapshot.restore()
        exact = all(torch.equal(parameter, kept) for parameter, kept in zip(parameters, before, strict=True))
        return snapshot.bytes, sum(registered.values()), exact


def test_copies_on_the_host_take_what_they_hold(gpus: Pool) -> None:
    """torch's own pinned memory is rounded up to a power of two, here to nearly twice."""
    ((held, pinned, exact),) = gpus.run(1, pinned_for_copies, 2**18 + 1)
    assert exact and held > 9 * 2**20
    assert held <= pinned < 1.01 * held


def unpinned(mutation: Mutation | None) -> tuple[list[str], list[str]]:
    """Of an arena that a stream has copied to, and that makes room for another: what the host waited for, and races."""
    from megatron.pipeline.runtime.offload.copy_streams import CudaCopyStreams
    from megatron.pipeline.runtime.offload.host_memory import PAGE, HostPool

    one = device()
    pool, streams = HostPool(3 * PAGE, pinned=True), CudaCopyStreams(torch.device("cuda", 0))
    with mutated(mutation) if mutation else nullcontext():
        arena = pool.take(PAGE)
        source = torch.ones(PAGE, dtype=torch.uint8, device="cuda")
        streams.to_host([(source, arena.bytes)]).wait()
        pool.give(arena)
        del arena
        one.memory.forget()
        one.syncs.clear()
        other = pool.take(3 * PAGE)
        one.memory.sweep()
        found = [sync.stream for sync in one.syncs], [race.kind for race in one.memory.races]
    del other  # not before: what no copy has used waits for all
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize(
    ("mutation", "waits", "races"), [(None, [""], []), (NEVER_USED, ["all"], []), (UNPINS_AT_ONCE, [], ["reuse"])]
)
def test_unpinning_waits_for_the_last_copy(gpus: Pool, mutation: Mutation | None, waits: list[str], races: list[str]) -> None:
    """An event of the copies; not the device, which may wait for a message. Waiting for nothing is a race."""
    assert gpus.run(1, unpinned, mutation) == [(waits, races)]
