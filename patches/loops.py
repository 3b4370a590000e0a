"""The loop that has called ``megatron.pipeline.install``: patches ask it where upstream's functions are called.

``parallel_state.is_pipeline_first_stage``, ``is_pipeline_last_stage`` of a chunk, and ``pipeline_parallel.utils``'
``is_vp_first_stage``, ``is_vp_last_stage``, ``is_pp_last_stage``: builders and loops ask them which chunk embeds, which has the
loss, and which rank reports. Upstream knows interleaved placements only. Of a chunk they answer by the placement; without one
``is_pp_last_stage`` is true of the last rank, where loops look for reports, and of the rank with the last stage, so that "the
last chunk of the last rank", as loops ask, is the last stage.
``TransformerConfig.__post_init__``: the layout of a V's layers is added once upstream has checked the rest.
``finalize_model_grads``: the two ends of a V are on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import compat

_UTILS = "megatron.core.pipeline_parallel.utils"
_FINALIZE = "megatron.core.distributed.finalize_model_grads"
finalize_upstream = compat.module(_FINALIZE).finalize_model_grads

current: Any = None  # ``session/own_loop.py`` ``OwnLoop``


def install(loop: Any) -> None:
    """Have upstream's functions ask a loop from here on; None: they are as they were."""
    global current
    if current not in (None, loop):
        current.close()
    current = loop
    state, utils = compat.module("megatron.core.parallel_state"), compat.module(_UTILS)
    for end in ("first", "last"):
        compat.wrap(state, f"is_pipeline_{end}_stage", _of_pipeline(end))
        compat.wrap(utils, f"is_vp_{end}_stage", _of_chunk(end))
    compat.wrap(utils, "is_pp_last_stage", _is_last_rank)
    compat.wrap(compat.module("megatron.core.transformer.transformer_config").TransformerConfig, "__post_init__", _checked)
    compat.wrap(compat.module(_FINALIZE), "finalize_model_grads", _finalize)


def follow(config: Any) -> None:
    """Have a configuration call ``finalize_model_grads`` as it is now, where a loop took upstream's before."""
    if config.finalize_model_grads_func is finalize_upstream:
        config.finalize_model_grads_func = compat.module(_FINALIZE).finalize_model_grads


def _placement(chunks: int | None, ranks: int | None = None) -> Any:
    """The current loop's for a model with that many chunks, where megatron-core would look for a stage elsewhere."""
    if current is None or not parallel_state.model_parallel_is_initialized():
        return None
    return current.placement(ranks or parallel_state.get_pipeline_model_parallel_world_size(), chunks)


def _answer(end: str, vp_stage: int, chunks: int | None) -> bool | None:
    """Tell if a chunk of this rank is the ``first`` or the ``last`` stage by the placement; None where upstream is right."""
    if (placement := _placement(chunks)) is None:
        return None
    stage = placement.stage(parallel_state.get_pipeline_model_parallel_rank(), vp_stage)
    return bool(placement.is_first(stage) if end == "first" else placement.is_last(stage))


def _of_pipeline(end: str) -> Callable[..., bool]:
    def tell(ask: Any, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        known = None if ignore_virtual or vp_stage is None else _answer(end, vp_stage, _chunks())
        return bool(ask(ignore_virtual=ignore_virtual, vp_stage=vp_stage)) if known is None else known

    return tell


def _of_chunk(end: str) -> Callable[..., bool]:
    def tell(ask: Any, vp_stage: int, vp_size: int | None) -> bool:
        known = _answer(end, vp_stage, vp_size)
        return bool(ask(vp_stage, vp_size)) if known is None else known

    return tell


def _is_last_rank(ask: Any, pp_group: torch.distributed.ProcessGroup) -> bool:
    if ask(pp_group) or pp_group is None or (placement := _placement(_chunks(), pp_group.size())) is None:
        return bool(ask(pp_group))
    return bool(placement.home(placement.last_stage)[0] == pp_group.rank())


def _chunks() -> int | None:
    chunks: int | None = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return chunks


def _checked(check: Any, config: Any) -> None:
    if current is None:
        check(config)
    else:
        current.lay_out(config, check)


def _finalize(finalize: Any, chunks: Any, *rest: Any, **options: Any) -> None:
    if (placement := _placement(_chunks())) is not None:
        finalize = current.boundary(placement).finalize_model_grads
    finalize(chunks, *rest, **options)
