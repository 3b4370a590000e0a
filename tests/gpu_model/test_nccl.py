"""Rules of torch's ProcessGroupNCCL (2.8 to 2.13) that no mutation tries, each with the function of its .cpp that makes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from pool import Pool

from gpu_model import device, nccl
from gpu_model.judge import SETTINGS, judge
from gpu_model.ranks import another_world
from gpu_model.trace import Create, HostWait, Item, Post

dist: Any = torch.distributed
CUDA = torch.device("cuda", 0)


def group(**options: Any) -> nccl.Group:
    return cast(nccl.Group, dist.new_group(**options))


def me() -> int:
    return int(dist.get_rank())


def races(run: Callable[[], None]) -> list[str]:
    device().memory.forget()
    run()
    device().memory.sweep()
    return [race.kind for race in device().memory.races]


def communicators() -> list[list[tuple[Any, ...]]]:
    """Of a group of three ranks, before and after messages, and after a batch and a collective."""
    one, found = group(), []
    found.append(list(one.communicators))
    if me() < 2:
        numbers = [torch.ones(1, device=CUDA) for _ in range(2)]
        order = (one.send, one.recv) if me() == 0 else (one.recv, one.send)
        for post, number in zip(order, numbers, strict=True):
            post([number], 1 - me()).wait()
    found.append(list(one.communicators))
    if me() < 2:
        operation = dist.isend if me() == 0 else dist.irecv
        [work] = dist.batch_isend_irecv([dist.P2POp(operation, torch.ones(1, device=CUDA), 1 - me(), one)])
        work.wait()
    dist.all_reduce(torch.ones(1, device=CUDA), group=one)
    found.append(list(one.communicators))
    assert len({stream.name for stream in one.communicators.values()}) == len(one.communicators)
    return found


def test_a_pair_has_a_communicator_of_its_own_and_a_stream_with_it(gpus: Pool) -> None:
    """``pointToPoint``: the key of a single message is its two ranks', of a batch and of every collective the device's, which is
    the whole group's; ``initNCCLComm`` makes the communicator at its first use with one stream (``ncclStreams_``)."""
    pair, whole = (0, 1), ("all", 0, 1, 2)
    assert gpus.run(3, communicators) == [[[], [pair], [pair, whole]]] * 2 + [[[], [], [whole]]]


def eager_communicators() -> tuple[bool, list[tuple[Any, ...]], set[str]]:
    another_world(device_id=CUDA)
    one = group()
    with device().trace.recording() as trace:
        exchange_in_order(one)
    return nccl.eager(), list(one.communicators), {type(item).__name__ for item in trace}


def exchange_in_order(one: nccl.Group) -> None:
    for sender in (0, 1):
        (one.send if me() == sender else one.recv)([torch.ones(1, device=CUDA)], 1 - me()).wait()


def test_with_a_device_given_messages_run_on_the_communicator_of_the_group(gpus: Pool) -> None:
    """``pointToPoint``: with a bound device a single message takes the device's key too; ``eagerConnectSingleDevice`` has made
    the communicator when the group was."""
    for eager, made, items in gpus.run(2, eager_communicators):
        assert eager and made == [("all", 0, 1)] and "Create" not in items


def making() -> list[list[Item]]:
    """The trace of two groups, which the ranks first use in other orders."""
    groups = [group(), group()]
    with device().trace.recording() as trace:
        for one in groups if me() == 0 else reversed(groups):
            one.allreduce([torch.ones(1, device=CUDA)])
    return [list(trace)]


def test_making_a_communicator_blocks_the_host(gpus: Pool) -> None:
    """``initNCCLComm``: every member's host stands in ncclCommInitRank until all have come, there the first work is posted.

    With eager communicators the same program ends."""
    traces = [trace for [trace] in gpus.run(2, making)]
    assert [isinstance(item, Create) for item in traces[0] if isinstance(item, Create | Post)] == [True, False] * 2
    stuck = judge(traces, SETTINGS["queues"]).deadlock
    assert all("the making" in line for line in stuck) and {line[:6] for line in stuck} == {"rank 0", "rank 1"}
    assert judge(traces, SETTINGS["eager"]).deadlock == ()


def opposing() -> list[Item]:
    """Each rank posts a receive, and then a send; nobody waits on the host."""
    one = group()
    with device().trace.recording() as trace:
        works = [one.recv([torch.ones(1, device=CUDA)], 1 - me()), one.send([torch.ones(1, device=CUDA)], 1 - me())]
        for work in works:
            work.wait()
    return list(trace)


