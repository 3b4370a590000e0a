"""Copies beside the computation: their order, their errors and their end."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from megatron.pipeline.runtime.offload.copy_streams import ThreadCopyStreams


def test_each_direction_copies_in_order(streams: ThreadCopyStreams) -> None:
    first, second, target = torch.ones(1000), torch.full((1000,), 2.0), torch.zeros(1000)
    tickets = [streams.to_host([(first, target)]), streams.to_host([(second, target)])]
    for ticket in reversed(tickets):
        ticket.wait()
    assert torch.equal(target, second)
    assert tickets[0].times[1] <= tickets[1].times[0]


def test_a_slow_direction_does_not_hold_up_the_other() -> None:
    streams = ThreadCopyStreams(bandwidth_to_host=1.0)
    slow, fast, source = torch.zeros(1000), torch.zeros(1000), torch.ones(1000)
    streams.to_host([(source, slow)])
    for _ in range(10):
        streams.to_device([(source, fast)]).wait()
    assert fast.sum() == 1000
    assert slow.sum() == 0
    streams.close()


def test_nothing_is_held_once_it_is_copied(streams: ThreadCopyStreams) -> None:
    source = torch.ones(1000)
    alive = weakref.ref(source)
    ticket = streams.to_host([(source, torch.zeros(1000))])
    del source
    ticket.wait()
    assert alive() is None


def test_an_error_is_raised_where_it_is_waited_for(streams: ThreadCopyStreams) -> None:
    ticket = streams.to_device([(torch.ones(3), torch.ones(4))])
    with pytest.raises(RuntimeError, match="size"):
        ticket.wait()
    target = torch.zeros(3)
    streams.to_device([(torch.ones(3), target)]).wait()
    assert target.sum() == 3


@pytest.mark.parametrize("how", ["close", "garbage"])
def test_threads_end(how: str) -> None:
    before = set(threading.enumerate())
    streams: Any = ThreadCopyStreams(1.0, 1.0)
    threads = set(threading.enumerate()) - before
    ticket = streams.to_host([(torch.ones(1000), torch.ones(1000))])  # would take more than an hour
    assert len(threads) == 2
    if how == "close":
        streams.close()
        with pytest.raises(RuntimeError, match="closed"):
            streams.to_host([])
    del streams
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(RuntimeError, match="closed"):
        ticket.wait()


def test_a_process_ends_with_copies_under_way() -> None:
    program = (
        "import torch; from megatron.pipeline.runtime.offload.copy_streams import ThreadCopyStreams; "
        "streams = ThreadCopyStreams(1.0, 1.0);"
        "copying = streams.to_device([(torch.ones(1000), torch.ones(1000))]); print(copying.done())"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, timeout=60, capture_output=True, text=True)
    assert ended.stdout == "False\n"
