"""The families of schedules, by name. A family is one file with one ``plan`` function; adding one is adding it here."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.schedule.costs import Costs, uniform
from megatron.pipeline.schedule.families import one_f_one_b, zb_h1, zb_h2
from megatron.pipeline.schedule.families.family import Family
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import check_stages
from megatron.pipeline.schedule.verify import memory_stays_within, per_rank

__all__ = ["FAMILIES", "Family", "placement", "plan"]

FAMILIES: dict[str, Family] = {family.name: family for family in (one_f_one_b.FAMILY, zb_h1.FAMILY, zb_h2.FAMILY)}


def plan(
    name: str,
    ranks: int,
    microbatches: int,
    costs: Costs | None = None,
    chunks: int | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> Schedule:
    """The schedule of a family.

    Args:
        name: one of ``FAMILIES``.
        ranks, microbatches: at least 1 each.
        costs: what passes take on every stage of ``placement(name, ranks, chunks)``; by default every pass of a rank's
            whole share takes 1, and memory is counted in microbatches.
        chunks: chunks per rank; by default the family's own number.
        memory_limit: the most activation memory a rank may hold, in the costs' unit; one number, or one per rank.

    Raises:
        ValueError: the name is unknown, a number is out of range, or the schedule would hold more than the limit.
    """
    home = placement(name, ranks, chunks)
    if microbatches < 1:
        raise ValueError(f"a schedule needs at least 1 microbatch, got {microbatches}")
    costs = costs or uniform(home)
    check_stages(home, costs)
    limits = None if memory_limit is None else per_rank(memory_limit, ranks)
    schedule = Schedule(name, home, microbatches, FAMILIES[name].plan(home, microbatches, costs, limits))
    if limits is not None:
        memory_stays_within(schedule, costs, limits)
    return schedule


def placement(name: str, ranks: int, chunks: int | None = None) -> Placement:
    """The placement that a family uses: what per-stage costs must be given for.

    Raises:
        ValueError: the name is unknown, or the family does not come with that many ranks or chunks.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    if ranks < 1:
        raise ValueError(f"a pipeline needs at least 1 rank, got {ranks}")
    if chunks is None:
        chunks = family.chunks
    if chunks != family.chunks and not family.any_chunks:
        raise ValueError(f"{name} has {family.chunks} chunk(s) per rank, got {chunks}; leave the number of chunks out")
    if chunks < 1:
        raise ValueError(f"{name} needs at least 1 chunk per rank, got {chunks}")
    return family.placement(ranks, chunks)
