"""Whether losses and gradients are numbers: asked for every microbatch and bucket, read once, in upstream's words."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import rerun_state_machine as upstream
from megatron.pipeline.patches import rerun_state_machine as patch

from megatron.pipeline import patches


@pytest.fixture
def machine() -> Iterator[Any]:
    """Upstream's, of this process, between the first iteration, which it does not judge, and a third."""
    patches.install()
    upstream.destroy_rerun_state_machine()
    upstream.initialize_rerun_state_machine(mode=upstream.RerunMode.VALIDATE_RESULTS)
    machine: Any = upstream.get_rerun_state_machine()
    machine.state, machine.first_iteration_complete = upstream.RerunState.INITIAL_RUN, True
    yield machine
    upstream.destroy_rerun_state_machine()


def check(machine: Any, loss: torch.Tensor) -> None:
    """As Megatron-LM's loss function does."""
    spiky = partial(machine.is_unexpectedly_large, threshold=10, context="loss")
    for message, reject in (("found NaN", torch.isnan), ("found Inf", torch.isinf), ("Spiky loss", spiky)):
        machine.validate_result(result=loss, rejection_func=reject, message=message, tolerance=0.0, fatal=message != "Spiky loss")


def test_results_are_copied_when_they_are_given_and_read_once_at_the_end(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    stack = torch.stack

    def noting(tensors: list[torch.Tensor]) -> torch.Tensor:
        reads.append(len(tensors))
        return stack(tensors)

    monkeypatch.setattr(patch.torch, "stack", noting)
    with patch.together():
        for value in (1.0, 2.0):
            loss = torch.tensor(value, requires_grad=True) * 1.0
            check(machine, loss)
            loss.detach().div_(1000)  # as upstream's forward step does in place
        assert not reads and not machine.max_values
    assert reads == [6] and machine.max_values == {"loss": 2.0} and not machine.rerun_requested


@pytest.mark.parametrize(
    ("values", "message", "sequence"), [((1.0, float("nan")), "found NaN", 2), ((float("inf"), 1.0), "found Inf", 1)]
)
def test_what_is_no_number_is_found_as_at_once(machine: Any, values: tuple[float, ...], message: str, sequence: int) -> None:
    with patch.together():
        for value in values:
            check(machine, torch.tensor(value))
        assert machine.failed_validation_call is None
    later: Any = machine.failed_validation_call
    assert machine.rerun_requested and (later.caller.message, later.sequence) == (message, sequence)
    machine.rerun_requested, machine.failed_validation_call = False, None
    machine.validation_counts.clear()
    for value in values:
        check(machine, torch.tensor(value))
    assert machine.failed_validation_call == later


def complete(*norms: list[float]) -> None:
    """As DDP does with a group of buckets that is complete, where nothing is run again."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    group: Any = SimpleNamespace(buckets=[SimpleNamespace(grad_data=torch.tensor(one)) for one in norms])
    Group.check_grads(group, check_for_nan_or_inf=True, check_for_large=False)
    for bucket in group.buckets:
        bucket.grad_data.zero_()  # as its reduction may


def test_gradients_that_are_no_numbers_fail_as_upstream_says(machine: Any) -> None:
    machine.set_mode(upstream.RerunMode.DISABLED)
    with pytest.raises(RuntimeError, match="found NaN in local grad norm for bucket #1"), patch.together():
        complete([1.0], [float("nan")])
    with pytest.raises(RuntimeError, match="found NaN"):  # elsewhere at once
        complete([float("nan")])


def fail(machine: Any) -> None:
    check(machine, torch.tensor(float("nan")))
    raise KeyError


def test_checks_that_are_cleared_or_of_an_iteration_that_fails_are_dropped(machine: Any) -> None:
    machine.set_mode(upstream.RerunMode.DISABLED)
    with patch.together() as noted:
        check(machine, torch.tensor(float("nan")))
        noted.clear()
    with pytest.raises(KeyError), patch.together():
        fail(machine)
    check(machine, torch.tensor(1.0))
