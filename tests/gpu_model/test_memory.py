"""What the device model sees of memory, and what it reports."""

from __future__ import annotations

import pytest
import torch
from pool import Pool

from gpu_model import device

CUDA = torch.device("cuda", 0)


def emptied(waits: bool) -> tuple[list[str], list[int], bool]:
    """A storage is emptied, as upstream does with outputs that it makes again, while another stream copies from it."""
    one, side = device(), torch.cuda.Stream()
    one.memory.forget()
    before = torch.cuda.memory_allocated()
    tensor, target = torch.ones(256, device=CUDA), torch.empty(256, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(tensor)
    torch.cuda.current_stream().wait_stream(side) if waits else None
    taken = [torch.cuda.memory_allocated() - before]
    for size in (0, 1024):
        tensor.untyped_storage().resize_(size)
        taken.append(torch.cuda.memory_allocated() - before)
    kinds = [race.kind for race in one.memory.races]
    torch.cuda.current_stream().wait_stream(side)
    return kinds, taken, tensor.is_cuda


@pytest.mark.parametrize("waits", [True, False])
def test_a_storage_that_is_emptied_gives_its_memory_back(gpus: Pool, waits: bool) -> None:
    [(kinds, taken, is_cuda)] = gpus.run(1, emptied, waits)
    assert kinds == ([] if waits else ["reuse"])
    assert taken == [2048, 1024, 2048] and is_cuda


def made_of_numbers() -> tuple[bool, list[str]]:
    one = device()
    one.syncs.clear()
    tensor = torch.tensor([1.0, 2.0], device=CUDA)
    return tensor.is_cuda, [sync.why for sync in one.syncs]


def test_a_tensor_of_numbers_is_copied_to_the_device_and_the_host_waits(gpus: Pool) -> None:
    """torch.tensor copies from pageable memory."""
    assert gpus.run(1, made_of_numbers) == [(True, ["a copy to the device"])]


def reported() -> list[int]:
    """Races of the same two places, twice."""
    one, side, found = device(), torch.cuda.Stream(), []
    for _ in range(2):
        one.memory.forget()
        tensor = torch.ones(4, device=CUDA)
        with torch.cuda.stream(side):
            tensor.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        found.append(len(one.memory.races))
    return found


def test_what_was_found_is_found_again(gpus: Pool) -> None:
    assert gpus.run(1, reported) == [[1, 1]]
