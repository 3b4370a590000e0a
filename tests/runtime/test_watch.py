"""A slow link is named while training goes on, planned for, and forgotten when it is over; numbers stay."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from marked import rest
from optimizer import injected_runs
from pool import Pool
from runtime import watched
from runtime.test_slow import report_of

from megatron.pipeline.monitor.slow import Excess, Verdict
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.watch import Slow
from megatron.pipeline.session.metrics import Measured, Metrics, Step
from megatron.pipeline.session.trace import draw_last_trace, trace_of, write_trace


@pytest.mark.parametrize(("schedule", "mode"), [("zb-v", "replan"), rest("zb-auto", "replan"), rest("zb-v", "report")])
def test_a_slow_link_is_named_planned_for_and_as_usual_again(pool: Pool, schedule: str, mode: str) -> None:
    """Not how slow, nor which else: ranks of a test share cores."""
    off = pool.once(4, watched.train, schedule, "off", seconds=0.0, timeout=300)
    ours = pool.run(4, watched.train, schedule, mode, timeout=300)
    assert [rank.steps for rank in ours] == [rank.steps[: len(ours[0].steps)] for rank in off]
    assert all(rank.lines == ours[0].lines and rank.slow == ours[0].slow for rank in ours)
    assert all(rank.planned == ours[0].planned for rank in ours)
    lines, slow = ours[0].lines, ours[0].slow
    assert any(
        re.match(r" WARNING: link 1-2 is slow \(global rank 1 on .* and global rank 2 on .*\): a message", line) for line in lines
    )
    assert any("link 1-2 is as usual again" in line for line in lines), lines
    # Three iterations, one until they are read, one until all ranks know, and one until metrics have it.
    assert any(one["what"] == "link 1-2" and one["ranks"] == [1, 2] for one in slow[9 + 6]), slow
    assert not any(one["what"] == "link 1-2" for one in slow[-1]), slow
    planned = [line for line in lines if f"{schedule} planned for what is slow" in line]
    assert bool(planned) == any(ours[0].planned) == (mode == "replan"), lines


@pytest.mark.parametrize(
    ("pp", "flags", "link"),
    [
        (4, f"{injected_runs.POST} --global-batch-size 16", (1, 2)),
        (2, "--eval-interval 3 --eval-iters 1 --global-batch-size 32", (1, 3)),
        rest(4, "--eval-interval 2 --eval-iters 1 --global-batch-size 16", (1, 2)),
    ],
)
def test_a_whole_training_keeps_its_bits_and_changes_its_order_on_all_ranks_at_once(
    pool: Pool, data: str, pp: int, flags: str, link: tuple[int, int]
) -> None:
    """Two replicas; evaluations in between; steps taken ahead."""
    flags = f"{data} --pipeline-model-parallel-size {pp} --pipeline-schedule zb-v --num-layers 8 --train-iters 22 {flags}"
    off, ours = (pool.run(4, watched.whole, f"{flags} --pipeline-watch {mode}", link, timeout=300) for mode in ("off", "replan"))
    assert [rank[0] for rank in ours] == [rank[0] for rank in off]
    assert all(rank[1:] == ours[0][1:] for rank in ours)
    _, lines, planned = ours[0]
    assert any(re.search(rf"link .* is slow \(global rank {link[0]} on .* and global rank {link[1]} on", line) for line in lines)
    assert any("planned for what is slow" in line for line in lines) and planned[-1] and not any(planned[:10]), lines


@pytest.mark.parametrize("schedule", ["zb-v", rest("zb-h1")])
def test_a_rank_that_is_slow_from_the_start_is_named(pool: Pool, schedule: str) -> None:
    ours = pool.run(4, watched.train, schedule, "replan", ends=14, seconds=0.0, slow_rank=2, timeout=300)
    assert all((rank.lines, rank.slow) == (ours[0].lines, ours[0].slow) for rank in ours)
    assert any("rank 2 is slow" in line for line in ours[0].lines), ours[0].lines
    assert [one["times"] > 1.5 for one in ours[0].slow[-1] if one["what"] == "rank 2"] == [True]


def test_batches_are_planned_for_what_is_slow(pool: Pool) -> None:
    off, ours = (pool.run(4, watched.train, "zb-v", mode, ends=18, every_batch=True, timeout=300) for mode in ("off", "replan"))
    assert [rank.steps for rank in ours] == [rank.steps for rank in off]
    assert all((rank.lines, rank.planned) == (ours[0].lines, ours[0].planned) for rank in ours)
    assert any("link 1-2 is slow" in line for line in ours[0].lines), ours[0].lines
    assert ours[0].planned[-1] and not any(ours[0].planned[:10]), ours[0].planned


def test_metrics_and_traces_have_what_is_slow(tmp_path: Path) -> None:
    verdict, steps = Verdict(), Metrics(str(tmp_path / "metrics"), 16)
    assert [verdict.take(0.1, Excess(0.06, 0.05)) for _ in range(3)] == [False, False, True]
    slow = Slow((0, 1), [0, 4], ["a", "b"], 1.2, verdict)
    step = Step(1, 8, 8, 2.0, 1.0, 1e-3, 1.0, 0.5)
    for found in ([slow.fields()], []):
        steps.write(step, Measured(0.1, None, 1.0, [1], found))
    written = [json.loads(line).get("slow") for line in (tmp_path / "metrics").read_text().splitlines()]
    fields = {"what": "link 0-1", "ranks": [0, 4], "hosts": ["a", "b"], "message_ms": [60.0, 50.0], "share": 0.1}
    assert written == [[fields | {"iteration_ms": pytest.approx(120)}], None]
    pipeline = Pipeline(Request("zb-h1", 4, 8))
    write_trace(str(tmp_path), 1, pipeline, report_of(pipeline.plans.plan(8).schedule, pipeline.plans.planned_costs), [str(slow)])
    trace = json.loads(trace_of(str(tmp_path), 1).read_text())
    assert trace["slow"] == [str(slow)] and "global rank 4 on b): a message takes 60 ms more there and 50 ms more" in str(slow)
    assert any(str(slow) in str(event.get("args", {}).get("name")) for event in trace["traceEvents"])
    assert draw_last_trace(str(tmp_path)) is not None


def test_a_loop_of_its_own_watches_too(pool: Pool) -> None:
    off, ours = (pool.run(4, watched.loop, "zb-v", watch, timeout=300) for watch in ("off", "replan"))
    assert [steps for steps, _ in ours] == [steps for steps, _ in off]
    assert not any(lines for _, lines in [*off, *ours[:-1]])
    assert any("link 1-2 is slow" in line for line in ours[-1][1]) and any(
        "planned for what is slow" in line for line in ours[-1][1]
    )
