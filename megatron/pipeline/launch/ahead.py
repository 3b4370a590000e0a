"""``--post-validation`` within Megatron-LM's own loop.

Its ``train_step`` calls ``optimizer.step()``. Ours returns once the step stands, in the middle of the next iteration, so all that
the loop does then (the learning rate, its log, checkpoints, the decision to exit) is upstream's, of what was accepted. Its
collectives cost little there, where all ranks have just met; those of every iteration are replaced, as the host would wait.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.pipeline.patches import moe_utils, training_training

from megatron.pipeline.distributed.device import to_device
from megatron.pipeline.distributed.reduction import Reduction
from megatron.pipeline.flags.config import microbatch_counts
from megatron.pipeline.runtime.optimizer.post_validation import PostValidation, TakenStep
from megatron.pipeline.runtime.optimizer.snapshot import Keep
from megatron.pipeline.runtime.optimizer.step_ahead import parts_of
from megatron.pipeline.runtime.pipeline import Pipeline

# Upstream saves these of an iteration at its end, and watches all of its passes for them.
_OF_PASSES = [f"save_{what}_interval" for what in ("wgrads", "dgrads", "activations", "tokens_per_expert")]
_BETWEEN = (
    "exit_interval",
    "eval_interval",
    "check_weight_hash_across_dp_replicas_interval",
    "adlr_autoresume_interval",
    "gpu_sniff_test_interval",
)
_SAVES = ("save_interval", "non_persistent_save_interval")


def follows_at_once(args: Any, done: int) -> bool:
    """Tell whether Megatron-LM's loop does nothing but log between two iterations.

    Args:
        args: upstream's.
        done: number of iterations before the second one.
    """

    def at(*names: str) -> bool:
        return any(interval and done % interval == 0 for interval in (getattr(args, name, None) for name in names))

    singles = {args.train_iters, *(getattr(args, "phase_transition_iterations", None) or ())}
    if getattr(args, "profile", False):
        singles |= {args.profile_step_start, args.profile_step_end}
    # Counted from 0 up to 0.18, and from 1 since.
    skipped = {done, done + 1} & set(getattr(args, "iterations_to_skip", None) or ())
    watched = any(interval and (done + 1) % interval == 0 for interval in (getattr(args, name, None) for name in _OF_PASSES))
    return not (done in singles or skipped or watched or at(*_BETWEEN, *(_SAVES if args.save else ())))


class StepsAhead:
    """The optimizer's steps in one run of ``megatron.training.training.train``.

    Args:
        args: the flags as our own program has them.
        training: the module.
        measures: tells whether iterations are measured, to plan again: each is then on its own.

    Attributes:
        taken: the step of the last iteration that ended, or None before it.
    """

    def __init__(self, args: Namespace, training: Any, pipeline: Pipeline, optimizer: Any, measures: Callable[[], bool]) -> None:
        self._training, self._pipeline, self._measures = training, pipeline, measures
        self._steps = PostValidation(pipeline, optimizer, args.steps.when, Keep(args.steps.copy))
        self._most = max(microbatch_counts(args))  # fewer ramp up: upstream saves where there are more
        self._call: Mapping[str, Any] = {}
        self._later: Any = None  # losses that forwards which ran ahead have added up for logs
        self._stood = False  # upstream gathers weights ahead only once a step has been taken
        self.taken: TakenStep | None = None
        stubs = to_device([float(any(part.is_stub_optimizer for part in parts_of(optimizer)))])
        self._all_know = not any(Reduction(stubs, torch.distributed.ReduceOp.MAX).wait())
        training_training.step_with(optimizer, self._step, None if args.fp16 else torch.ones(1))

    def begins(self, call: Mapping[str, Any]) -> None:
        """An iteration is about to be called, or to go on."""
        self._call = call
        if self._later is not None:
            _exchange(self._later)
            self._later = None

    def _step(self) -> tuple[bool, float | None, None]:
        """In place of ``optimizer.step``."""
        args = self._training.get_args()
        late = training_training.is_late(self._training, args, time.time())
        stops = to_device([float(training_training.is_told_to_stop(self._training, args)), float(late)])
        full = get_num_microbatches() == self._most
        follows = self._stood and full and not self._measures() and follows_at_once(args, args.curr_iteration + 1)
        mine = _exchange(None)
        self.taken = taken = self._steps.step(self._call if follows else None, stops)
        self._later = _exchange(mine)
        if taken.how == "synchronous" or taken.anew:
            self._later = None
        self._stood |= taken.successful
        return taken.successful, taken.grad_norm, None

    @property
    def ahead(self) -> bool:
        """Tell whether all ranks know what became of the last step, without waiting for each other."""
        return self.taken is not None and self.taken.how != "synchronous"

    def agreed(self, original: Callable[..., Any], value: Any, *rest: Any, **options: Any) -> Any:
        """A number that upstream reduces over the ranks of a model, to give it to those without an optimizer."""
        if not (self.ahead and self._all_know):
            return original(value, *rest, **options)
        return value if value is None or isinstance(value, bool) else torch.tensor(value, dtype=torch.float32).item()

    def decide_exit(self, original: Callable[..., bool], *rest: Any, **options: Any) -> bool:
        """Tell whether to save or to exit now: never with a step ahead, unless a signal or the clock said so on any rank."""
        if self.taken and self.ahead and not any(self.taken.stops):
            return False
        return original(*rest, **options)


def _exchange(other: Any) -> Any:
    """Upstream's sums of auxiliary losses and of multi-token prediction's, for logs; it goes on with others, or without any."""
    auxiliary, tokens = other or (None, {})
    further = MTPLossLoggingHelper.tracker
    before = moe_utils.exchange_auxiliary_losses(auxiliary), dict(further)
    further.clear()
    further.update(tokens)
    return before
