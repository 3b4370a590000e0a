"""Tasks of W: backward makes one for every weight whose gradient can wait, B leaves them to W, BW runs them at once.

A kind of layer joins by making a ``WeightTask`` in its backward and giving it to ``submit``: megatron-core's linears do
(``split_linear.py``), their grouped experts (``grouped_experts.py``) and Transformer Engine's linears (``te_linear.py``).
DDP learns from ``notify``, not from autograd, that a weight ``prepare``d here has its gradient.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

__all__ = ["WeightTask", "prepare", "register_hook", "submit"]

# Attributes of a weight. The first has what to call when the weight has its gradient of one microbatch.
_HOOKS = "weight_gradient_hooks"
_FUSED_IF_RECOMPUTED = "fused_if_recomputed"
_ROW_PARALLEL = "row_parallel"
_MARK = "skip_backward_post_hook"  # megatron-core's, of weights whose gradients DDP expects from their modules

DDP_DOES_NOT_WAIT = (
    "a weight prepared by split_weights is in DDP's buffers, but DDP does not wait for its gradients: "
    "wrap the model with DistributedDataParallel after split_weights"
)

_USED_ELSEWHERE = (
    "the model uses its weight elsewhere than in the forward of its module, and such a gradient would be lost: use it there "
    "alone, or take --pipeline-schedule stock"
)


class RowParallel(NamedTuple):
    """A linear that is cut by rows over tensor-parallel ranks.

    Attributes:
        gathered_by: the ranks that each gather its output gradient from shards as its backward begins; None where each has it.
    """

    gathered_by: torch.distributed.ProcessGroup | None


class WeightTask(Protocol):
    """Work of W for one layer and one microbatch."""

    @property
    def held(self) -> Iterable[torch.Tensor]:
        """The tensors kept alive until the task has run."""

    def prefetch(self) -> None:
        """Start what communication the task needs, so that it overlaps the work before it."""

    def run(self) -> None:
        """Compute the gradient and notify DDP. Once."""


# Where backward puts weight gradients, while ``deferring`` says so. A plain variable because autograd may call backward
# from a thread of its own while the thread that set this waits for it.
_deferred: list[WeightTask] | None = None
_shields: list[WeightTask] | None = None  # of row-parallel linears, until the next collective begins


@contextmanager
def deferring(tasks: list[WeightTask], shielded: bool = False) -> Iterator[None]:
    """Within this context, backward appends weight tasks to ``tasks`` instead of running them.

    Args:
        shielded: this backward has weight gradients behind its own collectives, which nothing else would hide: those of
            row-parallel linears wait for the next one, and where none waits, a linear computes its own.
    """
    global _deferred, _shields
    outer = _deferred, _shields
    _deferred, _shields = tasks, [] if shielded else None
    try:
        yield
        reduction_begins()  # none came
    finally:
        _deferred, _shields = outer


def is_deferred(fused: bool = False, row: bool = False, reduces: bool = False) -> bool:
    """Tell whether a task submitted now is left to W.

    Args:
        fused: what ``runs_fused`` said when the layer ran its forward.
        row: of a row-parallel linear.
        reduces: its linear sums the input's gradient over other ranks, and waits for that next.
    """
    return _deferred is not None and _waiting(fused, row, reduces) is _deferred


def submit(task: WeightTask, fused: bool = False, row: bool = False, reduces: bool = False) -> None:
    """Leave a task to W, or to this backward's next collective, or run it now; see ``is_deferred`` for the arguments.

    What waits for a collective runs, the oldest first, if the task's linear ``reduces``.
    """
    waiting = _waiting(fused, row, reduces) if _shields is not None or fused else _deferred
    if waiting is None:
        task.run()
    else:
        waiting.append(task)
    if reduces:
        reduction_begins()


def _waiting(fused: bool, row: bool, reduces: bool) -> list[WeightTask] | None:
    """Tasks that one submitted now is to join; None where it is to run at once."""
    if _deferred is None or fused:
        return None
    if _shields is None or not (row or (reduces and not _shields)):
        return _deferred
    return _shields if row else None


def reduction_begins() -> None:
    """Run what waits for a collective, the oldest first: one is under way, and the backward waits for it next."""
    while _shields:
        _shields.pop(0).run()


def prepare(weight: torch.nn.Parameter, row_parallel: RowParallel | None = None) -> None:
    """Have DDP, which is yet to wrap the weight's module, learn from ``notify`` that the weight has a gradient.

    Args:
        row_parallel: of a linear that is cut by rows over tensor-parallel ranks.
    """
    setattr(weight, _MARK, True)
    setattr(weight, _HOOKS, [])
    setattr(weight, _ROW_PARALLEL, row_parallel)


def row_parallel(weight: torch.nn.Parameter) -> RowParallel | None:
    """Note that ``prepare`` has made of a weight."""
    note: RowParallel | None = getattr(weight, _ROW_PARALLEL)
    return note


def is_prepared(weight: torch.Tensor | None) -> bool:
    """Tell whether ``prepare`` has seen a weight."""
    return hasattr(weight, _HOOKS)


def register_hook(module: torch.nn.Module, hook: Callable[[], None]) -> None:
    """Call ``hook`` whenever a microbatch has added its gradient to a prepared weight of a module.

    DDP asks for each weight without saying for which, in the order of the module's parameters.
    """
    prepared = [getattr(weight, _HOOKS) for weight in module.parameters(recurse=False) if is_prepared(weight)]
    min(prepared, key=len).append(hook)


def notify(weight: torch.nn.Parameter) -> None:
    """Call the hooks of a prepared weight: it has its gradient of one microbatch.

    Raises:
        RuntimeError: the weight is in DDP's buffers, but DDP has no hook on it.
    """
    hooks = getattr(weight, _HOOKS)
    if not hooks and hasattr(weight, "main_grad"):
        raise RuntimeError(DDP_DOES_NOT_WAIT)
    for hook in hooks:
        hook()


def check_no_gradient_is_lost(chunk: torch.nn.Module) -> None:
    """Refuse a chunk of which autograd, and not W, has computed the gradient of a prepared weight: DDP does not look there.

    To be asked once all W have run, and before gradients are reduced. A weight without any gradient is no matter of W's, unless
    Transformer Engine keeps what it is to be computed from: that is refused, too.

    Raises:
        RuntimeError: names the weights.
    """
    lost = []
    for path, module in chunk.named_modules():
        context = getattr(getattr(module, "wgrad_store", None), "context", None)  # None where it delays nothing
        keeps = context is not None and not context.empty()
        for name, weight in module.named_parameters(recurse=False):
            if _has_lost(weight) or (keeps and hasattr(weight, _MARK)):
                lost.append(re.sub(r"^(module\.|\.)+", "", f"{path}.{name}"))
    if lost:
        raise RuntimeError(f"W never computed {', '.join(lost)}: {_USED_ELSEWHERE}")


def check_nothing_is_overwritten(weight: torch.nn.Parameter) -> None:
    """Asked by a W before it adds to ``main_grad``.

    Raises:
        RuntimeError: autograd has a gradient of this weight, too, which DDP would not see.
    """
    if _has_lost(weight):
        raise RuntimeError(
            f"W computes a part of a weight of shape {tuple(weight.shape)}, and autograd another: {_USED_ELSEWHERE}"
        )


def _has_lost(weight: torch.nn.Parameter) -> bool:
    # The mark is that of Transformer Engine's weights, too. DDP's hook has emptied ``grad`` of all that W computes, and an
    # optimizer may have left ``main_grad`` itself there.
    lost = weight.grad is not None and hasattr(weight, _MARK)
    return lost and hasattr(weight, "main_grad") and weight.grad is not weight.main_grad


def fuse_if_recomputed(weight: torch.nn.Parameter) -> None:
    """Let ``runs_fused`` be true of a weight whenever its layer's activations are recomputed."""
    setattr(weight, _FUSED_IF_RECOMPUTED, True)


def runs_fused(*weights: torch.nn.Parameter) -> bool:
    """Asked in a forward: whether B is to compute the gradients of these weights as well, since their layer is recomputed."""
    within_a_backward = torch._C._current_graph_task_id() != -1
    return within_a_backward and any(hasattr(weight, _FUSED_IF_RECOMPUTED) for weight in weights)
