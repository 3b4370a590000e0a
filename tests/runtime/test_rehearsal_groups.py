"""Groups of a rehearsal: numbers of absent ranks are their stand-in's, present ranks' are true, and links' seconds pass."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool

from megatron.pipeline.distributed import rehearsal_groups

SHARE = 2  # ranks of a stage, of which one is there


def begin(share: int) -> int:
    """Another world with absent ranks in place of the pool's; returns this rank's number in it."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    rehearsal_groups.open_world(rank, ranks, timedelta(seconds=60), share)
    return torch.distributed.get_rank()


def everything(share: int, device: str = "cpu") -> dict[str, Any]:
    """What collectives make of the rank's own number, in the world, over the stages, and within the stage."""
    dist: Any = torch.distributed
    rank = begin(share)
    world = dist.get_world_size()
    across = dist.new_group(list(range(0, world, share)))
    within = [dist.new_group(list(range(first, first + share))) for first in range(0, world, share)][rank // share]

    def number(value: float = rank, length: int = 1) -> torch.Tensor:
        return torch.full((length,), float(value), device=device)

    found: dict[str, Any] = {"rank": rank, "ranks": world, "stands in": [rehearsal_groups.stand_in(one) for one in range(world)]}
    for name, group in (("world", dist.group.WORLD), ("across", across), ("within", within)):
        size = dist.get_world_size(group)
        summed, most, sent = number(), number(), number()
        dist.all_reduce(summed, group=group)
        work = dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group, async_op=True)
        work.wait()
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
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, f"of {rank}", group=group)
        dist.barrier(group=group)
        found[name] = {
            "sum": summed.item(), "max": most.item(), "broadcast": sent.item(), "gather": whole.tolist(),
            "gather in place": place.tolist(), "all_gather": [one.item() for one in each], "scatter": own.item(),
            "objects": objects,
        }  # fmt: skip
    if share > 1:
        there = number(-1, 3)
        dist.all_to_all_single(there, torch.tensor([1.0, 2.0, 3.0]), [1, 2], [1, 2], group=within)
        found["exchange"] = there.tolist()
        dist.send(number(), dst=rank + 1)
        came = number()
        dist.recv(came, src=rank + 1)
        found["from an absent one"] = came.item()
    else:
        peer, message = 1 - rank, number(-1)
        requests = [dist.isend(number(), dst=peer), dist.irecv(message, src=peer)]
        for request in requests:
            request.wait()
        there = number(-1, 2)
        dist.all_to_all_single(there, number(rank, 2))
        found["message"], found["exchange"] = message.item(), there.tolist()
    return found


def test_one_rank_stands_in_for_those_of_its_stage(pool: Pool) -> None:
    zero, two = pool.run(2, everything, SHARE)
    assert (zero["rank"], two["rank"], zero["ranks"]) == (0, 2, 4)
    assert zero["stands in"] == [0, 0, 2, 2]
    for found in (zero, two):  # the whole world: only those that are there add up
        assert found["world"]["sum"] == found["world"]["max"] == found["world"]["broadcast"] == 2
        assert found["world"]["gather"] == found["world"]["all_gather"] == [0, 0, 2, 2]
        assert found["world"]["objects"] == ["of 0", "of 0", "of 2", "of 2"]
        assert found["across"]["gather"] == [0, 2] and found["across"]["sum"] == found["across"]["broadcast"] == 2
        assert found["from an absent one"] == 0
    assert zero["exchange"] == two["exchange"] == [1, 1, 0]  # of the two rows that the other sends, this one has one
    assert two["across"]["scatter"] == 0 + 1 + 2 + 1  # the second of [0, 1] and [2, 3]
    for rank, found in ((0, zero), (2, two)):
        own = found["within"]
        assert own["sum"] == own["max"] == own["broadcast"] == own["scatter"] == rank
        assert own["gather"] == own["all_gather"] == [rank, rank] and own["objects"] == [f"of {rank}"] * 2
        assert own["gather in place"] == [rank, -1]  # weights of absent ranks stay as they were


class Clock:
    """Of a machine on which nothing else takes time."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def priced() -> float:
    """Seconds of a collective that takes 20 ms; another one runs beside 30 ms of something else."""
    begin(SHARE)
    group: Any = torch.distributed.new_group([0, 1])
    asked = []

    def price(*what: Any) -> float:
        asked.append(what)
        return 0.02

    group.price = price
    with patch.object(rehearsal_groups, "time", clock := Clock()):
        torch.distributed.all_reduce(torch.zeros(3), group=group)
        alone = clock.now
        work = torch.distributed.all_reduce(torch.zeros(3), group=group, async_op=True)
        assert not work.is_completed()
        clock.sleep(0.03)
        assert work.is_completed()
    assert asked == [("all_reduce", 12, 2)] * 2
    return alone


def test_collectives_take_what_links_would_less_what_runs_beside(pool: Pool) -> None:
    assert pool.run(1, priced)[0] == pytest.approx(0.02, rel=0.05)
