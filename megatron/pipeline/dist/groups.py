"""Process groups in addition to those of megatron-core's parallel_state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def new_group(ranks: Sequence[int], **options: Any) -> torch.distributed.ProcessGroup | None:
    """A group of these ranks, while other ranks make other groups.

    Collective over the world, like ``torch.distributed.new_group``, but every rank names only the group that it is a member
    of (or an empty one). An all-gather of these lists tells every rank which groups to make.

    Args:
        ranks: global ranks, this one among them, the same on all of them; empty for none.
        options: of ``torch.distributed.new_group``.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, tuple(ranks))
    mine = None
    for wanted in sorted(set(filter(None, everyone))):
        group = torch.distributed.new_group(list(wanted), **options)
        if wanted == tuple(ranks):
            mine = group
    return mine
