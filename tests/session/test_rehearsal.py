"""``--rehearse``: the numbers of training, the seconds of every pass alone, and the iteration of a device for every rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from marked import rest
from pool import Pool
from training.short_runs import metrics, train

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.flags.validation_rehearsal import MEASURED
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner.costmodel import origin
from megatron.pipeline.planner.costmodel.device import Link, named
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.runtime.profiling import ITERATIONS
from megatron.pipeline.session import memory as session_memory
from megatron.pipeline.session.rehearsal import files
from megatron.pipeline.trainer.program import prepare


def rehearsed(pool: Pool, folder: Path, ranks: int, flags: str) -> dict[str, Any]:
    """What a rehearsal found, once its losses are those of the same training without one."""
    flags = f"--mock-data --pipeline-schedule {flags}"
    assert pool.run(ranks, train, f"{flags} --metrics {folder}/plain.jsonl") == [""] * ranks
    rehearsal = f"--rehearse --rehearse-dir {folder}/found --rehearse-hop 0.001"
    assert pool.run(ranks, train, f"{flags} --metrics {folder}/rehearsed.jsonl {rehearsal}") == [""] * ranks
    assert metrics(folder / "rehearsed.jsonl") == metrics(folder / "plain.jsonl")
    found: dict[str, Any] = json.loads((folder / "found" / "rehearsal.json").read_text())
    return found


PP2 = "--pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("ranks", "flags", "kinds"),
    [
        (2, "zb-auto --pipeline-model-parallel-size 2", {"F", "B", "W"}),
        rest(2, "v-half --pipeline-model-parallel-size 2 --vocab-parallel 2", {"F", "B", "W", "S", "T", "IF", "IB"}),
        rest(4, f"zb-v {PP2} --tensor-model-parallel-size 2 --sequence-parallel --bf16", {"F", "B", "W"}),
    ],
)
def test_numbers_are_those_of_training_and_every_pass_is_measured(
    pool: Pool, tmp_path: Path, ranks: int, flags: str, kinds: set[str]
) -> None:
    found = rehearsed(pool, tmp_path, ranks, flags)
    assert {row["kind"] for row in found["passes"]} == kinds
    for row in found["passes"]:
        assert 0 < row["least_seconds"] <= row["median_seconds"] <= row["most_seconds"]
    for rank in found["ranks"]:
        assert rank["activation_bytes"] == pytest.approx(rank["planned_activation_bytes"], rel=0.02)
        assert rank["process_bytes"] > rank["activation_bytes"]
    timeline = Timeline.from_json(json.dumps(found["timeline"]))
    assert found["passes_seconds"] == timeline.makespan
    assert found["iteration_seconds"] == timeline.makespan + found["step_seconds"] and found["step_seconds"] > 0
    assert found["hop_seconds"] == 0.001
    assert found["stock"]["schedule"] in ("1f1b", "interleaved v=2")
    costs, of = origin.read((tmp_path / "found" / "costs.json").read_text())
    assert costs.hop == 0.001 and costs.vocabulary.exchange is None
    assert of["hidden_size"] == 32 and of["numbers"] == ("bf16" if "--bf16" in flags else "fp32")
    assert of["collectives"] == ("run" if "--tensor-model-parallel-size" in flags else "none")
    assert sum(of["layers"]) == of["num_layers"] and of["gpu"] is None
    assert (tmp_path / "found" / "rehearsal.png").stat().st_size > 10_000
    if flags.startswith("zb-auto"):  # its costs plan the next training
        flags = f"--mock-data --pipeline-schedule {flags} --pipeline-costs {tmp_path}/found/costs.json --train-iters 3"
        assert pool.run(2, train, flags) == [""] * 2


def test_replicas_sum_their_gradients_over_the_links_that_are_named(pool: Pool, tmp_path: Path) -> None:
    gpu = "H100-80GB"
    flags = f"--mock-data --pipeline-schedule zb-h1 {PP2} --rehearse --rehearse-dir {tmp_path} --rehearse-hop {gpu}"
    assert pool.run(4, train, f"{flags} --untie-embeddings-and-output-weights") == [""] * 4
    found = json.loads((tmp_path / "rehearsal.json").read_text())
    link, layer = named(gpu).within, 12 * 32**2 + 13 * 32
    # Rank 0: two layers, the embedding (vocabulary padded to 384) and 16 positions; float32, without overlap. Then the norm.
    summed = link.all_reduce(4 * (2 * layer + 384 * 32 + 16 * 32), 2)
    assert found["replicas_seconds"] == pytest.approx(summed + named(gpu).hop.all_reduce(4, 2), rel=0.02)
    assert found["iteration_seconds"] == found["passes_seconds"] + found["step_seconds"] + found["replicas_seconds"]


FLAGS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --global-batch-size 8 "
    "--lr 1e-2 --tokenizer-type ByteLevelTokenizer --mock-data --pipeline-model-parallel-size 2 --train-iters 6"
)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rehearse --train-iters 4", "--rehearse measures 5 iterations, and --train-iters is 4: raise it"),
        ("--rehearse --exit-interval 4", "--rehearse measures 5 iterations, and --exit-interval is 4: raise it"),
        ("--rehearse --rehearse-park", "flags of an earlier release: --rehearse-park: weights stay on the device"),
        ("--rehearse --rehearse-replicas fake", "--rehearse-replicas: all ranks of a rehearsal are there; leave it out"),
        ("--rehearse --rehearse-hop -1", "--rehearse-hop -1: a message takes 0 seconds or more"),
        ("--rehearse --rehearse-hop H10", "unknown GPU 'H10'; known are .*; did you mean H20"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path: Path, flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        validate(parse(f"{FLAGS} {flags}".split()), 2)


@pytest.mark.parametrize(("hop", "seconds"), [("2e-4", 2e-4), ("H100-80GB", None), ("{tmp_path}/mine.json", 0.5)])
def test_messages_take_what_links_do(tmp_path: Path, hop: str, seconds: float | None) -> None:
    gpu = named("H100-80GB")
    size = 4 * 2 * 16 * 32  # float32, samples, tokens, channels
    (tmp_path / "mine.json").write_text(replace(gpu, hop=Link(0.25, 4 * size)).to_json())
    args = validate(parse(f"{FLAGS} --rehearse --rehearse-hop {hop.format(tmp_path=tmp_path)}".split()), 2)
    assert args.rehearsal.seconds == (gpu.hop.seconds(size) if seconds is None else seconds)


@pytest.mark.parametrize(("flags", "collectives"), [("", "none"), ("--tensor-model-parallel-size 2", "run")])
def test_costs_say_whether_they_have_the_time_of_collectives(flags: str, collectives: str) -> None:
    args = validate(parse(f"{FLAGS} --rehearse {flags}".split()), 4)
    assert origin.described(describe(args), "run", [1])["collectives"] == collectives


@pytest.mark.parametrize("hop", ["A100-80GB", "0.001"])
def test_ranks_that_share_a_sequence_sum_their_gradients_over_links_that_are_known(hop: str) -> None:
    args = validate(parse(f"{FLAGS} --rehearse --context-parallel-size 2 --rehearse-hop {hop}".split()), 4)
    assert args.data_parallel_size == 1
    plan = Request("zb-h1", 2, 4, Costs((StageCosts(1.0, 1.0, 1.0),) * 2), objective=Objective.MAKESPAN).plan()
    seconds = files._replicas(args | {"padded_vocab_size": 384}, plan.schedule, plan.problem.costs, plan.value)
    assert seconds is None if hop == "0.001" else seconds and seconds > 0


def test_flags_know_how_many_iterations_are_measured() -> None:
    assert MEASURED == ITERATIONS


def test_ranks_that_do_not_fit_together_are_refused_before_any_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is missing, and what to change."""
    flags = "--config configs/tiny.yaml --mock-data --pipeline-model-parallel-size 2 --num-layers 4 --rehearse"
    for schedule in ("zb-h1", "stock"):
        prepare([*flags.split(), "--pipeline-schedule", schedule], 2)
    monkeypatch.setattr(session_memory, "device_memory", lambda _: 1 << 20)
    with pytest.raises(
        ValueError, match=r"all 2 ranks on one machine, .* GiB of this machine, which has 0\.0009766 GiB, .* less: re"
    ):
        prepare([*flags.split(), "--pipeline-schedule", "zb-h1"], 2)
