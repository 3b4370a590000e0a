"""megatron.core.distributed.param_and_grad_buffer: when the host reads whether gradients are numbers.

``_ParamAndGradBucketGroup.check_grads``: upstream reads a norm of every bucket as soon as it is complete, twice, and the host
waits for the device each time: before it has launched the passes that are left, where weight gradients are finished late. Within
``together`` the norms are taken there and read at its end, all at once; upstream's function then judges them. No setting does so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from megatron.pipeline.patches import compat

_PATH, _GROUP, _CHECK = "megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup", "check_grads"


class _Check(NamedTuple):
    """A call that waits for its norms: of all buckets of one group."""

    judge: Callable[..., None]
    norms: list[torch.Tensor]
    options: dict[str, Any]


_waiting: list[_Check] | None = None


def install() -> None:
    """Wrap it, once; a release without it reads nothing."""
    if compat.optional(_PATH, f"{_GROUP}.{_CHECK}") is not None:
        compat.wrap(getattr(compat.module(_PATH), _GROUP), _CHECK, _later)


@contextmanager
def together() -> Iterator[None]:
    """Check all buckets that are completed within when it ends, after one read of the device.

    Raises:
        RuntimeError: upstream's, for gradients that are no numbers.
    """
    global _waiting
    checks: list[_Check] = []
    _waiting = checks
    try:
        yield
    finally:
        _waiting = None
    if not checks:
        return
    read = iter(torch.stack([norm.float() for one in checks for norm in one.norms]).tolist())
    for one in checks:
        norms = [torch.tensor(next(read), dtype=norm.dtype) for norm in one.norms]  # on the CPU: judged without a device
        buckets = [SimpleNamespace(grad_data=SimpleNamespace(norm=lambda p, norm=norm: norm)) for norm in norms]
        one.judge(SimpleNamespace(buckets=buckets), **one.options)


def _later(judge: Callable[..., None], group: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
    options = {"check_for_nan_or_inf": check_for_nan_or_inf, "check_for_large": check_for_large}
    if _waiting is None:
        judge(group, **options)
    else:
        _waiting.append(_Check(judge, [bucket.grad_data.norm(p=2) for bucket in group.buckets], options))
