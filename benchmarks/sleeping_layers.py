"""Stages of sleeping layers of experts: computation and all-to-alls sleep on two lanes of their rank's device.

The parts of layers are ours, their order is megatron-core's: its plans of chunks and of layers run them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common import model_chunk_schedule_plan as plans
from megatron.core.pipeline_parallel.utils import NoopScheduleNode
from megatron.core.transformer import TransformerConfig
from sleeping import Interval, MegatronStage, Sleeper, SleepingWeight

from megatron.pipeline.backward.weight_tasks import submit
from megatron.pipeline.schedule.core.costs import StageCosts
from megatron.pipeline.schedule.core.passes import Kind


class TwoLanes(Sleeper):
    """A device that computes and communicates at the same time. What is in no part of a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self._lanes = {"compute": 0.0, "communicate": 0.0}
        self._sending: float | None = None  # when what is being sent is there, if before both lanes are free

    @contextmanager
    def sending(self, ready: float) -> Iterator[None]:
        """What is sent within waits for its own part alone, as on the stream of communication."""
        self._sending = ready
        yield
        self._sending = None

    def synchronize(self) -> None:
        free, self._free = self._free, self._free if self._sending is None else self._sending
        super().synchronize()
        self._free = free

    def step(self, function: Any) -> Any:
        """Parts begin when they are launched, whatever step they are in."""
        return function

    def part(self, lane: str, ready: float, seconds: float) -> float:
        """Run a part behind all others of its lane; when it is over.

        Args:
            ready: when what it needs is there.
        """
        start = max(time.monotonic(), ready, self._lanes[lane])
        self._lanes[lane] = end = start + seconds
        self._free = max(self._lanes.values())
        self.passes.append(Interval(start, end))
        return end

    def _begin(self, start: float, seconds: float) -> None:
        self.part("compute", start, seconds)


class LayeredStage(MegatronStage):
    """A stage of layers of experts, which megatron-core's schedules call, or ask for a plan."""

    def __init__(
        self, config: TransformerConfig, sleeper: TwoLanes, costs: StageCosts, vp_stage: int | None, gives_loss: bool
    ) -> None:
        super().__init__(config, sleeper, costs, vp_stage, gives_loss)
        self.lanes, self.costs, self.gives_loss = sleeper, costs, gives_loss

    def build_schedule_plan(self, _tokens: torch.Tensor, *_: Any, **__: Any) -> SleepingPlan:
        return SleepingPlan(self, self._received)


class SleepingPlan(plans.TransformerModelChunkSchedulePlan):
    """A forward of one microbatch, and its backward, in parts."""

    def __init__(self, stage: LayeredStage, received: torch.Tensor | None) -> None:
        forward, backward = stage.costs.parts(Kind.F).of_layer, stage.costs.parts(Kind.FBW).of_layer
        self._event = plans.torch.cuda.Event()  # as megatron-core makes them here
        self.ready = 0.0  # when the last part is over
        self.pre_process = _Boundary(stage.weight if received is None else received)
        self.post_process: Any = _Loss() if stage.gives_loss else None
        self.vp_stage, self.lanes = stage.vp_stage, stage.lanes
        lanes, weights = stage.lanes, (backward.attention_weights, backward.expert_weights)
        self._layers = [
            SimpleNamespace(
                attn=_Part(self, lanes, "compute", forward.attention, backward.attention, weights[0]),
                moe_dispatch=_Part(self, lanes, "communicate", forward.dispatch, backward.dispatch),
                mlp=_Part(self, lanes, "compute", forward.experts, backward.experts, weights[1]),
                moe_combine=_Part(self, lanes, "communicate", forward.combine, backward.combine),
                mtp_post_process=NoopScheduleNode(),
                get_fp8_context=nullcontext,
                release_state=lambda: None,
                config=SimpleNamespace(ep_overlap_early_attn_memory_release=False),
            )
            for _ in range(stage.costs.parts(Kind.F).layers)
        ]

    @staticmethod
    def run(forward: Any, backward: Any, b_grad: Any = None, post_forward: Any = None, **others: Any) -> Any:
        def sent(output: torch.Tensor, chunk: int | None) -> None:
            with forward.lanes.sending(forward.ready):
                post_forward(output, chunk)

        run = plans.TransformerModelChunkSchedulePlan.run
        return run(forward, backward, b_grad=b_grad, post_forward=post_forward and sent, **others)

    def get_layer(self, i: int) -> Any:
        return self._layers[i]

    def pop_layer(self) -> Any:
        return self._layers.pop()

    def num_layers(self) -> int:
        return len(self._layers)

    def record_current_stream(self) -> None:
        """There are no streams."""

    wait_current_stream = release_state = record_current_stream


class _Part:
    """A part of a layer."""

    def __init__(
        self, plan: SleepingPlan, lanes: TwoLanes, lane: str, forward: float, backward: float, weights: float = 0.0
    ) -> None:
        self._plan, self._lanes, self._lane = plan, lanes, lane
        self._forward, self._backward, self._weights = forward, backward, weights

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._plan.ready = self._lanes.part(self._lane, self._plan.ready, self._forward)
        return inputs

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        self._plan.ready = self._lanes.part(self._lane, self._plan.ready, self._backward)
        if self._weights:
            submit(SleepingWeight(self._lanes, self._weights))
        return gradient

    def backward_dw(self) -> None:
        """The weights' gradients are tasks, which have run."""


class _Boundary:
    """What a stage received; its gradient goes back."""

    def __init__(self, received: torch.Tensor) -> None:
        self._received = received

    def forward(self) -> torch.Tensor:
        return self._received.detach().clone().requires_grad_()

    def backward(self, gradient: torch.Tensor) -> None:
        self._received.grad = gradient.clone()


class _Loss:
    """The end of the model."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self._shape = hidden.shape
        return hidden.sum()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.expand(self._shape).clone()
