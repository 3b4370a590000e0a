"""Whole trainings with the vocabulary spread over all ranks: what is around their iterations holds for them too."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from pool import Pool
from training.short_runs import metrics, ran, train

from megatron.pipeline.cli import main

NEAR = 1e-5  # relative: sums over the vocabulary are made of shards
EXACT = "--attention-dropout 0 --hidden-dropout 0 --clip-grad 0"


def losses(path: Path) -> list[float]:
    return [loss for _, loss, _ in metrics(path)]


@pytest.mark.rest
def test_a_schedule_from_a_file(pool: Pool, data: str, tmp_path: Path) -> None:
    """It has the vocabulary's passes, or gets them; activations that it recomputes include the embedding's and the output's."""
    variant = "2"
    plan = "plan --schedule zb-h1 --pp 2 --microbatches 4 --cost F=1,B=1,W=1,comm=0.1 --json -o".split()
    shares = ["--vocab-parallel", variant, "--vocab-cost", "S=0.3,T=0.3,IF=0.05,IB=0.05"]
    assert main([*plan, f"{tmp_path}/with.json", *shares]) == main([*plan, f"{tmp_path}/without.json"]) == 0
    recomputing = json.loads((tmp_path / "with.json").read_text())
    recomputing["passes"] = [recomputed(row) for row in recomputing["passes"]]
    (tmp_path / "recomputing.json").write_text(json.dumps(recomputing))
    run = f"{data} {EXACT} --pipeline-model-parallel-size 2"
    names = {
        "zb-h1": "zb-h1",
        "with": f"file:{tmp_path}/with.json",
        "without": f"file:{tmp_path}/without.json --vocab-parallel {variant}",
        "recomputing": f"file:{tmp_path}/recomputing.json --vocab-parallel {variant}",
    }
    around = "--train-iters 4 --eval-interval 3 --eval-iters 1"
    for name, schedule in names.items():
        flags = f"{run} {around} --pipeline-schedule {schedule} --metrics {tmp_path}/{name}.jsonl"
        assert ran(pool.run(2, train, flags))
    for name in ("with", "without", "recomputing"):
        assert losses(tmp_path / f"{name}.jsonl") == pytest.approx(losses(tmp_path / "zb-h1.jsonl"), rel=NEAR), name
    _, error = pool.run(2, train, f"{run} --pipeline-schedule {names['with']} --vocab-parallel interlaced")
    assert error.startswith("--vocab-parallel interlaced is asked for, and file:")
    assert f" spreads the vocabulary as {variant}: give one" in error


def recomputed(row: list[str]) -> list[str]:
    """Every backward behind a forward once more."""
    return [one for work in row for one in ([f"R{work[1:]}", work] if work.startswith("B") else [work])]


@pytest.mark.rest
def test_measured_costs_and_traces(pool: Pool, data: str, tmp_path: Path) -> None:
    """The next run plans with what this one has measured, without measuring again."""
    flags = f"{data} --pipeline-model-parallel-size 2 --pipeline-schedule zb-auto --vocab-parallel 2 --metrics {tmp_path}/m.jsonl"
    costs = f"--pipeline-costs profile --pipeline-costs-cache {tmp_path}/costs.json --pipeline-trace {tmp_path}/trace"
    assert ran(pool.run(2, train, f"{flags} {costs} --train-iters 8"))
    shares = json.loads((tmp_path / "costs.json").read_text())["vocabulary"]
    assert all(shares[kind] > 0 for kind in ("S", "T", "IF", "IB", "activation"))
    trace = json.loads((tmp_path / "trace" / "iteration_0000008.json").read_text())
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 0]
    kinds = Counter(event["cat"] for event in passes)
    assert {kind: kinds[kind] for kind in "F S T IF IB".split()} == dict.fromkeys("F S T IF IB".split(), 2 * 4)
    assert {event["cat"] for event in passes if "stage" in event.get("args", ())} == {"F", "B", "W"}, "shards are of no stage"
    assert (tmp_path / "trace" / "iteration_0000008.png").stat().st_size > 1000
    assert ran(pool.run(2, train, f"{flags} --pipeline-costs {tmp_path}/costs.json --train-iters 4"))


def test_losses_are_those_of_the_whole_vocabulary(pool: Pool, data: str, tmp_path: Path) -> None:
    """With an evaluation in between; and what only the spread one can do changes the loss."""
    run = f"{data} --pipeline-model-parallel-size 4 --num-layers 8 --train-iters 3 --eod-mask-loss --reset-attention-mask "
    run += "--reset-position-ids --attention-dropout 0 --hidden-dropout 0"
    ways = {
        "whole": "--pipeline-schedule 1f1b",
        "spread": "--pipeline-schedule zb-v --vocab-parallel 2 --eval-iters 1 --eval-interval 2 --vocab-logits-limit 0.01MiB",
        "masked": "--pipeline-schedule 1f1b --vocab-parallel 1 --vocab-mask-padding --z-loss 1e-4 --exit-interval 1",
    }
    for name, flags in ways.items():
        assert ran(pool.run(4, train, f"{run} {flags} --metrics {tmp_path}/{name}"))
    whole, spread, masked = (losses(tmp_path / name) for name in ways)
    assert spread == pytest.approx(whole, rel=NEAR)
    assert masked[0] < whole[0] - 0.1, "127 rows of padding do not count"
