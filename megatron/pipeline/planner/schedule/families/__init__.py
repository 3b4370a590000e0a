"""The families of schedules, by name. A family is one file with one ``plan`` function; adding one is adding it here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from megatron.pipeline.planner.schedule.core.names import FILE, STOCK, counted
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import ChunksDoNotFit
from megatron.pipeline.planner.schedule.families import dualpipe_v, gis, interleaved, seq_1f1b, v, zb_auto, zb_h1
from megatron.pipeline.planner.schedule.families.family import Family

__all__ = ["AUTO", "FAMILIES", "Family", "meant", "named", "placement"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        seq_1f1b.FAMILY_1F1B,
        interleaved.FAMILY,
        gis.FAMILY,
        gis.FAMILY_HALF,
        seq_1f1b.FAMILY,
        zb_h1.FAMILY,
        zb_h1.FAMILY_H2,
        zb_auto.FAMILY,
        *v.FAMILIES,
        dualpipe_v.FAMILY,
    )
}
_GONE = ("dualpipe", "chimera")
AUTO = "auto"  # in place of a family's name: the best of all of them (see ``planner/planning/choose.py``)


def named(name: str) -> Family:
    """The family of a name.

    Raises:
        ValueError: the name is unknown; the message says which one it may be meant to be.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(FAMILIES)}{meant(name, [*FAMILIES, AUTO])}")
    return FAMILIES[name]


def check(name: str, others: Sequence[str] = (AUTO, STOCK)) -> None:
    """Refuse what is neither a family's name nor a file's.

    Args:
        others: names that stand for no family.

    Raises:
        ValueError: says which there are, and which of them may be meant.
    """
    known = (*FAMILIES, *others)
    if name not in known and not name.startswith(FILE):
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(known)} and {FILE}PATH{meant(name, known)}")


def trained(ranks: int) -> list[str]:
    """The families that train on that many ranks."""
    return [name for name in FAMILIES if ranks > 1 or FAMILIES[name].chunks == 1]


def facts(name: str) -> dict[str, Any]:
    """Facts of a schedule by its name, for the table of combinations; a file's slices are known once it is read."""
    family = FAMILIES.get(name)
    return {
        "pipeline_schedule": name,
        "ours": name != STOCK,
        "grouped": name == STOCK or bool(family and family.grouped),
        "grouping": ", ".join(known for known, one in FAMILIES.items() if one.grouped),
        "searches": bool(family and family.searches),
        "searching": ", ".join(known for known, one in FAMILIES.items() if one.searches),
    } | ({"splits": family.splits} if family else {})


def meant(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: which of the known ones it may be meant to be, if any is near."""
    if name.lower() in _GONE:
        return f"; {name}, which held every stage twice, is gone: take dualpipe-v"
    near = difflib.get_close_matches(name.lower(), list(known))
    return f"; did you mean {' or '.join(near)}?" if near else ""


def placement(name: str, ranks: int, chunks: int | None = None) -> Placement:
    """The placement that a family uses: what per-stage costs must be given for.

    Raises:
        ChunksDoNotFit: the family does not come with that many chunks.
        ValueError: the name is unknown, or there is no rank.
    """
    family = named(name)
    if ranks < 1:
        raise ValueError(f"a pipeline needs at least 1 rank, got {ranks}")
    if chunks is None:
        chunks = family.chunks
    if chunks != family.chunks and not family.any_chunks:
        raise ChunksDoNotFit(f"{name} has {counted(family.chunks, 'chunk')} per rank, got {chunks}")
    if chunks < family.least_chunks:
        raise ChunksDoNotFit(f"{name} needs at least {counted(family.least_chunks, 'chunk')} per rank, got {chunks}")
    return family.placement(ranks, chunks)
