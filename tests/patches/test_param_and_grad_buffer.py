"""Whether gradients are numbers: asked for every bucket, read once."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.pipeline.patches import param_and_grad_buffer as patch


def judged(found: list[tuple[str, list[float]]], name: str) -> Any:
    """A group's check as upstream has it, which notes what it reads; NaN fails."""

    def judge(group: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        norms = [bucket.grad_data.norm(p=2) for bucket in group.buckets]
        found.append((name, [norm.item() for norm in norms]))
        assert check_for_nan_or_inf and not check_for_large
        if any(norm.isnan() for norm in norms):
            raise RuntimeError(f"NaN in {name}")

    return partial(patch._later, judge)


def group(*gradients: list[float]) -> Any:
    return SimpleNamespace(buckets=[SimpleNamespace(grad_data=torch.tensor(one)) for one in gradients])


def test_norms_are_taken_when_buckets_are_complete_and_read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, list[float]]] = []
    reads: list[int] = []

    def stack(norms: list[torch.Tensor]) -> torch.Tensor:
        reads.append(len(norms))
        return torch.tensor([norm.item() for norm in norms])

    monkeypatch.setattr(patch.torch, "stack", stack)
    first, second = group([3.0, 4.0], [0.0]), group([5.0, 12.0])
    with patch.together():
        judged(found, "first")(first, check_for_nan_or_inf=True, check_for_large=False)
        for bucket in first.buckets:
            bucket.grad_data.zero_()  # as its reduction may
        judged(found, "second")(second, check_for_nan_or_inf=True, check_for_large=False)
        assert not found and not reads
    assert found == [("first", [5.0, 0.0]), ("second", [13.0])] and reads == [3]


def check(check_grads: Any, *groups: Any, fail: bool = False) -> None:
    """An iteration that completes groups."""
    with patch.together():
        for one in groups:
            check_grads(one, check_for_nan_or_inf=True, check_for_large=False)
        if fail:
            raise KeyError


def test_what_is_no_number_fails_as_upstream_says() -> None:
    found: list[tuple[str, list[float]]] = []
    with pytest.raises(RuntimeError, match="NaN in all"):
        check(judged(found, "all"), group([1.0]), group([float("nan")]))
    assert len(found) == 2
    with pytest.raises(RuntimeError, match="NaN in alone"):  # elsewhere at once
        judged(found, "alone")(group([float("nan")]), True, False)


def test_checks_of_an_iteration_that_fails_are_dropped() -> None:
    found: list[tuple[str, list[float]]] = []
    with pytest.raises(KeyError):
        check(judged(found, "first"), group([float("nan")]), fail=True)
    check(judged(found, "first"))
    assert not found


def test_upstreams_own_check_is_replaced_once() -> None:
    from megatron.core.distributed import param_and_grad_buffer

    from megatron.pipeline import patches

    patches.install()
    replaced = param_and_grad_buffer._ParamAndGradBucketGroup.check_grads
    assert replaced.__module__ == patch.__name__
    patch.install()
    assert param_and_grad_buffer._ParamAndGradBucketGroup.check_grads is replaced
    with pytest.raises(RuntimeError, match="found NaN in local grad norm for bucket #1"):  # upstream's words, once read
        check(replaced, group([1.0], [float("nan")]))
