"""What the flags ask for, planned: one schedule, or all there are."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.pipeline.cli.arguments import Stages, check_size
from megatron.pipeline.cli.case import Case
from megatron.pipeline.cli.costs import costs_of, with_shards
from megatron.pipeline.cli.offload import check_costs, wanted
from megatron.pipeline.planning.choose import Candidate, Refusal, Request, Variant, candidate, candidates
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import VocabularyCosts
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import ChunksDoNotFit, Objective

_REPORTED = (
    *("schedule", "chunks", "makespan", "span", "bubble_rate", "makespan_bubble_rate", "peak_activation"),
    *("lower_bound", "gap", "makespan_lower_bound", "makespan_gap", "expected_span", "expected_makespan", "plan_seconds"),
    "offload",
)


def plan_one(options: argparse.Namespace, variant: Variant) -> Candidate:
    """Plan and verify one schedule.

    Args:
        options: of ``size_flags``, ``goal_flags`` and ``cost_flags``, and those of ``mpipe plan`` where there are more.

    Raises:
        ValueError: the name is unknown, or sizes, costs or the limit do not fit the family.
    """
    _check(options, variant)
    try:
        return candidate(_request(options), variant)
    except ChunksDoNotFit as error:
        raise ValueError(f"{error}: leave --chunks out") from None


def plan_all(options: argparse.Namespace, variants: Iterable[Variant]) -> tuple[list[Candidate], list[Refusal]]:
    """Plan and verify every schedule that there is, the shortest first; and the others, with the reason."""
    sizes: list[Refusal] = []
    fitting: list[Variant] = []
    for variant in variants:
        try:
            _check(options, variant)
            fitting.append(variant)
        except ValueError as error:
            sizes.append(Refusal(variant, str(error)))
    planned, refused = candidates(_request(options), fitting)
    return planned, sizes + refused


def case_of(planned: Candidate) -> Case:
    return Case(planned.schedule, planned.problem)


def row(planned: Candidate) -> dict[str, Any]:
    """What the JSON of several schedules says of each."""
    report = case_of(planned).report(planned.seconds)
    told = {name: report[name] for name in _REPORTED if name in report}
    return told | {"label": str(planned.variant), "memory": planned.peak}


def _check(options: argparse.Namespace, variant: Variant) -> None:
    """Refuse a name that no family has, and what would take hours, before anything is made of it."""
    family = families.named(variant.name)
    check_size(options.pp, options.microbatches, variant.chunks or family.chunks, variant.splits or family.splits)


def _request(options: argparse.Namespace) -> Request:
    given, vocabulary, offload = vars(options), _vocabulary(options), wanted(options)
    jitter = given.get("jitter") or 0.0
    if offload is None:
        check_costs(options)
    return Request(
        options.pp,
        options.microbatches,
        lambda placement: with_shards(costs_of(options, placement, copies=offload is not None), vocabulary),
        options.memory_limit,
        Objective(options.objective),
        _stages(given, "recompute"),
        _stages(given, "fuse"),
        jitter[0] if isinstance(jitter, list) else jitter,
        vocabulary,
        offload,
        options.host_memory_limit,
    )


def _vocabulary(options: argparse.Namespace) -> Vocabulary | None:
    wanted = vars(options).get("vocab_parallel")
    if wanted in (None, "off"):
        if options.vocab_cost and "vocab_parallel" in options:
            raise ValueError("--vocab-cost is of a spread vocabulary: give --vocab-parallel 1, 2 or interlaced, or leave it out")
        return None
    if options.costs and options.costs.vocabulary == VocabularyCosts() and not options.vocab_cost:
        raise ValueError('--costs has no "vocabulary": give what its passes take with --vocab-cost S=..,T=..')
    return Vocabulary(wanted)


def _stages(given: Mapping[str, Any], flag: str) -> Callable[[Placement], Iterable[int]]:
    chosen: Stages | None = given.get(flag)

    def of(placement: Placement) -> Iterable[int]:
        try:
            return chosen.of(placement.last_stage + 1) if chosen else ()
        except ValueError as error:
            raise ValueError(f"--{flag} {error}") from None

    return of
