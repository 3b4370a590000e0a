"""The examples train, with the losses of megatron-core's own schedule, bit for bit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import example_runs
import pytest
import test_docs
from example_runs import EXAMPLES
from pool import Pool
from training import short_runs

from megatron.pipeline.planner.planning import plan
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.time.simulate import simulate

RANKS = 4


def losses(found: list[example_runs.Steps]) -> list[Any]:
    """By iteration, on the last rank, wherever the last stage is."""
    return [loss for loss, _ in found[-1]]


def norms(found: list[example_runs.Steps]) -> list[float]:
    return [norm for _, norm in found[0]]


def test_the_order_of_the_page_of_names_trains(pool: Pool) -> None:
    """docs/api.md: planned by hand, verified, written to a file, and run."""
    with test_docs.a_place_to_run():
        names: dict[str, object] = {}
        for block in re.findall(r"^```python\n(.*?)^```", (EXAMPLES.parent / "docs" / "api.md").read_text(), re.M | re.S):
            exec(block, names)
        stock, ours = pool.each(RANKS, example_runs.own_training_loop, ("stock", f"file:{Path('gpipe.json').resolve()}"))
    assert losses(ours) == losses(stock) and norms(ours) == norms(stock)


def test_own_training_loop(pool: Pool) -> None:
    stock, *others = pool.each(RANKS, example_runs.own_training_loop, ("stock", "zb-h1", "zb-v"))
    for ours, near in zip(others, (0, 1e-6), strict=True):
        assert losses(ours) == losses(stock)
        assert norms(ours) == pytest.approx(norms(stock), rel=near)


def test_a_user_sees_the_same_numbers_under_every_schedule(pool: Pool) -> None:
    """Others are trained above and below. A V of 3 ranks has 6 stages, over which 8 layers are spread."""
    stock = pool.run(RANKS, example_runs.printed, "own_training_loop.py", "stock")
    ours = [(0, "", ""), *pool.run(3, example_runs.printed, "own_training_loop.py", "zb-v")]
    assert all(code == 0 for code, _, _ in (*stock, *ours))
    lines, expected = (sorted(output for _, output, _ in found) for found in (ours, stock))
    assert lines == expected and expected[:-1] == [""] * (RANKS - 1) and len(expected[-1].splitlines()) >= 3


@pytest.mark.parametrize(
    ("script", "said"),
    [("varying_microbatches.py", r"(.+\n){3,}"), ("lora.py", r"loss \d\.\d{4}; W is planned to take \d+% of B\n")],
)
def test_other_scripts_say_what_they_train(pool: Pool, script: str, said: str) -> None:
    """With the numbers of megatron-core's own schedule: below."""
    found = pool.run(RANKS, example_runs.printed, script, "zb-h1")
    assert all(code == 0 for code, _, _ in found)
    assert re.fullmatch(said, "".join(output for _, output, _ in found))


def test_the_own_training_loop_is_short() -> None:
    assert len((EXAMPLES / "own_training_loop.py").read_text().splitlines()) <= 100


def test_varying_microbatches(pool: Pool) -> None:
    stock, ours = pool.each(RANKS, example_runs.varying_microbatches, ("stock", "zb-v"))
    assert ours[-1][0] == stock[-1][0]
    assert [[len(part) for part in parts] for parts in stock[-1][0]] == [[3, 2], [7, 5], [4, 1]]
    assert all({1, 2, 5} <= planned for _, planned in ours)


def test_lora_leaves_to_w_what_trains(pool: Pool) -> None:
    stock, ours = pool.each(RANKS, example_runs.lora, ("stock", "zb-v"))
    assert losses([rank.steps for rank in ours]) == losses([rank.steps for rank in stock])
    for rank in ours:
        assert rank.changed == 0
        assert all(0 < share < 0.2 for share in rank.planned)
        assert all(name.endswith(("down.weight", "up.weight")) for name in rank.trained)
        # Every W has each adapter of its chunk once, and nothing that is frozen.
        chunks = {name[0]: {other for other in rank.trained if other[0] == name[0]} for name in rank.trained}
        assert rank.weights and {frozenset(done) for done in rank.weights} == {frozenset(of) for of in chunks.values()}
        assert all(set(done.values()) == {1} for done in rank.weights)


