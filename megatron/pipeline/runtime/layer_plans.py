"""The stages of a rank as megatron-core's layer plans, with ``overlap_moe_expert_parallel_comm``.

A plan is a forward of one microbatch through one chunk, cut into the parts of its layers: attention, dispatch, experts,
combine. Upstream runs the parts of a forward alone, those of the backward alone, or of a braid: the forward of one microbatch
and the backward of another, layer by layer, so that the all-to-alls of one run on a stream of their own while the other computes.

Everything around a plan stays upstream's ``forward_step``: it gets a function that runs the plan and returns its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_attr_wrapped_model
from megatron.pipeline.patches import compat

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.planner import Pass, Schedule
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.executor import Handlers
from megatron.pipeline.runtime.model_stages import ModelStages
from megatron.pipeline.runtime.p2p import Tensors
from megatron.pipeline.runtime.stage_passes import run_weights

_PARTS_WITH_WEIGHTS = ("mlp", "attn", "pre_dispatch_computation")  # the second is called as the third from 0.19 on


@dataclass(eq=False)
class _Forwarded:
    """A forward whose backward is to come.

    Attributes:
        plan: upstream's; each of its parts keeps its own graph.
        output: what the loss function was given, apart from the plan's graph; None where there is no loss.
    """

    plan: Any
    output: torch.Tensor | None = None


class _BesideForward(NamedTuple):
    """Work that runs beside a forward: the plan of a backward, the gradient that it starts from, and what takes the forward's
    output
    when all of its layers have been launched."""

    plan: Any = None
    gradient: torch.Tensor | None = None
    made: Callable[[torch.Tensor, int | None], None] | None = None


class LayerPlanStages(ModelStages):
    """The stages of this rank's chunks, each of whose forwards makes a plan that its backward uses up."""

    def __init__(self, call: Call, schedule: Schedule, rank: int, iterators: Sequence[Any]) -> None:
        super().__init__(call, schedule, rank, iterators)
        compat.get("megatron.core.pipeline_parallel.utils", "set_streams")()
        self._forwards: dict[tuple[int, int], _Forwarded] = {}  # by microbatch and chunk
        self._beside: _BesideForward | None = None  # of the braid that runs now

    @property
    def handlers(self) -> Handlers:
        """None for further kinds; plans are let go of when an iteration is given up."""
        return Handlers({}, abandon=(self._forwards.clear,))

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        plan, gradient = self._before_backward(work, outputs, gradients)
        with _weights_at_their_place(work, plan):
            type(plan).run(None, plan, b_grad=gradient)
        return _gradients(inputs)

    def braid(
        self,
        work: Pass,
        inputs: Tensors,
        other: Pass,
        kept: Tensors,
        outputs: Tensors,
        gradients: Tensors,
        made: Callable[[Tensors], None],
    ) -> Tensors:
        """Two plans, part by part. A loss is made after both; other outputs leave as upstream sends them: on the communication
        stream, behind the last combine and while the backward computes."""
        plan, gradient = self._before_backward(other, outputs, gradients)
        is_loss = self._gives_loss(work)
        self._beside = _BesideForward(plan, gradient, None if is_loss else lambda output, _chunk: made([output]))
        with _weights_at_their_place(other, plan):
            forwarded = self.forward(work, inputs, keep_graph=True)
        if is_loss:
            made(forwarded)
        return _gradients(kept)

    def _step_function(self, work: Pass) -> Callable[..., Any]:
        """For ``forward_step``; without a graph a plan would be of no use."""
        return partial(self._run_forward, work) if torch.is_grad_enabled() else super()._step_function(work)

    def _run_forward(self, work: Pass, data: Iterator[Any] | None, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        """Run a plan, with the backward beside it if there is one; its output and the loss function."""
        unwrapped = get_attr_wrapped_model(model, "build_schedule_plan", return_model_obj=True)
        with _left_to_passes(self._config):
            plan, loss_function = self._call.forward_step_func(data, unwrapped, return_schedule_plan=True)
        one_expert = self._config.num_moe_experts == self._config.expert_model_parallel_size
        if one_expert:
            _keep_tokens(plan)
        forwarded = self._forwards[work.microbatch, work.chunk] = _Forwarded(plan)
        beside, self._beside = self._beside or _BesideForward(), None
        output = type(plan).run(plan, beside.plan, b_grad=beside.gradient, post_forward=beside.made)
        _record_use(plan, one_expert)

        def loss_of(output: torch.Tensor, **options: Any) -> Any:
            forwarded.output = output.detach().requires_grad_(output.requires_grad)
            return loss_function(forwarded.output, **options)

        return output, loss_of

    def _before_backward(self, work: Pass, outputs: Tensors, gradients: Tensors) -> tuple[Any, torch.Tensor]:
        """The plan of a backward, and the gradient by its output: of the loss, or as it was received."""
        forwarded = self._forwards.pop((work.microbatch, work.chunk))
        [gradient] = gradients
        if gradient is None:
            [loss], scaled = outputs, self._config.grad_scale_func
            assert loss is not None and forwarded.output is not None
            torch.autograd.backward(loss if scaled is None else scaled(loss))
            gradient = forwarded.output.grad
        assert gradient is not None
        return forwarded.plan, gradient


def _gradients(inputs: Tensors) -> Tensors:
    return [None if tensor is None else tensor.grad for tensor in inputs]


def _keep_tokens(plan: Any) -> None:
    """Let a rank with one expert keep its tokens.

    Upstream frees what it gives to experts: several have made a sorted copy, one has not.
    """
    for layer in range(plan.num_layers()):
        plan.get_layer(layer).mlp.free_input = False


def _record_use(plan: Any, tokens_are_kept: bool) -> None:
    """Say that this stream reads what the communication stream has allocated, and that outlives the plan's part that made it.

    That is the last layer's output, which a W of the output layer, or a later stage on this rank, keeps; and tokens of experts.
    """
    layers = [plan.get_layer(layer) for layer in range(plan.num_layers())]
    parts = [layer.moe_combine for layer in layers[-1:]] + [layer.moe_dispatch for layer in layers if tokens_are_kept]
    for part in parts:
        made = part.get_output() if hasattr(part, "get_output") else None  # a dense layer has no such part
        if made is not None and made.is_cuda:
            made.record_stream(torch.cuda.current_stream())


@contextmanager
def _weights_at_their_place(work: Pass, plan: Any) -> Iterator[None]:
    """A backward that finishes the weights' gradients computes them where upstream would: those of experts once the all-to-all
    behind them (dispatch, backward) may start, those of attention behind the rest of the layer."""
    if not work.kind.finishes_weights:
        yield
        return
    tasks: list[WeightTask] = []

    def compute() -> None:
        ready: list[tuple[WeightTask, list[Any]]] = [(task, []) for task in tasks]
        tasks.clear()
        run_weights(ready)

    for layer in map(plan.get_layer, range(plan.num_layers())):
        for part in _PARTS_WITH_WEIGHTS:
            if hasattr(layer, part):
                getattr(layer, part).backward_dw = compute
    with deferring(tasks):
        yield
    compute()  # the output layer's, on a stage without layers


@contextmanager
def _left_to_passes(config: Any) -> Iterator[None]:
    """Plans that are built within leave the weights' gradients to our passes.

    Upstream's would empty Transformer Engine's stores within the braid, also where the schedule has a W for that.
    """
    delayed, config.delay_wgrad_compute = config.delay_wgrad_compute, False
    try:
        yield
    finally:
        config.delay_wgrad_compute = delayed
