"""Traces of what the product does on the device model, and what the judge says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from gpu_model import device
from gpu_model.judge import SETTINGS, Traces, judge
from gpu_model.trace import At, Item


@contextmanager
def recording(memory: bool = False) -> Iterator[list[Item]]:
    """This rank's trace, with the operations of its programs; and its memory."""
    from megatron.pipeline.planner.schedule.lower.program import describe
    from megatron.pipeline.runtime.executor import Executor

    enter = Executor._at

    def entering(executor: Executor, operation: Any) -> None:
        device().trace.add(At(describe(operation)))
        enter(executor, operation)

    with patch.object(Executor, "_at", entering), device().trace.recording(memory) as trace:
        yield trace


@contextmanager
def racing() -> Iterator[list[str]]:
    """The races of what runs in here, as text, once it has been left."""
    memory, found = device().memory, list[str]()
    memory.forget()
    yield found
    memory.sweep()
    found += map(str, memory.races)


def trained(schedule: str, **given: Any) -> list[Item]:
    """The trace of a training of a tiny GPT."""
    import tiny_gpt

    with recording() as trace:
        tiny_gpt.train(schedule, **given)
    return trace


def stuck(traces: Traces) -> list[str]:
    """The deadlocks of all ranks' traces under each of the settings."""
    return [f"{name}: {line}" for name, setting in SETTINGS.items() for line in judge(traces, setting).deadlock]
