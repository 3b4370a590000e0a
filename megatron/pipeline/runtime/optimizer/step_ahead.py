"""An optimizer step that is taken before it is known whether gradients are finite and need no clipping.

megatron-core's optimizers all-reduce two numbers over all stages before they step: whether a gradient is not finite, and the
norm. Both are started here and not waited for. Stepping ahead assumes that gradients are finite and small enough; once both
numbers are there, ``resolve`` accepts the step, or rolls it back from a copy and does what upstream would have done. The
reductions are upstream's own, of the same numbers over the same groups, so the norm has the same bits as upstream's.
``patches/compat.py`` lists the parts of upstream's step that are called here one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.distributed.reduction import Reduction
from megatron.pipeline.runtime.optimizer.snapshot import Keep, Snapshot


@dataclass(frozen=True)
class Outcome:
    """Result that ``optimizer.step()`` would have had, and whether the step ahead was another one.

    Attributes:
        successful: whether there was a step; there is none where a scaled gradient is not finite.
        grad_norm: before clipping; None without a step.
        rolled_back: whether the parameters differ from those that the step ahead left.
    """

    successful: bool
    grad_norm: float | None
    rolled_back: bool


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of a chain, in the order in which they step: dense parameters, then experts."""
    return list(optimizer.chained_optimizers) if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def snapshot_of(optimizer: MegatronOptimizer, keep: Keep = Keep.DEVICE) -> Snapshot | None:
    """A copy of what a step overwrites; None where no step is ever rolled back: without clipping and without a loss scale."""
    parts = parts_of(optimizer)
    if not any(part.config.clip_grad > 0 or _scaler(part) for part in parts):
        return None
    return Snapshot([part.optimizer for part in parts if not part.is_stub_optimizer], keep)


def clips(limit: float, norm: float) -> bool:
    """Tell whether megatron-core scales gradients of that norm; a limit of 0 is none."""
    return limit > 0 and limit / (norm + 1e-6) < 1


class StepAhead:
    """One step of an optimizer, taken on construction. Gradients must stay as they are until it is resolved.

    Args:
        optimizer: megatron-core's, with float32 or mixed precision, distributed or not, or a chain of such.
        snapshot: ``snapshot_of`` the optimizer; it is taken now if it has not been taken since the last step.
    """

    @torch.no_grad()
    def __init__(self, optimizer: MegatronOptimizer, snapshot: Snapshot | None) -> None:
        self._optimizer, self._snapshot = optimizer, snapshot
        self._parts = parts_of(optimizer)
        self._infinite = [_prepare(part) for part in self._parts]
        self._norms = _start_norms(self._parts)
        # The scale of the next losses is needed before the validation; a copy is cheap.
        self._scales = [scaler.state_dict() if (scaler := _scaler(part)) else None for part in self._parts]
        for part in self._parts:
            if scaler := _scaler(part):
                scaler.update(False)
        if snapshot is not None:
            if not snapshot.taken:
                snapshot.take()
            snapshot.ready()
        self._stepped = optimizer.step_with_ready_grads()

    @torch.no_grad()
    def resolve(self) -> Outcome:
        """Wait for both numbers, and bring optimizer and parameters into the state that upstream's ``step`` would have left."""
        infinite = [bool(reduction and reduction.wait()[0] > 0) for reduction in self._infinite]
        norms = [reduction.wait()[0] ** 0.5 for reduction in self._norms]
        if any(infinite):
            self._roll_back()
            for part, before, overflowed in zip(self._parts, self._scales, infinite, strict=True):
                if overflowed:
                    part.grad_scaler.load_state_dict(before)
                    part.grad_scaler.update(True)
            self._show_parameters()
            return Outcome(successful=False, grad_norm=None, rolled_back=True)
        # As megatron-core combines the norms of a chain, and decides.
        norm = norms[0] if len(norms) == 1 else math.sqrt(sum([one**2 for one in norms]))
        clipped = [part for part in self._parts if clips(part.config.clip_grad, norm)]
        if clipped:
            self._roll_back()
            for part in clipped:
                if parameters := part.get_parameters():
                    clip_grads.clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, norm)
            return Outcome(self._optimizer.step_with_ready_grads(), norm, rolled_back=True)
        if self._snapshot is not None:
            self._snapshot.release()
        return Outcome(self._stepped, norm, rolled_back=False)

    def _roll_back(self) -> None:
        assert self._snapshot is not None, "snapshot_of makes one where a step can be rolled back"
        for chunk in _distributed_chunks(self._parts, gathering=True):
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.param_gather_handle is not None:  # it still writes parameters
                    group.param_gather_handle.wait()
                    group.param_gather_handle = None
                group.param_gather_dispatched = False
        self._snapshot.restore()
        self._snapshot.release()

    def _show_parameters(self) -> None:
        """Bring the optimizer's parameters into the model, where no step does."""
        for part in self._parts:
            if isinstance(part, MixedPrecisionOptimizer) and not part.is_stub_optimizer:
                part._copy_main_params_to_model_params()
        for chunk in _distributed_chunks(self._parts, gathering=False):
            chunk.start_param_sync()


def _prepare(part: Any) -> Reduction | None:
    """megatron-core's ``prepare_grads``, which does not wait: whether a gradient is not finite is being reduced."""
    scaler = _scaler(part)
    if scaler is None:
        part.prepare_grads()  # without a scale it looks at nothing
        return None
    part.found_inf.fill_(0.0)
    if not part.is_stub_optimizer:
        part._copy_model_grads_to_main_grads()
        gradients = part._collect_main_grad_data_for_unscaling()
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, part.found_inf, scaler.inv_scale)
    return Reduction(part.found_inf, torch.distributed.ReduceOp.MAX, part.get_grad_stats_parallel_group())


def _start_norms(parts: list[Any]) -> list[Reduction]:
    """The squared norm of the gradients over all stages, or of each part where they are spread over different ranks."""
    groups = [part.get_grad_stats_parallel_group() for part in parts]
    gradients = [part.get_grads_for_grad_norm() for part in parts]
    if all(group == groups[0] for group in groups):
        groups, gradients = groups[:1], [list(chain.from_iterable(gradients))]
    return [
        Reduction(_squared(mine), torch.distributed.ReduceOp.SUM, group) for mine, group in zip(gradients, groups, strict=True)
    ]


def _squared(gradients: list[torch.Tensor]) -> torch.Tensor:
    """This rank's part of the squared norm, of one element, as megatron-core's ``get_grad_norm_fp32`` computes it."""
    device = this_device()
    if not gradients:
        return torch.zeros(1, dtype=torch.float32, device=device)
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    squared: torch.Tensor = norm**2.0
    return squared


def _scaler(part: Any) -> Any:
    return getattr(part, "grad_scaler", None)


def _distributed_chunks(parts: Iterable[Any], gathering: bool) -> list[Any]:
    """The model chunks of distributed optimizers whose parameters arrive during forwards, or of those whose do not."""
    distributed = [part for part in parts if isinstance(part, DistributedOptimizer)]
    return [
        chunk for part in distributed if bool(part.ddp_config.overlap_param_gather) is gathering for chunk in part.model_chunks
    ]
