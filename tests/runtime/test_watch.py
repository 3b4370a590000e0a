"""A slow link is named while training goes on, planned for, and forgotten when it is over; numbers stay."""

from __future__ import annotations

import re

import pytest
from marked import rest
from pool import Pool
from runtime import watched


@pytest.mark.parametrize(("schedule", "mode"), [("zb-v", "replan"), rest("zb-h1", "replan"), rest("zb-v", "report")])
def test_a_slow_link_is_named_planned_for_and_as_usual_again(pool: Pool, schedule: str, mode: str) -> None:
    """Not how slow, nor which else: ranks of a test share cores."""
    off = pool.once(4, watched.train, schedule, "off", seconds=0.0, timeout=300)
    ours = pool.run(4, watched.train, schedule, mode, timeout=300)
    assert [rank.steps for rank in ours] == [rank.steps for rank in off]
    assert all(rank.lines == ours[0].lines and rank.slow == ours[0].slow for rank in ours)
    assert all(rank.orders == ours[0].orders for rank in ours)
    lines, slow = ours[0].lines, ours[0].slow
    assert any(
        re.match(r" WARNING: link 1-2 is slow \(global rank 1 on .* and global rank 2 on .*\): a message", line) for line in lines
    )
    assert any("link 1-2 is as usual again" in line for line in lines), lines
    # Three iterations, one until all ranks know, and one until metrics have it.
    assert any(one["what"] == "link 1-2" and one["ranks"] == [1, 2] for one in slow[9 + 5]), slow
    assert not any(one["what"] == "link 1-2" for one in slow[-1]), slow
    planned = [line for line in lines if f"{schedule} planned for what is slow" in line]
    assert bool(planned) == (max(ours[0].orders) > 0) == (mode == "replan"), lines


def test_a_loop_of_its_own_watches_too(pool: Pool) -> None:
    off, ours = (pool.run(4, watched.loop, "zb-v", watch, timeout=300) for watch in ("off", "replan"))
    assert [steps for steps, _ in ours] == [steps for steps, _ in off]
    assert not any(lines for _, lines in [*off, *ours[:-1]])
    assert any("link 1-2 is slow" in line for line in ours[-1][1]) and any(
        "planned for what is slow" in line for line in ours[-1][1]
    )
