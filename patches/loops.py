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
    current = loop
    compat.wrap(compat.module("megatron.core.parallel_state"), "is_pipeline_first_stage", _is_pipeline_first)
    compat.wrap(parallel_state, "is_pipeline_last_stage", _is_pipeline_last)
    utils = compat.module(_UTILS)
    compat.wrap(utils, "is_vp_first_stage", _is_vp_first)
    compat.wrap(utils, "is_vp_last_stage", _is_vp_last)
    compat.wrap(utils, "is_pp_last_stage", _is_pp_last)
    compat.wrap(compat.module("megatron.core.transformer.transformer_config").TransformerConfig, "__post_init__", _checked)
    compat.wrap(compat.module(_FINALIZE), "finalize_model_grads", _finalize)


def _placement(chunks: int | None, ranks: int | None = None) -> Any:
    """The current loop's, if megatron-core would look for a stage elsewhere, and the model has as many chunks."""
    if current is None or not parallel_state.model_parallel_is_initialized():
        return None
    placement = current.placement(ranks or parallel_state.get_pipeline_model_parallel_world_size())
    return placement if placement is not None and placement.chunks == chunks else None


def _given_chunks() -> int | None:
    chunks: int | None = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return chunks


def _stage(placement: Any, vp_stage: int) -> int:
    number: int = placement.stage(parallel_state.get_pipeline_model_parallel_rank(), vp_stage)
    return number


def _is_pipeline_first(ask: Any, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    if ignore_virtual or vp_stage is None or (placement := _placement(_given_chunks())) is None:
        return bool(ask(ignore_virtual=ignore_virtual, vp_stage=vp_stage))
    return _stage(placement, vp_stage) == 0


def _is_pipeline_last(ask: Any, ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    if ignore_virtual or vp_stage is None or (placement := _placement(_given_chunks())) is None:
        return bool(ask(ignore_virtual=ignore_virtual, vp_stage=vp_stage))
    return bool(_stage(placement, vp_stage) == placement.last_stage)


def _is_vp_first(ask: Any, vp_stage: int, vp_size: int | None) -> bool:
    if (placement := _placement(vp_size)) is None:
        return bool(ask(vp_stage, vp_size))
    return _stage(placement, vp_stage) == 0


def _is_vp_last(ask: Any, vp_stage: int, vp_size: int | None) -> bool:
    if (placement := _placement(vp_size)) is None:
        return bool(ask(vp_stage, vp_size))
    return bool(_stage(placement, vp_stage) == placement.last_stage)


def _is_pp_last(ask: Any, pp_group: torch.distributed.ProcessGroup) -> bool:
    if ask(pp_group) or pp_group is None or (placement := _placement(_given_chunks(), pp_group.size())) is None:
        return bool(ask(pp_group))
    return bool(placement.home(placement.last_stage)[0] == pp_group.rank())


def _checked(check: Any, config: Any) -> None:
    if current is None:
        check(config)
    else:
        current.lay_out(config, check)


def _finalize(finalize: Any, chunks: Any, *rest: Any, **options: Any) -> None:
    boundary = None if _placement(_given_chunks()) is None else current.boundary
    (boundary.finalize_model_grads if boundary else finalize)(chunks, *rest, **options)
