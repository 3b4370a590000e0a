"""The families that train, and names of schedules of which none does."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.planner.planning.plan_cache import FILE
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.names import STOCK
from megatron.pipeline.planner.schedule.families import AUTO

_PLANNED_ONLY = [name for name, family in families.FAMILIES.items() if family.placement(4, family.chunks).replicas > 1]
_TRAINED = [name for name in families.FAMILIES if name not in _PLANNED_ONLY]


def trained(ranks: int) -> list[str]:
    """The families that train on that many ranks."""
    return [name for name in _TRAINED if ranks > 1 or families.FAMILIES[name].chunks == 1]


def check_name(name: str, given: str = "--pipeline-schedule", others: Sequence[str] = (AUTO, STOCK)) -> None:
    """Refuse what is no schedule, or none that trains.

    Args:
        given: how the user has given it.
        others: names that stand for no family.

    Raises:
        ValueError: says which train, and which of them may be meant.
    """
    if name in _PLANNED_ONLY:
        better = "; dualpipe-v, its form on a V, holds every layer once" if name == "dualpipe" else ""
        raise ValueError(
            f"{given} {name} holds every layer on two ranks and is planned and simulated only{better}; those that "
            f"train are {', '.join(_TRAINED)}"
        )
    if name not in (*_TRAINED, *others) and not name.startswith(FILE):
        near = families.meant(name, [*_TRAINED, *others])
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join((*_TRAINED, *others))} and {FILE}PATH{near}")
