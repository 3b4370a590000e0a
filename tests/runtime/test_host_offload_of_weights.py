"""Parking: storages are empty while another rank may have a turn, values and views return, and what does not fit is named."""

from __future__ import annotations

import fcntl
import threading
from typing import Any

import pytest
import torch
from marked import rest
from pool import Pool

from megatron.pipeline.runtime.host_offload_of_weights import DoesNotFit, HostOffloadOfWeights

STEPS = 4


def resident(parking: HostOffloadOfWeights) -> int:
    """Bytes on the device."""
    return sum(storage.nbytes() for storage in parking._storages().values())


def trained(flags: str, watches: bool) -> tuple[list[Any], int, int, int]:
    """Losses and norms; with ``watches`` also how often nobody had a turn, and the most bytes that were resident then.

    Whoever has the lock knows that no rank has a turn: no other can begin one until it is given back.
    """
    import tiny_gpt

    run = tiny_gpt.Run("zb-h1", pp=2, flags=tuple(flags.split()))
    looks, most, total, over = 0, 0, 0, threading.Event()
    if not watches:
        return [run.step(number) for number in range(STEPS)], 0, 0, 0
    assert run.pipeline._turns is not None
    turns = run.pipeline._turns()
    parking = turns.parking
    assert parking is not None
    with turns.turn():
        total = resident(parking)

    def watch() -> None:
        nonlocal looks, most
        with open(f"/proc/self/fd/{turns._file.fileno()}", "ab") as file:
            while not over.wait(0.001):
                fcntl.flock(file, fcntl.LOCK_EX)
                most, looks = max(most, resident(parking)), looks + 1
                fcntl.flock(file, fcntl.LOCK_UN)

    watching = threading.Thread(target=watch)
    watching.start()
    found = [run.step(number) for number in range(STEPS)]
    over.set()
    watching.join(60)
    return found, looks, most, total


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --bf16", rest("--untie-embeddings-and-output-weights")])
def test_nothing_of_a_parked_rank_is_resident_while_another_may_run(pool: Pool, flags: str) -> None:
    plain = pool.run(2, trained, flags, False)
    parked = pool.run(2, trained, f"{flags} --rehearse --rehearse-park", True)
    for (expected, *_), (found, looks, most, total) in zip(plain, parked, strict=True):
        assert found == expected  # bit for bit
        assert total > 0 and looks > 0
        assert most == 0


def test_views_and_values_return() -> None:
    whole = torch.arange(8.0)
    views = [whole[:4].view(2, 2), whole[4:], whole]
    parking = HostOffloadOfWeights(lambda: views)
    assert resident(parking) == 32
    for _ in range(2):  # the second time host memory is there
        parking.leave()
        assert resident(parking) == 0 and views[0].untyped_storage().nbytes() == 0
        parking.enter()
        assert torch.equal(whole, torch.arange(8.0))
        whole.neg_()
        assert torch.equal(views[0], whole[:4].view(2, 2))
        whole.neg_()


def test_what_does_not_fit_is_named_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.zeros(3 * 2**18)  # 3 MiB
    parking = HostOffloadOfWeights(lambda: [parameter])
    monkeypatch.setattr("megatron.pipeline.runtime.host_offload_of_weights._free", lambda: 2**20)
    parking.leave()
    with pytest.raises(
        DoesNotFit, match=r"are 3\.0 MiB, and the device has 1\.0 MiB .*: 2\.0 MiB are missing\. Raise --pipeline"
    ):
        parking.enter()
    assert resident(parking) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: storages move between device and pinned host memory")
def test_a_gpu_gets_its_memory_back() -> None:
    weight = torch.randn(2**20, device="cuda")
    expected, before = weight.cpu(), torch.cuda.memory_allocated()
    parking = HostOffloadOfWeights(lambda: [weight])
    parking.leave()
    assert torch.cuda.memory_allocated() == before - weight.numel() * 4
    parking.enter()
    assert torch.equal(weight.cpu(), expected)
