"""The smallest changes with which a model fits that fits in no layout, one of each kind."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from megatron.pipeline.planner import device, rank_memory
from megatron.pipeline.tune.iteration import Infeasible, Result, evaluate
from megatron.pipeline.tune.layouts import Layouts

_MOST_DOUBLINGS, _MOST_LEANER = 4, 20
_SLACK = 1 + 1e-6  # of memory: sums in another order


def smallest_changes(layouts: Layouts) -> list[str]:
    """The least number of GPUs, the longest sequence and the smallest GPU with which something fits, in words."""
    cluster, base = layouts.cluster, layouts.base
    found = []
    for gpus in (cluster.gpus << doubling for doubling in range(1, _MOST_DOUBLINGS + 1)):
        per_node = cluster.per_node if cluster.gpus >= cluster.per_node else min(8, gpus)
        if fits(replace_cluster(layouts, gpus=gpus, per_node=per_node)):
            found.append(f"{gpus} GPUs instead of {cluster.gpus}")
            break
    for length in (base.seq_length >> halving for halving in range(1, _MOST_DOUBLINGS + 1)):
        if length and fits(replace(layouts, base=base | {"seq_length": length})):
            found.append(f"--seq-length {length} instead of {base.seq_length}")
            break
    for other in sorted(map(device.named, device.shipped()), key=lambda one: one.memory):
        enough = replace(other, memory=rank_memory.usable(other.memory))
        links_too = other.within.bandwidth >= cluster.device.within.bandwidth  # no card without NVLink in place of one with it
        if links_too and enough.memory > cluster.device.memory and fits(replace_cluster(layouts, device=enough)):
            found.append(f"--gpu {other.name}")
            break
    return found


def least_needed(layouts: Layouts, misfits: Sequence[Infeasible]) -> Infeasible:
    """The candidate that needs the least memory of those that do not fit, with all that it needs.

    A search does not plan candidates that cannot fit, so their ``needs`` may be too low, and it does not try to save memory
    there: this function does both.
    """
    cluster = layouts.cluster
    leaner = [
        replace(misfit, candidate=candidate)
        for misfit in sorted(misfits, key=lambda misfit: misfit.needs)[:_MOST_LEANER]
        if misfit.state_too_large
        for candidate in layouts.remedies(misfit.candidate)
    ]
    open_ = [(misfit.needs, number, misfit) for number, misfit in enumerate([*misfits, *leaner])]
    heapq.heapify(open_)
    while True:
        needs, number, misfit = open_[0]
        memory = needs * _SLACK
        outcome = evaluate(replace(cluster, device=replace(cluster.device, memory=memory)), misfit.candidate)
        if not isinstance(outcome, Infeasible) or outcome.needs <= memory:
            return misfit
        heapq.heapreplace(open_, (outcome.needs, number, outcome))


def fits(layouts: Layouts) -> bool:
    """Tell whether any candidate fits that has all measures that save memory, with one sample per microbatch."""
    narrow = replace(layouts, choices=replace(layouts.choices, microbatch=(1,), schedules=("1f1b", "v-auto")))
    return any(
        isinstance(evaluate(narrow.cluster, leaner), Result)
        for layout in narrow
        for candidate in narrow.candidates(layout, stock=False)
        for leaner in narrow.remedies(candidate)
    )


def replace_cluster(layouts: Layouts, **changes: object) -> Layouts:
    return replace(layouts, cluster=replace(layouts.cluster, **changes))  # type: ignore[arg-type]
