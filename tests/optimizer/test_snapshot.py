"""Undoing steps of any optimizer, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron.pipeline.runtime.optimizer.snapshot import Keep, Snapshot

MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "adamw-foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "adam-amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, centered=True),
}


class CountsInItsGroups(torch.optim.SGD):
    """Keeps the number of steps where Transformer Engine's and apex's Adam do: in the parameter groups."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] /= group["step"]
        return super().step(closure)


MAKERS["steps in groups"] = lambda groups: CountsInItsGroups(groups, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("keep", list(Keep))
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_undone_steps_leave_nothing(name: str, steps_before: int, keep: Keep) -> None:
    def train(detour: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7)[2:])]
        optimizer = MAKERS[name]([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.03}])
        snapshot = Snapshot([optimizer], keep)
        for number in range(steps_before + 2):
            gradients = [torch.randn_like(parameter) for parameter in parameters]
            if detour and number == steps_before:
                snapshot.take()
                snapshot.ready()
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, float("inf"))
                optimizer.step()
                snapshot.restore()
                snapshot.release()
                assert snapshot.bytes == 0
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
        return [parameter.detach() for parameter in parameters]

    for undone, straight in zip(train(detour=True), train(detour=False), strict=True):
        assert torch.equal(undone, straight)


def test_adam_takes_twelve_bytes_a_parameter() -> None:
    parameter = torch.nn.Parameter(torch.randn(1000))
    optimizer = torch.optim.Adam([parameter])
    parameter.grad = torch.randn(1000)
    optimizer.step()
    snapshot = Snapshot([optimizer])
    snapshot.take()
    assert snapshot.bytes == 12 * 1000 + 4, "and the number of steps"