def test_work_of_a_communicator_meets_in_the_order_of_posting(gpus: Pool) -> None:
    """``pointToPoint`` launches every message on the communicator's stream, in which a kernel starts once the one before it has
    ended: two receives first are a deadlock, though gloo lets the data pass."""
    stuck = judge(gpus.run(2, opposing), SETTINGS["queues"]).deadlock
    assert any("rank 0 waits for recv 1" in line for line in stuck) and any("rank 1 waits for recv 0" in line for line in stuck)


def host_waits() -> list[int]:
    """How often the host waits for messages and collectives that it waits for: of a message, a collective, and a barrier."""
    one, found = group(), []
    dist.all_reduce(torch.ones(1, device=CUDA), group=one)
    posts: tuple[Callable[[], Any], ...] = (
        lambda: (one.send if me() == 0 else one.recv)([torch.ones(1, device=CUDA)], 1 - me()).wait(),
        lambda: dist.all_reduce(torch.ones(1, device=CUDA), group=one, async_op=True).wait(),
        lambda: dist.barrier(group=one),
    )
    for post in posts:
        with device().trace.recording() as trace:
            post()
        found.append(sum(isinstance(item, HostWait) for item in trace))
    return found


def test_the_host_waits_for_barriers_alone(gpus: Pool) -> None:
    """``WorkNCCL::synchronizeStream`` blocks a stream; ``WorkNCCL::wait`` of a barrier also has the host wait for that."""
    assert gpus.run(2, host_waits) == [[0, 0, 1]] * 2


def streams_of_collectives() -> list[tuple[bool, bool]]:
    """Whether a collective is asynchronous, and whether its tensor was used on the current stream alone."""
    one, found = group(), []
    for asynchronous in (False, True):
        tensor = torch.ones(4, device=CUDA)
        with device().trace.recording() as trace:
            work = dist.all_reduce(tensor, group=one, async_op=asynchronous)
        [post] = [item for item in trace if isinstance(item, Post)]
        found.append((post.asynchronous, races(lambda tensor=tensor: tensor.add_(1)) == []))  # type: ignore[misc]
        if asynchronous:
            work.wait()
    return found


def test_a_collective_that_is_not_asynchronous_runs_on_the_current_stream(gpus: Pool) -> None:
    """``collective``: without asyncOp its stream is the current one, so nothing has to be waited for (since torch 2.8)."""
    assert gpus.run(2, streams_of_collectives) == [[(False, True), (True, False)]] * 2


def completed() -> tuple[list[bool], bool]:
    """What a work says of itself at once, and at last; and whether the second of two waits for the first."""
    one = group()
    post = one.send if me() == 0 else one.recv
    if me() == 1:
        works = [post([torch.ones(1, device=CUDA)], 0) for _ in range(2)]
        answers = [works[1].is_completed(), works[1].is_completed()]
        dist.get_rank()
        torch.distributed.distributed_c10d._get_default_store().set("asked", "1")
        until(works[1].is_completed)
        return [*answers, works[1].is_completed()], works[0].is_completed() or works[0].is_completed()
    torch.distributed.distributed_c10d._get_default_store().get("asked")
    works = [post([torch.ones(1, device=CUDA)], 1) for _ in range(2)]
    for work in works:
        work.wait()
    return [False, False, True], True


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def test_work_is_completed_once_the_device_has_done_it(gpus: Pool) -> None:
    """``WorkNCCL::isCompleted`` asks the end event (``finishedGPUExecutionInternal``): not before the sender has sent, and not
    before what precedes it on the communicator."""
    assert gpus.run(2, completed) == [([False, False, True], True)] * 2


def default_timeouts() -> list[timedelta]:
    another_world(timeout=timedelta(minutes=60))
    return [dist.group.WORLD.timeout, group().timeout, group(timeout=timedelta(minutes=3)).timeout]


def test_a_group_has_ten_minutes_unless_it_is_told(gpus: Pool) -> None:
    """``ProcessGroupNCCL::Options`` has ``kProcessGroupNCCLDefaultTimeout``: a new group does not take the world's."""
    assert gpus.run(2, default_timeouts) == [[timedelta(minutes=minutes) for minutes in (60, 10, 3)]] * 2


def guesses() -> list[bool]:
    nccl.barriers.clear()
    dist.barrier()
    dist.barrier(device_ids=[0])
    return [said for _, said in nccl.barriers]


def test_a_barrier_guesses_its_device(gpus: Pool) -> None:
    """``barrier`` takes device_ids, then the bound device, then ``guessDeviceForRank``: rank modulo GPUs of the node."""
    assert gpus.run(2, guesses) == [[False, True]] * 2
