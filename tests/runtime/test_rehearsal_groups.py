"""Groups of ranks that share a device: collectives and messages have the numbers of any other group's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from pool import Pool

from megatron.pipeline.session.rehearsal import groups

T = TypeVar("T")


def everything(device: str = "cpu") -> dict[str, Any]:
    """What collectives make of the rank's own number: in the world of two, and in a group of this rank alone."""
    dist: Any = torch.distributed
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)][rank]

    def number(value: float = rank, length: int = 1) -> torch.Tensor:
        return torch.full((length,), float(value), device=device)

    found: dict[str, Any] = {}
    for name, group in (("world", dist.group.WORLD), ("alone", alone)):
        size = dist.get_world_size(group)
        summed, most, sent = number(), number(), number()
        dist.all_reduce(summed, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group, async_op=True).wait()
        dist.broadcast(sent, src=dist.get_global_rank(group, size - 1), group=group)
        whole = number(-1, size)
        dist.all_gather_into_tensor(whole, number(), group=group)
        place = number(-1, size)
        part = place[dist.get_rank(group) :][:1]
        part.fill_(rank)
        dist.all_gather_into_tensor(place, part, group=group)
        each = [number(-1) for _ in range(size)]
        dist.all_gather(each, number(), group=group)
        own = number(-1)
        dist.reduce_scatter_tensor(own, torch.arange(size, dtype=torch.float32).to(device) + rank, group=group)
        there = number(-1, size)
        dist.all_to_all_single(there, number(rank, size), group=group)
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, f"of {rank}", group=group)
        dist.barrier(group=group)
        found[name] = {
            "sum": summed.item(), "max": most.item(), "broadcast": sent.item(), "gather": whole.tolist(),
            "gather in place": place.tolist(), "all_gather": [one.item() for one in each], "scatter": own.item(),
            "exchange": there.tolist(), "objects": objects,
        }  # fmt: skip
    peer, message = 1 - rank, number(-1)
    for request in [dist.isend(number(), dst=peer), dist.irecv(message, src=peer)]:
        request.wait()
    found["message"] = message.item()
    return found


def expected(rank: int) -> dict[str, Any]:
    return {
        "world": {
            "sum": 1, "max": 1, "broadcast": 1, "gather": [0, 1], "gather in place": [0, 1], "all_gather": [0, 1],
            "scatter": 1 + 2 * rank, "exchange": [0, 1], "objects": ["of 0", "of 1"],
        },
        "alone": {
            "sum": rank, "max": rank, "broadcast": rank, "gather": [rank], "gather in place": [rank], "all_gather": [rank],
            "scatter": rank, "exchange": [rank], "objects": [f"of {rank}"],
        },
        "message": 1 - rank,
    }  # fmt: skip


def in_a_world_of_its_own(function: Callable[..., T], *arguments: Any) -> T:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    groups.open_world(rank, ranks, timedelta(seconds=60))
    return function(*arguments)


def test_collectives_and_messages(pool: Pool) -> None:
    assert pool.run(2, in_a_world_of_its_own, everything) == [expected(0), expected(1)]
