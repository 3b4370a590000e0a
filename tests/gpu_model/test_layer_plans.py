"""Braids on the device model: upstream's all-to-alls run on a stream of their own, and nothing is ahead of anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from marked import whole
from pool import Pool
from runtime import plans
from runtime.braids import BraidingExecutor

from gpu_model.recorded import racing
from megatron.pipeline.runtime.executor import Executor

RANKS, PIPELINE, MICROBATCHES, ITERATIONS = 4, 2, 4, 2
DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@contextmanager
def entered_without_waiting(stream: Any, event: Any) -> Iterator[None]:
    """Upstream's ``stream_acquire_context`` without its first half."""
    yield
    event.record(stream)


@contextmanager
def left_without_a_record(stream: Any, event: Any) -> Iterator[None]:
    """The same without its second half."""
    event.wait(stream)
    yield


_within = Executor._send_within_braid


def sent_on_the_passes_stream(executor: Executor, work: Any, outputs: Any) -> None:
    """The output of a braid's forward, which the communication stream has made, before the passes' stream has waited for it."""
    with torch.cuda.stream(torch.cuda.default_stream()):
        _within(executor, work, outputs)


UPSTREAM = "megatron.core.pipeline_parallel.utils.stream_acquire_context"
CHANGES = {
    "no wait": (UPSTREAM, entered_without_waiting),
    "no record": (UPSTREAM, left_without_a_record),
    "sent too early": ("megatron.pipeline.runtime.executor.Executor._send_within_braid", sent_on_the_passes_stream),
}


def train(schedule: str, flags: str = "", change: str | None = None, overlaps: bool = True) -> tuple[Any, int, list[str]]:
    """Losses and norms, how many braids' outputs left on the stream of communication, and the races that were found."""
    flags = f"{plans.OVERLAP} {flags}" if overlaps else flags
    with racing() as races, patch(*CHANGES[change]) if change else nullcontext():
        steps, _ = plans.train(schedule, PIPELINE, MICROBATCHES, flags, ITERATIONS, braided=overlaps, digested=False)
    return steps, BraidingExecutor.beside, races


@pytest.mark.parametrize(
    ("schedule", "flags"),
    [
        whole("zb-h1", ""),
        whole("dualpipe-v", ""),
        ("dualpipe-v", "--num-experts 2"),
        whole("zb-v", "--num-experts 2"),
        ("zb-v", f"--moe-shared-expert-intermediate-size 16 {DISTRIBUTED}"),
    ],
)
def test_no_stream_is_ahead_in_a_braid(gpus: Pool, schedule: str, flags: str) -> None:
    found = gpus.run(RANKS, train, schedule, flags)
    assert [races for _, _, races in found] == [[]] * RANKS
    assert sum(beside for _, beside, _ in found)
    alone = gpus.run(RANKS, train, schedule, flags, overlaps=False)
    assert [steps for steps, _, _ in found] == [steps for steps, _, _ in alone]


@pytest.mark.parametrize("change", [whole(name) if name == "no record" else name for name in CHANGES])
def test_what_upstream_waits_for_matters(gpus: Pool, change: str) -> None:
    assert any(races for _, _, races in gpus.run(RANKS, train, "zb-h1", change=change))
