"""megatron.core.rerun_state_machine: when the host reads whether losses and gradients are numbers.

``RerunStateMachine.validate_result``: upstream's loss functions ask it about every microbatch's loss, and DDP about the norm of
every bucket that is complete, each twice. It reads what it is given, and the host waits for the device before it has launched
the passes that are left. Within ``together`` results are copied, and read at its end, all at once; upstream's function then
judges them in their order, in its own words. No setting does so.
``RerunDataIterator``: what it reads is found, and put in, by ``beneath``, so that what it replays comes from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.pipeline.patches import compat

# A result, and what judges it.
Noted = tuple[torch.Tensor, Callable[[torch.Tensor], None]]

_waiting: list[Noted] | None = None


def install() -> None:
    """Wrap it."""
    compat.wrap(compat.module("megatron.core.rerun_state_machine").RerunStateMachine, "validate_result", _later)


@contextmanager
def together(noted: list[Noted] | None = None, last: bool = True) -> Iterator[list[Noted]]:
    """Judge all results that are given within when it ends, after one read of the device; yields them, to be cleared or not.

    Args:
        noted: those that are waiting from before.
        last: else they go on waiting.

    Raises:
        RuntimeError: upstream's, for what is no number.
    """
    global _waiting
    noted = [] if noted is None else noted
    outer, _waiting = _waiting, noted
    try:
        yield noted
    finally:
        _waiting = outer
    if not (noted and last):
        return
    read = torch.stack([result.double() for result, _ in noted]).tolist()
    for (result, judge), number in zip(noted, read, strict=True):
        judge(torch.tensor(number, dtype=result.dtype))  # on the CPU: without a device


def beneath(items: Any, replace: Callable[[Any], Any]) -> Any:
    """An iterator in place of another; of upstream's that can replay an iteration, what it reads is replaced."""
    if not isinstance(items, compat.module("megatron.core.rerun_state_machine").RerunDataIterator):
        return replace(items)
    items.iterable = replace(items.iterable)
    return items


def replayed(iterators: Sequence[Any]) -> int | None:
    """Microbatches of an iteration that is run again, 0 where a rank reads none; None where an iteration is new."""
    again = [items for items in iterators if getattr(items, "replaying", False)]
    return max(len(items.saved_microbatches) for items in again) if again else None


def _later(judge: Any, machine: Any, result: Any, *given: Any, **options: Any) -> None:
    if _waiting is None or not torch.is_tensor(result) or result.numel() != 1:
        judge(machine, result, *given, **options)
    else:  # a copy: upstream's step divides the loss in place
        copy = result.detach().reshape(()).clone()
        _waiting.append((copy, lambda read: judge(machine, read, *given, **options)))
