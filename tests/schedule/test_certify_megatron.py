"""The order and the messages of megatron-core 0.16's interleaved schedule, as digests of what its own function did.

They were recorded on 2026-11-28, one rank after another with process groups and messages that record; the release is frozen.
``mpipe certify interleaved`` has what it does; ``cli/test_certify.py`` has which of the hangs that are reported of it are there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from schedule.golden import canonical

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.certify.certificate import certify
from megatron.pipeline.planner.schedule.certify.megatron import megatron_interleaved
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.lower.program import Wait
from megatron.pipeline.planner.schedule.lower.traffic import Row, Start

RECORDED = json.loads(Path(__file__).with_name("interleaved_of_core.json").read_text())


def digest(rows: Iterable[Iterable[object]]) -> str:
    lines = (f"rank {rank}\n" + "\n".join(map(canonical, row)) for rank, row in enumerate(rows))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# A group of more than one per rank, a last group that is smaller, all forwards in warm-up.
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "group"),
    [(2, 4, 2, 2), (3, 6, 2, 3), (4, 8, 3, 4), (4, 4, 2, 4), (4, 10, 2, 5), (4, 9, 2, 5), (3, 5, 2, 5)],
)
def test_its_order_is_that_of_our_interleaved(ranks: int, microbatches: int, chunks: int, group: int) -> None:
    ours = planning.plan("interleaved", ranks, microbatches, chunks=chunks, group=group).passes
    assert digest(ours) == RECORDED[f"p{ranks} m{microbatches} v{chunks} g{group}"]


def order(row: Row) -> list[object]:
    """Steps without those that change nothing: a wait for what has been waited for, and a start directly before a wait."""
    steps = [step for at, step in enumerate(row) if not (isinstance(step, Wait) and step in row[:at])]
    return [
        step for step, after in zip(steps, [*steps[1:], None], strict=True) if not (step == Start() and isinstance(after, Wait))
    ]


@pytest.mark.parametrize("shapes", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 2, 2), (2, 4, 2), (3, 3, 3), (3, 6, 2), (4, 4, 2), (4, 12, 3)])
def test_certify_has_its_messages(ranks: int, microbatches: int, chunks: int, overlap: bool, shapes: bool) -> None:
    ours = megatron_interleaved(planning.plan("interleaved", ranks, microbatches, chunks=chunks), overlap, shapes)
    key = f"p{ranks} m{microbatches} v{chunks} overlap={overlap} shapes={shapes}"
    assert digest(map(order, ours.rows)) == RECORDED[key]


@pytest.mark.parametrize(("ranks", "chunks"), [*((ranks, 2) for ranks in range(2, 9)), (2, 3), (3, 4), (4, 3)])
def test_overlapped_messages_hang_over_no_transport(ranks: int, chunks: int) -> None:
    for microbatches in (ranks, 2 * ranks):
        traffic = megatron_interleaved(planning.plan("interleaved", ranks, microbatches, chunks=chunks))
        for cold in (False, True):
            certificate = certify(traffic, uniform(traffic.placement), cold=cold)
            assert not certificate.hangs
            assert certificate.unlimited == min(outcome.makespan or 0 for outcome in certificate.outcomes)
