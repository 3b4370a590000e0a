"""Why there is no schedule, in a few words: for tables, and in one line where nothing fits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.pipeline.cli.arguments import MOST_RANKS
from megatron.pipeline.cli.summary import unit_of
from megatron.pipeline.planning.choose import Refusal
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.rules.verify import rounded_up

_MOST_NAMED = 6  # variants with the same reason; more are counted


def reason(options: argparse.Namespace, refusal: Refusal) -> str:
    """Why there is no schedule of one variant."""
    if refusal.needs is not None:
        return f"needs {rounded_up(refusal.needs)}{unit_of(options.costs is None)}, limit {options.memory_limit:g}"
    if stages := _other_stages(options, refusal):
        return f"needs costs of {stages} stages, --costs has {len(options.costs.stages)}"
    return refusal.reason.removeprefix(f"{refusal.variant.name} ")


def folded(options: argparse.Namespace, refused: Sequence[Refusal]) -> list[str]:
    """Why there are no schedules: a line for every reason, with all the variants that it is true of."""
    lines: dict[str, list[str]] = {}
    stages: dict[int, list[str]] = {}
    for refusal in refused:
        if count := _other_stages(options, refusal):
            stages.setdefault(count, []).append(str(refusal.variant))
        else:
            lines.setdefault(reason(options, refusal), []).append(str(refusal.variant))
    told = [f"{_named(labels)}: {why}" for why, labels in lines.items()]
    if stages:
        *others, last = sorted(stages)
        counts = f"{', '.join(map(str, others))} or {last}" if others else str(last)
        labels = [label for labels in stages.values() for label in labels]
        told.append(f"{_named(labels)}: needs costs of {counts} stages, --costs has {len(options.costs.stages)}")
    return told


def nothing_fits(options: argparse.Namespace, refused: Sequence[Refusal]) -> ValueError:
    """What to raise where every schedule is refused: the least limit that one of them can take, or what else is wrong."""
    needs = {refusal.needs: refusal.variant for refusal in reversed(refused) if refusal.needs is not None}
    if needs:
        least = min(needs)
        limit = f"{options.memory_limit:g}{unit_of(options.costs is None)}"
        return ValueError(
            f"no schedule fits within a memory of {limit}: the least that one needs is {rounded_up(least)}, for {needs[least]}; "
            "raise --memory-limit to that"
        )
    reasons = {reason(options, refusal) for refusal in refused}
    return ValueError(f"no schedule fits: {'; '.join(reasons if len(reasons) == 1 else folded(options, refused))}")


def _named(labels: Sequence[str]) -> str:
    return ", ".join(labels) if len(labels) <= _MOST_NAMED else f"{len(labels)} variants"


def _other_stages(options: argparse.Namespace, refusal: Refusal) -> int:
    """Of how many stages costs are needed, where ``--costs`` has those of another number; else 0."""
    variant = refusal.variant
    if not options.costs or options.pp > MOST_RANKS:
        return 0
    try:
        stages = families.placement(variant.name, options.pp, variant.chunks).depth
    except ValueError:
        return 0  # there is no such placement at all
    return stages if stages != len(options.costs.stages) else 0
