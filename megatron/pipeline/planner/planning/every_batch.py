"""Plans of batches whose microbatches are of unequal lengths: their order, and which sequences go into which of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from megatron.pipeline.planner.planning.document import naming
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.loads import Extent, Load, loads_of
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.reading import parse_json, read_text
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate

if TYPE_CHECKING:
    from megatron.pipeline.planner.schedule.time.orders import Reordered

__all__ = ["Extent", "Load", "batch_fields", "loads_of", "ordered", "pack", "read_lengths"]

_EFFORT, _FEWEST = 150_000, 50  # passes that the orders which are tried may replay; orders at least
_VALUE = attrgetter("value")

Order: TypeAlias = tuple[int, ...]  # which of the given microbatches is in every place


def _with_loads(request: Request, change: Callable[[tuple[Load, ...]], tuple[Load, ...]]) -> Request:
    """The request with other loads."""

    def changed(costs: Costs) -> Costs:
        return costs.with_loads(change(costs.loads))

    if isinstance(request.costs, Costs):
        return replace(request, costs=changed(request.costs))
    return replace(request, costs=lambda placement: changed(request.costs_on(placement)))


def without_loads(request: Request) -> Request:
    """The same for equal microbatches."""
    return _with_loads(request, lambda _: ())


def read_lengths(path: str) -> list[list[int]]:
    """The lengths of the sequences of every microbatch, from a file: in every line those of one, or a list of lists in JSON.

    Raises:
        ValueError: the file cannot be read, or has something else; the message names the file.
    """

    def parse(text: str) -> list[list[int]]:
        lines = filter(str.strip, text.splitlines())
        found = parse_json(text, "lengths") if text.lstrip().startswith("[") else list(map(_line, lines))
        if not all(isinstance(row, list) for row in found):
            raise ValueError("expected a list of the lengths of its sequences for every microbatch, such as [[4096], [512, 700]]")
        loads_of(found)
        return found

    return naming(path, parse, read_text(path, "lengths of sequences"))


def _line(text: str) -> list[int]:
    try:
        return [int(number) for number in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{text[:40]!r}: expected the lengths of a microbatch's sequences, such as 512 700") from None


def batch_fields(planned: Planned, request: Request) -> dict[str, Any]:
    """The field ``batch`` in the JSON of a plan for unequal microbatches: its ``order`` of these, and what the family's order
    of passes for equal ones takes (``of_equal``) and holds by rank, with the microbatches in the order given.

    That it holds more than the limits is possible.
    """
    costs, equal = request.problem().costs, without_loads(request).plan().schedule
    value = planned.problem.value(simulate(equal, costs))
    return {"batch": {"order": planned.order, "of_equal": value, "of_equal_peaks": activation_peaks(equal, costs)}}


def ordered(request: Request) -> Planned:
    """The plan of a request in the best order of its microbatches that is found; never longer than in the order given, and the
    same on every machine. Its ``order`` says which of the given microbatches is in every place.

    Orders of the microbatches are tried on the order of passes for equal ones: the longest first, last or between, and changes
    to the best of these. Then it is planned anew for that order.

    Raises:
        ValueError: as ``Request.plan``; or microbatches are cut into slices, go through several models, or have passes of a
            spread vocabulary, copies, or overlapped passes, whose order is not changed.
    """
    from megatron.pipeline.planner.schedule.time.orders import Reordered  # compiles

    begin = time.perf_counter()
    given = tuple(range(request.microbatches))

    def made(order: Order, quick: bool = True) -> Planned:
        asked = _with_loads(request, lambda loads: tuple(loads[number] for number in order) if loads else ())
        return replace(replace(asked, quick=quick or request.quick).plan(), order=order)

    best = made(given)
    family = families.named(request.schedule)
    if request.memory_limit is None and family.plans_for_limits:
        request = replace(request, memory_limit=best.problem.limits)  # other orders hold no more than this one may
    schedule = best.schedule
    if not _can_be_ordered(best):
        raise ValueError(
            f"{schedule.name} with slices, several models, a spread vocabulary, offloading or overlapped passes keeps the order "
            "of its microbatches: leave these out, or the order as it is"
        )
    if best.problem.costs.loads:
        equal = without_loads(replace(request, quick=True)).plan().schedule if family.searches else schedule
        best = min(best, made(_best_order(Reordered(equal, best.problem), best.problem)), key=_VALUE)
    if not request.quick:
        best = min(best, *(made(order, quick=False) for order in dict.fromkeys((best.order or given, given))), key=_VALUE)
    return replace(best, seconds=time.perf_counter() - begin)


def _can_be_ordered(planned: Planned) -> bool:
    """Tell whether the microbatches of a plan are whole, and its passes those that ``Reordered`` replays."""
    from megatron.pipeline.planner.schedule.time.orders import can_be_compiled

    schedule = planned.schedule
    return schedule.splits == 1 and can_be_compiled(schedule)


def _best_order(replayed: Reordered, problem: Problem) -> Order:
    """The order in which a schedule takes shortest, of those sorted by length, with changes. One that holds n times the limits
    counts as n times as long."""
    generator, loads = random.Random(0), problem.costs.loads

    def value(order: Sequence[int]) -> float:
        lengths, excess = replayed.lengths(np.array(order))
        return problem.value(lengths) * excess

    rising = sorted(range(len(loads)), key=lambda number: sum(loads[number][:3]))
    between = [*rising[::2], *rising[1::2][::-1]]  # the longest
    middle = len(loads) // 2
    starts = [range(len(loads)), rising, rising[::-1], between, [*between[middle:], *between[:middle]]]
    least, best = min((value(order), tuple(order)) for order in starts)
    for _ in range(max(_FEWEST, _EFFORT // replayed.size)):
        changed, (one, other) = list(best), (generator.randrange(len(best)) for _ in range(2))
        if generator.random() < 0.5:
            changed[one], changed[other] = changed[other], changed[one]
        else:
            changed.insert(other, changed.pop(one))
        if (now := value(changed)) <= least:
            least, best = now, tuple(changed)
    return best


def pack(
    sequences: Sequence[int], tokens: int, ranks: int, replicas: int = 1, attention: float = 0.0, padded: bool = False
) -> list[list[list[int]]]:
    """Places of the sequences of a global batch: the microbatch of a data-parallel replica.

    No sequence is split, and all replicas have as many microbatches. Sequences are put, the longest first, where the least work
    is, or where they fit first, or so in the order given, into as few microbatches as hold them. The packing is taken whose
    slowest replica takes least: the work of its microbatches, and on the way of the longest one through the other pipeline ranks
    the wait for it. Of equal F, B and W; nothing is planned.

    Args:
        sequences: their lengths in tokens.
        tokens: that fit into a microbatch.
        ranks: of the pipeline.
        attention: see ``loads_of``.
        padded: every microbatch has ``tokens`` tokens, of which those that it lacks are a sequence of padding.

    Returns:
        By replica and microbatch, the places of its sequences in ``sequences``.

    Raises:
        ValueError: a sequence is longer than ``tokens``, or there are too few sequences for as many microbatches in all replicas.
    """

    def seconds(own: list[list[int]]) -> float:
        packed = [[sequences[place] for place in microbatch] for microbatch in own]
        lacks = [[tokens - sum(one)] if padded and sum(one) < tokens else [] for one in packed]
        work = _work([[*one, *more] for one, more in zip(packed, lacks, strict=True)], tokens, attention)
        return sum(work) + (ranks - 1) * max(work)

    return min(_packings(sequences, tokens, replicas, attention), key=lambda packed: max(map(seconds, packed)))


def _work(microbatches: Sequence[Sequence[int]], tokens: int, attention: float) -> list[float]:
    """F, B and W of each microbatch, in times of those of equal ones."""
    return [sum(load[:3]) for load in loads_of(microbatches, tokens, attention)]


def _packings(sequences: Sequence[int], tokens: int, replicas: int, attention: float) -> list[list[list[list[int]]]]:
    """Packings to choose from, at least one, with as few microbatches as hold the sequences."""
    if replicas < 1:
        raise ValueError(f"{replicas} replicas: give at least 1")
    work = _work([[length] for length in sequences], tokens, attention)
    fewest = -(-sum(sequences) // (tokens * replicas))
    for count in range(fewest, len(sequences) // replicas + 1):
        ways = ((True, True), (True, False), (False, False))
        made = (_bins(sequences, work, tokens, count * replicas, by_work, balanced) for by_work, balanced in ways)
        if found := [_shared(bins, work, replicas) for bins in made if bins]:
            return found
    raise ValueError(
        f"{len(sequences)} sequences of up to {max(sequences)} tokens do not go into microbatches of {tokens} tokens, as "
        f"many for each of {replicas} replicas: give room for {max(sequences)} tokens, and a sequence for each microbatch"
    )


def _bins(
    sequences: Sequence[int], work: Sequence[float], tokens: int, count: int, by_work: bool, balanced: bool
) -> list[list[int]] | None:
    """Sequences in a number of microbatches, none of them empty; None where they do not fit."""
    bins: list[list[int]] = [[] for _ in range(count)]
    room, done, empty = np.full(count, tokens), np.zeros(count), np.full(count, True)
    places = sorted(range(len(sequences)), key=lambda at: -work[at] if by_work else at)
    for left, place in zip(range(len(sequences), 0, -1), places, strict=True):
        fits = (room >= sequences[place]) & (empty if empty.sum() >= left else True)
        at = int(np.where(fits, done, np.inf).argmin() if balanced else fits.argmax())
        if not fits[at]:
            return None
        bins[at].append(place)
        room[at] -= sequences[place]
        done[at] += work[place]
        empty[at] = False
    return bins


def _shared(bins: list[list[int]], work: Sequence[float], replicas: int) -> list[list[list[int]]]:
    """As many microbatches for every replica, the longest first to the one that has the least work."""
    done, taken = [0.0] * replicas, [list[int]() for _ in range(replicas)]
    seconds = [sum(work[place] for place in one) for one in bins]
    for number in sorted(range(len(bins)), key=lambda number: -seconds[number]):
        at = min((at for at in range(replicas) if len(taken[at]) < len(bins) // replicas), key=done.__getitem__)
        taken[at].append(number)
        done[at] += seconds[number]
    return [[sorted(bins[number]) for number in sorted(own)] for own in taken]
