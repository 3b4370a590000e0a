"""The families that train on some ranks, and names that are no schedule's."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.planner.planning.plan_cache import FILE
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.names import STOCK
from megatron.pipeline.planner.schedule.families import AUTO


def trained(ranks: int) -> list[str]:
    """The families that train on that many ranks."""
    return [name for name in families.FAMILIES if ranks > 1 or families.FAMILIES[name].chunks == 1]


def check_name(name: str, others: Sequence[str] = (AUTO, STOCK)) -> None:
    """Refuse what is no schedule.

    Args:
        others: names that stand for no family.

    Raises:
        ValueError: says which there are, and which of them may be meant.
    """
    known = (*families.FAMILIES, *others)
    if name not in known and not name.startswith(FILE):
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(known)} and {FILE}PATH{families.meant(name, known)}")
