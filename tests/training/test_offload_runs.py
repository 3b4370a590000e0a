"""Whole trainings with activations in host memory: what is around their iterations holds for them too."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optimizer import injected_runs
from pool import Pool
from replanned import planned_again
from session.test_replanning import logged
from training.short_runs import MODEL, metrics, train

from megatron.pipeline.cli import main
from megatron.pipeline.monitor import cost_profile
from megatron.pipeline.planner.schedule.core.costs import CopyCosts, Costs, StageCosts
from megatron.pipeline.planner.schedule.core.problem import HostLimitTooLow
from megatron.pipeline.runtime.replan import _why
from megatron.pipeline.session.startup_lines import offload_in_words
from megatron.pipeline.trainer import program

TWO = "--pipeline-model-parallel-size 2 --num-layers 8"
SMALL = "--offload-min-size 1KiB"
MIB = 2**20


def moves(flags: str, microbatches: int = 4) -> bool:
    """Whether what these flags plan has copies."""
    _, _, pipeline = program.prepare(f"{MODEL} {flags}".split(), world_size=2)
    return pipeline.plans.plan(microbatches).schedule.has_copies


def refusal(flags: str) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        program.prepare(f"{MODEL} --mock-data {flags}".split(), world_size=2)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.rest
def test_a_training_goes_on_with_and_without(pool: Pool, data: str, tmp_path: Path) -> None:
    """With ramp-up, evaluations and checkpoints, from one schedule with offload to the next and to one without."""
    around = "--rampup-batch-size 4 2 12 --eval-interval 2 --eval-iters 2 --use-distributed-optimizer --clip-grad 0"
    run = f"{data} {TWO} {around}"
    chain = (
        "--pipeline-schedule zb-v --offload full",
        "--pipeline-schedule zb-v",
        "--pipeline-schedule interleaved --offload selective --offload-cpu-bandwidth 0.5",
    )
    for number, schedule in enumerate(chain, 1):
        assert moves(f"{run} {schedule}") == ("--offload" in schedule)
        files = f"--save {tmp_path}/chain --load {tmp_path}/chain --metrics {tmp_path}/chain.jsonl"
        min_size = SMALL if "--offload" in schedule else ""
        assert pool.run(2, train, f"{run} {schedule} {min_size} {files} --exit-interval {2 * number}") == [""] * 2
    assert pool.run(2, train, f"{run} --pipeline-schedule 1f1b --metrics {tmp_path}/plain.jsonl") == [""] * 2
    found, plain = ([loss for _, loss, _ in metrics(tmp_path / f"{name}.jsonl")] for name in ("chain", "plain"))
    assert found == plain and len(set(plain)) == 6


@pytest.mark.rest
def test_steps_that_are_undone(pool: Pool, data: str) -> None:
    """Forwards that ran in vain had begun to move what they kept."""
    fp16 = "--fp16 --initial-loss-scale 256 --use-distributed-optimizer"
    injections: Any = {2: (0, 1e7), 4: (1, 1e7), 5: (0, float("nan"))}
    run = f"{data} {TWO} --global-batch-size 12 --train-iters 7 --pipeline-schedule interleaved {fp16}"
    assert moves(f"{run} --offload full", 6)
    plain = pool.run(2, injected_runs.train, run, injections)
    found = pool.run(2, injected_runs.train, f"{run} --offload full {SMALL} {injected_runs.POST}", injections)
    for (lines, digests, counts), (expected, same, _) in zip(found, plain, strict=True):
        assert (lines, digests) == (expected, same)
        assert counts["undone"] == counts["in vain"] == len(injections) < counts["ahead"]


def profiled(flags: str) -> list[str]:
    """The lines that this rank would log. Passes come out as if the machine were quiet, bytes and copies as they are."""
    real = cost_profile.agree

    def agreed(costs: Costs, *seconds: Any) -> Costs:
        found = real(costs, *seconds)
        stages = tuple(replace(stage, forward=0.1, backward=0.1, weight=0.1, fused=None) for stage in found.stages)
        return replace(found, stages=stages)

    return logged(flags, agreed)


@pytest.mark.rest
def test_measured_copies(pool: Pool, data: str, tmp_path: Path) -> None:
    """They are planned with in the same run, and in the next one without measuring again."""
    run = f"{data} {TWO} --pipeline-schedule zb-v --train-iters 11"
    offload = f"--offload full {SMALL} --offload-cpu-bandwidth 0.5"
    cache, files = tmp_path / "costs.json", f"--pipeline-trace {tmp_path}/trace"
    flags = f"{run} {offload} --offload-profile --pipeline-costs-cache {cache} --metrics {tmp_path}/m.jsonl {files}"
    lines = max(pool.run(2, profiled, flags), key=len)
    text = "\n".join(lines)
    assert "until they have been measured; up to" in text
    assert "GB/s to host memory and back, " in text and "planned as a tenth slower, k = " in text
    assert "MiB per rank go to host memory in an iteration, at most" in text.partition("planned again in")[2]
    assert "since then: measured bubble" in text
    costs = Costs.from_json(cache.read_text())
    for seconds in (costs.copies.to_host, costs.copies.to_device):
        assert seconds >= 1 / 0.5e9, "no faster than was asked for, and a margin"
    assert all(0 < (stage.movable or 0) <= stage.activation for stage in costs.stages)
    trace = json.loads((tmp_path / "trace" / "iteration_0000010.json").read_text())
    assert {"D2H", "H2D"} <= {event.get("cat") for event in trace["traceEvents"]}

    assert moves(f"{run} {offload} --pipeline-costs {cache}")
    assert pool.run(2, train, f"{run} {offload} --pipeline-costs {cache} --metrics {tmp_path}/again.jsonl") == [""] * 2
    assert pool.run(2, train, f"{run} --metrics {tmp_path}/plain.jsonl") == [""] * 2
    assert metrics(tmp_path / "m.jsonl") == metrics(tmp_path / "again.jsonl") == metrics(tmp_path / "plain.jsonl")


def test_a_file_with_copies(pool: Pool, data: str, tmp_path: Path) -> None:
    plan = "plan --schedule interleaved --pp 2 --microbatches 4 --json -o"
    assert main([*plan.split(), f"{tmp_path}/plain.json"]) == 0
    assert main([*plan.split(), f"{tmp_path}/moving.json", "--offload", "full"]) == 0
    run = f"{data} {TWO} --eval-interval 3 --eval-iters 1"
    assert moves(f"{run} --pipeline-schedule file:{tmp_path}/moving.json")
    names = {"moving": f"moving.json {SMALL}", "plain": "plain.json", "offloaded": f"plain.json {SMALL} --offload full"}
    for name, file in names.items():
        flags = f"{run} --pipeline-schedule file:{tmp_path}/{file} --metrics {tmp_path}/{name}.jsonl"
        assert pool.run(2, train, flags) == [""] * 2
    assert metrics(tmp_path / "moving.jsonl") == metrics(tmp_path / "offloaded.jsonl") == metrics(tmp_path / "plain.jsonl")
    said = refusal(f"{TWO} --pipeline-schedule file:{tmp_path}/moving.json --offload full")
    assert "--offload full adds copies, and those of file:" in said and "run as they are: leave --offload out" in said
    assert "--vocab-parallel 2 has passes that come before copies to host memory, which file:" in refusal(
        f"{TWO} --pipeline-schedule file:{tmp_path}/moving.json --vocab-parallel 2"
    )
    args, _, pipeline = program.prepare(f"{MODEL} {run} --pipeline-schedule file:{tmp_path}/moving.json".split(), world_size=2)
    assert offload_in_words(args, pipeline.plans).startswith(" offload as the file says: ")


def costs_file(path: Path, copies: CopyCosts) -> Path:
    stage = StageCosts(1e-3, 1e-3, 1e-3, activation=MIB)
    path.write_text(Costs((stage,) * 4, 0.0, copies=copies).to_json())
    return path


FAST = CopyCosts(1e-10, 1e-10)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("zb-v --offload full --offload-profile --pipeline-costs FAST", "says it: leave one of the two out"),
        (
            "zb-v --offload full --pipeline-costs NONE",
            "NONE does not say what copies to host memory take, which --offload has to know",
        ),
        (
            "zb-v --offload full --offload-host-memory 1GiB",
            "--offload-host-memory 1024MiB: how much fits is known once activations have been measured: give",
        ),
        (
            "zb-v --offload full --pipeline-costs FAST --offload-host-memory 1MiB",
            "--offload-host-memory 1MiB has no room for one microbatch of a chunk, which takes 1.15MiB or more",
        ),
    ],
)
def test_refusals(tmp_path: Path, flags: str, reason: str) -> None:
    for name, copies in (("FAST", FAST), ("NONE", CopyCosts())):
        flags = flags.replace(name, str(costs_file(tmp_path / name, copies)))
    assert reason in refusal(f"{TWO} --pipeline-schedule {flags}")


def test_too_little_host_memory(pool: Pool, data: str, tmp_path: Path) -> None:
    """Microbatches turn out to be larger than the costs say: as much as is said is planned, and more is refused in the run."""
    costs = costs_file(tmp_path / "costs.json", FAST)
    costs.write_text(costs.read_text().replace(str(MIB), "8192"))
    flags = f"{data} {TWO} --pipeline-schedule zb-v --offload full {SMALL} --pipeline-costs {costs} --offload-host-memory 40KiB"
    assert moves(flags)
    errors = pool.run(2, train, flags)
    assert any("raise --offload-host-memory, or offload less" in error for error in errors), errors


def test_the_log_says_what_host_memory_is_for() -> None:
    flags = f"{MODEL} --mock-data {TWO} --pipeline-schedule"
    words = {}
    for name in ("zb-v", "1f1b"):
        args, _, pipeline = program.prepare(f"{flags} {name} --offload full".split(), world_size=2)
        words[name] = offload_in_words(args, pipeline.plans)
    assert "2 microbatches per rank go to host memory in an iteration, at most 1.5 at a time; peak on the device" in words["zb-v"]
    assert "; nothing goes to host memory: no copy lowers a rank's peak" in words["1f1b"]


def test_planning_again_within_too_little_host_memory() -> None:
    flags = f"{MODEL} --mock-data {TWO} --pipeline-schedule zb-v --offload full --offload-profile --offload-host-memory 1MiB"
    _, _, pipeline = program.prepare(flags.split(), world_size=2)
    costs = Costs((StageCosts(1e-3, 1e-3, 1e-3, activation=MIB),) * 4, copies=FAST)
    with pytest.raises(HostLimitTooLow) as refused:
        planned_again(pipeline.plans, costs)
    words = _why(refused.value, None, pipeline.settings.host_limit)
    assert words == "one microbatch of a chunk takes 1.15MiB of host memory, and --offload-host-memory is 1MiB"
