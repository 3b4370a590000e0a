"""Plans for batches of unequal microbatches without running them: what they gain, how near the bound they are, and what planning
and packing take. Lengths are drawn from ``lengths.json``, whole tails included:

    python benchmarks/lengths.py plans --ranks 8 --microbatches 32
    python benchmarks/lengths.py packing --ranks 8 --replicas 4
    python benchmarks/lengths.py planning

Times are those of plans for F 10, B 12 and W 8 ms of the mean microbatch; planning is given in CPU time of one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

from common import print_table
from every_batch import LENGTHS, batches

from megatron.pipeline.planning import Request, loads_of, ordered, pack
from megatron.pipeline.planning.aside import plan_batch
from megatron.pipeline.planning.every_batch import pack_at_once
from megatron.pipeline.planning.no_gc import without_gc
from megatron.pipeline.planning.plan_cache import PlanCache
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import uniform
from megatron.pipeline.schedule.core.loads import Load
from megatron.pipeline.schedule.core.problem import Objective

ATTENTION, TOKENS = 0.1, 8192
Packed = list[list[list[int]]]


def request(name: str, ranks: int, microbatches: int, loads: Sequence[Load] = ()) -> Request:
    costs = replace(uniform(families.placement(name, ranks), 10, 12, 8), loads=tuple(loads))
    return Request(name, ranks, microbatches, costs, objective=Objective.MAKESPAN)


def plans(options: argparse.Namespace) -> None:
    """By how much plans for every batch are shorter than 1F1B and than one order for all, and how far above the bound."""
    rows = []
    for lengths in LENGTHS:
        ratios: dict[str, list[float]] = {}
        for batch in islice(batches(lengths, options.microbatches, TOKENS, options.longest, ATTENTION), options.batches):
            loads = tuple(microbatch.load for microbatch in batch)
            stock = request("1f1b", options.ranks, options.microbatches, loads).plan().value
            ratios.setdefault("longest", []).append(max(max(one.lengths) for one in batch))
            for name in ("zb-auto", "zb-v"):
                asked = PlanCache(request(name, options.ranks, options.microbatches)).of_batch(len(loads), loads)
                given, free = plan_batch(asked), plan_batch(asked, any_order=True).planned
                ratios.setdefault(f"{name} once", []).append(stock / given.of_equal)
                ratios.setdefault(f"{name} every batch", []).append(stock / given.planned.value)
                ratios.setdefault(f"{name} any order", []).append(stock / free.value)
                ratios.setdefault(f"{name} over bound", []).append(given.planned.value / given.planned.bound)
        longest = max(ratios.pop("longest"))
        rows.append([lengths, f"{longest:.0f}", *(f"{statistics.mean(each):.3f}" for each in ratios.values())])
    print_table(f"p = {options.ranks}, m = {options.microbatches}: times as fast as 1F1B", ["lengths", "longest", *ratios], rows)


def in_order(lengths: Sequence[int], tokens: int, replicas: int) -> Packed:
    """As megatron-core's scheduler of packed sequences on its main branch: each into the last microbatch while it fits; the
    last ones get microbatches of their own until replicas have as many, to which microbatches go in turn."""
    bins: list[list[int]] = [[]]
    for place, length in enumerate(lengths):
        if sum(lengths[at] for at in bins[-1]) + length > tokens:
            bins.append([])
        bins[-1].append(place)
    at = len(bins) - 1
    while len(bins) % replicas:
        if len(bins[at]) > 1:
            bins.append([bins[at].pop()])
        else:
            at -= 1
    return [bins[replica::replicas] for replica in range(replicas)]


def first_fit(lengths: Sequence[int], tokens: int, replicas: int) -> Packed:
    """The longest first, each into the first microbatch that has room; then as above."""
    bins: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        own = next((one for one in bins if sum(lengths[at] for at in one) + lengths[place] <= tokens), None)
        if own is None:
            bins.append(own := [])
        own.append(place)
    while len(bins) % replicas:
        bins.append([max(bins, key=len).pop()])
    return [bins[replica::replicas] for replica in range(replicas)]


def packing(options: argparse.Namespace) -> None:
    """The planned time of the slowest replica, over that of megatron-core's packing."""
    rows = []
    for lengths in LENGTHS:
        asked = request("zb-v", options.ranks, 1)
        ratios: dict[str, list[float]] = {}
        seconds: dict[str, list[float]] = {}
        count = options.microbatches * options.replicas
        for batch in islice(batches(lengths, count, options.tokens, options.tokens, ATTENTION), options.batches):
            given = list(chain.from_iterable(microbatch.lengths for microbatch in batch))
            sizes = options.tokens, options.replicas
            ways: dict[str, Callable[[], Packed]] = {
                "megatron-core": partial(in_order, given, *sizes),
                "first fit": partial(first_fit, given, *sizes),
                "pack_at_once": partial(pack_at_once, given, options.tokens, options.ranks, options.replicas, ATTENTION),
                "pack": partial(pack, given, options.tokens, asked, options.replicas, ATTENTION),
            }
            found = {}
            for name, way in ways.items():
                begin = time.process_time()
                packed = way()
                seconds.setdefault(name, []).append(time.process_time() - begin)
                found[name] = max(_planned(own, given, options) for own in packed)
            for name, value in found.items():
                ratios.setdefault(name, []).append(value / found["megatron-core"])
        rows.append(
            [
                lengths,
                *(f"{statistics.mean(ratios[name]):.3f} ({1e3 * statistics.mean(seconds[name]):.0f} ms)" for name in ratios),
            ]
        )
    title = f"p = {options.ranks}, {options.replicas} replicas, {options.microbatches} microbatches of {options.tokens} tokens"
    print_table(f"{title}: time of the slowest replica over megatron-core's packing", ["lengths", *ratios], rows)


