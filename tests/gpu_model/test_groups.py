"""What is said of process groups on GPUs: memory that NCCL takes, and messages that share a communicator."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool

from gpu_model import nccl

_EACH = 8  # MiB of a communicator
UNTIED = ("--untie-embeddings-and-output-weights",)


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the product logs in here, from warnings to news."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.pipeline")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def communicators() -> int:
    return sum(len(group.communicators) for group in nccl.groups())


def said_of_memory(posting: str) -> tuple[int, list[str]]:
    """MiB that the communicators of messages and the vocabulary take, and what was logged."""
    import tiny_gpt

    from megatron.pipeline.distributed import groups

    whole, begin, made = 80 * 2**30, groups.memory_noted, []

    @contextmanager
    def counting(purpose: str) -> Iterator[None]:
        before = communicators()
        with begin(purpose):
            yield
        made.append(communicators() - before)

    def left() -> tuple[int, int]:
        return whole - torch.cuda.memory_reserved() - _EACH * 2**20 * communicators(), whole

    both = (patch(f"megatron.pipeline.runtime.{name}.memory_noted", counting) for name in ("p2p", "vocabulary"))
    with logged() as said, patch.object(torch.cuda, "mem_get_info", left), next(both), next(both):
        tiny_gpt.train("zb-v", pp=2, iterations=1, flags=(*UNTIED, "--vocab-parallel", "2", "--pipeline-p2p", posting))
    return _EACH * sum(made), [line for line in said if "communicators" in line]


@pytest.mark.parametrize("posting", ["single", "batched"])
def test_memory_that_nccl_takes_is_logged_once(gpus: Pool, posting: str) -> None:
    (taken, lines), (_, silent) = gpus.run(2, said_of_memory, posting)
    assert not silent and len(lines) == 2
    amounts = [int(line.split(" take ")[1].split(" MiB")[0]) for line in lines]
    assert sum(amounts) == taken > 0 and min(amounts) > 0


def said_of_groups(bound: bool) -> list[str]:
    """Where the world is bound to a device, as by ``init_process_group(device_id=..)``, or is not."""
    from megatron.pipeline.runtime.p2p import Channels

    world: Any = torch.distributed.group.WORLD
    with logged() as said, patch("megatron.pipeline.runtime.p2p.new_group", lambda *_, **__: None):
        world.bound_device_id = torch.device("cuda", 0) if bound else None
        Channels.open(world, variable_lengths=False)
        world.bound_device_id = None
    return said


def test_messages_that_share_a_communicator_are_warned_of(gpus: Pool) -> None:
    (warned,), silent = gpus.run(2, said_of_groups, True)
    assert "without device_id" in warned and not silent
    assert gpus.run(2, said_of_groups, False) == [[], []]
