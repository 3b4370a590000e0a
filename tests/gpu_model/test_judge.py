"""The judge on traces of a few items: each rule of devices, hosts and NCCL alone."""

from __future__ import annotations

import pytest

from gpu_model.judge import SETTINGS, Setting, judge
from gpu_model.trace import At, Follow, HostWait, Item, Kernels, Mark, Part, Post

ALL = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
QUEUES = SETTINGS["queues"]


def message(what: str, rank: int, peer: int, ranks: tuple[int, ...] = (0, 1), group: str = "up", place: str = "") -> Post:
    return Post("compute", True, group, ranks, rank, (Part(what, peer),), True, place)


def collective(what: str, rank: int, ranks: tuple[int, ...] = (0, 1), group: str = "all") -> Post:
    return Post("compute", True, group, ranks, rank, (Part(what),), False, "")


@ALL
def test_a_message_comes(setting: Setting) -> None:
    traces: list[list[Item]] = [[Kernels("compute", 3), message("send", 0, 1)], [message("recv", 1, 0), Follow("compute", 0)]]
    verdict = judge(traces, setting)
    assert verdict.deadlock == ()
    assert verdict.kernels == 3
    assert verdict.receives == ((), ((0, 1), (3, 0)))


def test_two_groups_keep_opposing_messages_apart_but_one_queue_does_not() -> None:
    """On one hardware queue a second receive from a peer holds up the send that the peer waits for."""

    def opposing(own: int) -> list[Item]:
        receives = [message("recv", own, 1 - own, group=f"to {own}") for _ in range(2)]
        return [*receives, *(message("send", own, 1 - own, group=f"to {1 - own}") for _ in range(2))]

    traces = [opposing(own) for own in (0, 1)]
    assert judge(traces, QUEUES).deadlock == ()
    assert judge(traces, Setting(one_queue=True)).deadlock != ()


def test_messages_of_pairs_are_apart_but_not_in_eager_mode() -> None:
    """Rank 1 receives from 0 before it sends to 2, and rank 0 first waits for what comes around from 2."""
    ranks = (0, 1, 2)
    traces = [
        [message("recv", 0, 2, ranks), message("send", 0, 1, ranks)],
        [message("recv", 1, 0, ranks), message("send", 1, 2, ranks)],
        [message("send", 2, 0, ranks), message("recv", 2, 1, ranks)],
    ]
    around = [[message("recv", own, (own - 1) % 3, ranks), message("send", own, (own + 1) % 3, ranks)] for own in ranks]
    for setting, is_stuck in ((QUEUES, False), (SETTINGS["eager"], True)):
        assert judge(traces, setting).deadlock == ()
        assert bool(judge(around, setting).deadlock) == is_stuck


@ALL
def test_batches_are_one_kernel(setting: Setting) -> None:
    traces = [
        [Post("compute", True, "up", (0, 1), own, (Part("recv", 1 - own), Part("send", 1 - own)), False, "")] for own in (0, 1)
    ]
    assert judge(traces, setting).deadlock == ()


@ALL
def test_a_counterpart_that_never_comes_is_named(setting: Setting) -> None:
    assert "rank 1 never posts its part" in judge([[message("send", 0, 1)], []], setting).deadlock[-1]
    [*_, line] = judge([[collective("broadcast", 0)], [collective("reduce", 1)]], setting).deadlock
    assert "in its place" in line


@ALL
def test_a_host_that_waits_for_all_waits_for_posted_receives(setting: Setting) -> None:
    def asking(wait: list[Item]) -> list[Item]:
        return [message("recv", 0, 1, group="down"), *wait, message("send", 0, 1)]

    answering: list[Item] = [message("recv", 1, 0), Follow("compute", 0), message("send", 1, 0, group="down")]
    stuck = judge([asking([HostWait(None, "synchronize")]), answering], setting).deadlock
    assert any("the host's wait" in line and "synchronize" in line for line in stuck)
    assert judge([asking([Mark("compute"), HostWait(1, "")]), answering], setting).deadlock == ()


def test_work_of_a_communicator_is_in_order_whatever_its_streams() -> None:
    """A collective that is not asynchronous runs on the current stream, and still follows the communicator's."""
    here = [Post("compute", at == 0, "all", (0, 1), 0, (Part("all_reduce"),), False, "") for at in (0, 1)]
    there = [Post(f"side {at}", True, "all", (0, 1), 1, (Part("all_reduce"),), False, "") for at in (0, 1)]
    assert judge([here, there], QUEUES).deadlock == ()
    late = judge([[Kernels("side", 5), *here], [Kernels("side 0", 7), *there, Mark("side 1"), HostWait(3, "")]], QUEUES)
    assert late.kernels == 7


def test_how_far_a_host_leads() -> None:
    passes = [item for number in range(5) for item in (At(f"F{number}.0"), Kernels("compute", 10))]
    assert judge([passes], QUEUES).lead == (5,)
    assert judge([passes], Setting(launches=25)).lead == (4,)  # it stands in the launches of the fourth
    waits = [*passes[:4], Mark("compute"), HostWait(4, ""), *passes[4:]]
    assert judge([waits], QUEUES).lead == (3,)
