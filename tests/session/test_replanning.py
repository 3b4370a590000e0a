"""``--pipeline-costs profile``: costs are measured, planned with while training goes on, and no loss changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from replanned import planned_again
from training.short_runs import MODEL, metrics, train

from megatron.pipeline.cli import main
from megatron.pipeline.monitor import cost_profile
from megatron.pipeline.planner.costmodel import origin
from megatron.pipeline.planner.planning import aside
from megatron.pipeline.planner.planning.aside import PlanningProcess
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow, Objective
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.runtime.replan import _change, _why
from megatron.pipeline.session.planning import _memory_limit
from megatron.pipeline.trainer import program
from megatron.pipeline.trainer.run_log import Log

MIB = 2**20
FLAGS = "--mock-data --pipeline-model-parallel-size 2 --train-iters 13 --rampup-batch-size 4 2 24"
# Costs at which another order than at equal ones is the best.
UNEQUAL = Costs((StageCosts(1e-3, 5e-3, 1e-3, MIB, MIB / 2), StageCosts(4e-3, 1e-3, 3e-3, MIB, MIB / 2)), hop=2e-3)


def on_time(_: PlanningProcess, *asked: Any) -> Future[bytes]:
    """In place of ``PlanningProcess.plan``, what its process answers."""
    found: Future[bytes] = Future()
    answer = aside._answer(asked)
    if isinstance(answer, ValueError):
        found.set_exception(answer)
    else:
        found.set_result(answer)
    return found


def logged(flags: str, agree: Callable[..., Costs], error: str = "") -> list[str]:
    """The lines that this rank would log, in a run that plans at once with the costs that ``agree`` makes of those measured.

    Args:
        error: with what the training must end.
    """
    lines: list[str] = []
    with (
        patch.object(Log, "line", lambda _, text: lines.append(text)),
        patch.object(cost_profile, "agree", agree),
        patch.object(PlanningProcess, "plan", on_time),  # on a busy machine a short training would end before
    ):
        found = train(flags)
    assert error in found if error else not found, found
    return lines


def train_profiled(flags: str, breaks: bool = False, own: tuple[str, ...] = (), error: str = "") -> list[str]:
    """``logged`` where measured costs come out ``UNEQUAL``.

    Args:
        breaks: planning fails with an error that is no refusal.
        own: more flags of each rank.
    """
    with patch.object(aside, "plan_batch", lambda *_: 1 / 0) if breaks else nullcontext():
        return logged(f"{flags} {own[torch.distributed.get_rank()] if own else ''}", agreed, error)


def agreed(costs: Costs, hops: list[float], _: list[float]) -> Costs:
    """Looks at what was measured, and says something else."""
    assert len(hops) == (5 if torch.distributed.get_rank() == 0 else 0) and all(seconds > 0 for seconds in hops)
    assert all(0 < stage.retained < stage.activation and stage.forward > 0 for stage in costs.stages)
    assert all(stage.backward > 0 and stage.weight > 0 and stage.fused is None for stage in costs.stages)
    return UNEQUAL


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """What equal costs train."""
    path = tmp_path_factory.mktemp("plain") / "m.jsonl"
    assert pool.run(2, train, f"{FLAGS} --pipeline-schedule zb-auto --metrics {path}") == ["", ""]
    return metrics(path)


def test_the_swap_changes_no_number(
    pool: Pool, plain: list[tuple[int, float, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{FLAGS} --pipeline-schedule zb-auto --metrics {tmp_path}/m.jsonl"
    cache = tmp_path / "costs.json"
    lines = pool.run(2, train_profiled, f"{flags} --pipeline-costs profile --pipeline-costs-cache {cache}")[-1]
    text = "\n".join(lines)
    for microbatches in (2, 3, 4):  # the ramp-up's
        assert f"for {microbatches} microbatches" in text
    assert "another order; predicted makespan" in text and "since then: measured bubble" in text
    assert metrics(tmp_path / "m.jsonl") == plain
    ratios = [json.loads(line)["measured_over_simulated"] for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert ratios[:4] == [None] * 4 and all(ratio > 0 for ratio in ratios[5:])

    costs, of = origin.read(cache.read_text())
    assert costs == UNEQUAL and of["collectives"] == "none" and sum(of["layers"]) == of["num_layers"]
    planned = "--pp 2 --microbatches 4 --schedule zb-auto --json"
    assert main(f"plan {planned} --costs {cache}".split()) == 0
    passes = json.loads(capsys.readouterr().out)["passes"]
    _, _, pipeline = program.prepare(f"{MODEL} {flags} --pipeline-costs {cache}".split(), world_size=2)
    assert [[str(work) for work in row] for row in pipeline.plans.plan(4).schedule.passes] == passes


def test_planning_that_fails_does_not_end_the_training(pool: Pool, plain: list[tuple[int, float, float]], tmp_path: Path) -> None:
    flags = f"{FLAGS} --pipeline-schedule zb-auto --pipeline-costs profile --metrics {tmp_path}/m.jsonl"
    lines = pool.run(2, train_profiled, flags, breaks=True)[-1]
    assert any("WARNING: zb-auto is not planned again" in line and "ZeroDivisionError" in line for line in lines)
    assert metrics(tmp_path / "m.jsonl") == plain


def test_a_rank_that_cannot_take_the_new_plan_ends_the_training(pool: Pool) -> None:
    """Its flags are others: it would go on with the old plan, and wait for messages that no rank sends."""
    flags = f"{FLAGS} --pipeline-schedule zb-auto --pipeline-costs profile"
    own = "", "--pipeline-memory-limit 1MiB"
    words = "the ranks do not run the same plan: global rank 1 on "
    lines = pool.run(2, train_profiled, flags, own=own, error=words)
    assert not any("since then" in line for own_lines in lines for line in own_lines)


@pytest.mark.parametrize("schedule", ["stock", "1f1b"])
def test_what_fuses_backwards_is_measured_too(pool: Pool, tmp_path: Path, schedule: str) -> None:
    flags = f"--mock-data --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --pipeline-costs profile"
    assert pool.run(2, train, f"{flags} --pipeline-trace {tmp_path}") == ["", ""]
    costs = Costs.from_json((tmp_path / "pipeline_costs.json").read_text())
    for stage in costs.stages:
        assert stage.backward == stage.weight and stage.fused == stage.backward + stage.weight > 0
        assert stage.retained == stage.activation > 0
    assert (costs.hop > 0) == (schedule != "stock")


@pytest.mark.parametrize(("schedule", "stages"), [("zb-auto", 2), ("v-auto", 4)])
def test_limits_in_bytes(schedule: str, stages: int) -> None:
    flags = f"{MODEL} --mock-data --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --global-batch-size 16"
    costs = Costs((StageCosts(1e-3, 1e-3, 1e-3, 2 * MIB, MIB),) * stages)
    needed = 2 * stages // 2  # MiB of one microbatch on a rank
    _, _, pipeline = program.prepare(
        f"{flags} --pipeline-costs profile --pipeline-memory-limit {needed}.5MiB".split(), world_size=2
    )
    before = pipeline.plans.plan(8).schedule
    assert max(activation_peaks(before, costs)) > (needed + 0.5) * MIB, "it is not known before that this is too much"
    limit = _memory_limit(f"{needed}.5MiB", Request(schedule, 2, 8, costs))
    assert limit == (needed + 0.5) * MIB
    after = planned_again(pipeline.plans, costs, limit)[8].schedule
    assert max(activation_peaks(after, costs)) <= limit
    assert f"MiB and the limit is {needed}.5 MiB; predicted span" in _change(before, after, costs, limit, Objective.SPAN)
    with pytest.raises(LimitTooLow) as refused:
        planned_again(pipeline.plans, costs, limit / 2)
    assert f"it needs {needed}MiB on a rank, and the limit is" in _why(refused.value, limit / 2, None)