def test_where_every_linear_is_frozen_w_is_empty(pool: Pool) -> None:
    stock, ours = pool.each(RANKS, example_runs.lora, ("stock", "zb-h1"), "layernorm")
    assert losses([rank.steps for rank in ours]) == losses([rank.steps for rank in stock])
    for rank in ours:
        assert rank.weights and not any(rank.weights) and rank.changed == 0 and rank.planned == [0.0] * RANKS


def test_where_a_whole_stage_is_frozen_its_w_is_empty(pool: Pool) -> None:
    """All but the output layer: no stage before the last has anything to compute in a backward."""
    stock, ours = pool.each(RANKS, example_runs.lora, ("stock", "zb-v"), "output_layer")
    assert losses([rank.steps for rank in ours]) == losses([rank.steps for rank in stock])
    done = [name for rank in ours for one in rank.weights for name in one]
    assert done and all(name.endswith(" output_layer.weight") for name in done)
    assert any(not any(rank.weights) for rank in ours) and all(rank.changed == 0 for rank in ours)


@pytest.mark.parametrize("weight", [0.0, 0.15])
def test_a_plan_for_a_short_w_is_shorter(weight: float) -> None:
    """What the costs file of such a training brings; the numbers are those of the example."""
    costs = Costs(tuple(StageCosts(forward=1.0, backward=1.0, weight=weight) for _ in range(8)), hop=0.1)
    known, equal = (plan("v-half", 4, 8, costs=given) for given in (Costs.from_json(costs.to_json()), None))
    before, after = simulate(equal, costs).makespan, simulate(known, costs).makespan
    assert after < before
    if weight:
        assert f"{before:.1f} -> {after:.1f}" in (EXAMPLES / "lora.py").read_text()


SCRIPT = EXAMPLES / "checkpoint_across_schedules.sh"


def run_script(output: Path, data: str, before: str = "") -> str:
    """What the example prints, with a directory before all others in its PATH."""
    path = [before, str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        [str(SCRIPT), str(output)],
        env={**os.environ, "DATA_PATH": data.split()[1], "PATH": os.pathsep.join(filter(None, path))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_losses_are_stocks(pool: Pool, data: str, output: Path, stock: Path) -> None:
    [flags] = re.findall(r"^model=\((.*?)^\)", SCRIPT.read_text(), re.M | re.S)
    flags = f"{shlex.join(shlex.split(flags))} {data} --pipeline-schedule stock --metrics {stock}"
    assert pool.run(2, short_runs.train, flags) == ["", ""]
    ours, expected = short_runs.metrics(output / "metrics.jsonl"), short_runs.metrics(stock)
    assert [(iteration, loss) for iteration, loss, _ in ours] == [(iteration, loss) for iteration, loss, _ in expected]
    assert [iteration for iteration, _, _ in ours] == [1, 2, 3, 4, 5, 6]


@pytest.mark.rest
def test_checkpoint_across_schedules(pool: Pool, data: str, tmp_path: Path) -> None:
    """The script's commands, on the pool's ranks in place of torchrun's."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$*"\n')
    (tmp_path / "python").chmod(0o755)
    output = tmp_path / "ours"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node 2 pretrain_gpt.py "
    commands = run_script(output, data, before=str(tmp_path)).splitlines()
    assert len(commands) == 3 and all(command.startswith(launcher) for command in commands)
    for command in commands:
        assert pool.run(2, short_runs.train, command.removeprefix(launcher)) == ["", ""]
    assert_losses_are_stocks(pool, data, output, tmp_path / "stock.jsonl")