def _planned(own: list[list[int]], lengths: Sequence[int], options: argparse.Namespace) -> float:
    loads = loads_of([[lengths[place] for place in microbatch] for microbatch in own], options.tokens, ATTENTION)
    return replace(request("zb-v", options.ranks, len(own), loads), quick=True).plan().value


def planning(options: argparse.Namespace) -> None:
    """CPU time of one plan: in the order given, in any, and with programs, proofs and the message to all ranks."""
    rows = []
    for ranks, microbatches in ((4, 8), (8, 32), (8, 64), (16, 64)):
        for name in ("zb-auto", "zb-v"):
            cache = PlanCache(request(name, ranks, microbatches))
            drawn = islice(batches("roll-outs", microbatches, TOKENS, options.longest, ATTENTION), options.batches + 1)
            asked = [cache.of_batch(microbatches, [microbatch.load for microbatch in batch]) for batch in drawn]
            taken = []
            for way in (
                Request.plan,
                ordered,
                lambda one: plan_batch(one).packed(),
                lambda one: plan_batch(one, any_order=True).packed(),
            ):
                each = []
                for one in asked:  # the first of which compiles, or plans for equal microbatches
                    with without_gc():
                        begin = time.process_time()
                        way(one)
                        each.append(time.process_time() - begin)
                taken.append(f"{1e3 * statistics.median(each[1:]):.0f}")
            rows.append([f"{ranks}, {microbatches}", name, *taken])
    columns = ["p, m", "schedule", "plan, ms", "any order", "plan, proved and packed", "any order, proved and packed"]
    print_table("CPU time of a plan for one batch", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plans", "packing", "planning"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32768, help="that fit into a packed microbatch")
    parser.add_argument("--longest", type=int, default=262144, help="sequences are cut to as many tokens")
    parser.add_argument("--batches", type=int, default=10)
    options = parser.parse_args()
    {"plans": plans, "packing": packing, "planning": planning}[options.what](options)


if __name__ == "__main__":
    main()
