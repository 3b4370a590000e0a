"""Functions that older releases of megatron-core lack are given to them here, so that all else is written for the newest one
alone.

``optimizer.MegatronOptimizer.get_grads_for_grad_norm`` (0.19) is called ``get_main_grads_for_grad_norm`` before.
``utils.get_batch_on_this_cp_rank``: ``is_hybrid_cp`` (0.18) is False.

What is there already is left as it is, so that nothing here asks for a version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Add what is missing. To be called before the other patches, which look for it."""
    from megatron.core import utils
    from megatron.core.optimizer import MegatronOptimizer

    if not hasattr(MegatronOptimizer, "get_grads_for_grad_norm"):
        MegatronOptimizer.get_grads_for_grad_norm = MegatronOptimizer.get_main_grads_for_grad_norm
    if "is_hybrid_cp" not in inspect.signature(utils.get_batch_on_this_cp_rank).parameters:
        utils.get_batch_on_this_cp_rank = _without_hybrid(utils.get_batch_on_this_cp_rank)


def _without_hybrid(get_batch: Callable[..., Any]) -> Callable[..., Any]:
    def get_batch_on_this_cp_rank(batch: Any, cp_group: Any = None, *, is_hybrid_cp: bool = False) -> Any:
        assert not is_hybrid_cp, "refused: hybrid context parallelism relies on the order of megatron-core's own schedules"
        return get_batch(batch, cp_group)

    return get_batch_on_this_cp_rank
