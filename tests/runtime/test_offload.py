"""Training with activations in host memory: the same numbers, the memory that was planned, and copies that are waited for."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
from marked import rest
from megatron.core import parallel_state
from megatron.pipeline.patches import schedules
from pool import Pool
from replanned import planned_again
from runtime.offloaded import PoisonedPool

from megatron.pipeline.monitor import cost_profile
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.transform import without_copies
from megatron.pipeline.runtime.offload import activations

SMALL = "--offload-min-size 1KiB"
FULL, SELECTIVE, ALL = "--offload full", "--offload selective", "all"
RECOMPUTED = "zb-v, recomputed"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
CHECKPOINTS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


class Ran(NamedTuple):
    """What a rank tells: losses and norms, the copies of its last record and how many were planned, and the arenas that it had
    allocated after each iteration."""

    steps: list[tiny_gpt.Step]
    planned: int
    copied: int
    arenas: list[int]


def run(schedule: str, flags: str, iterations: int, others: tuple[int, ...] = (), **sizes: Any) -> Ran:
    """Train on this rank of the pool. What has not been copied yet is not a number, in host memory as on the device.

    Args:
        others: between iterations there is an evaluation, and another iteration, with each of these numbers of microbatches.
    """

    def poisoned(nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.full((nbytes,), 255, dtype=torch.uint8, device=device)

    trained = tiny_gpt.Run(schedule, flags=tuple(flags.split()), **sizes)
    pipeline, microbatches = trained.pipeline, trained.microbatches
    pool = PoisonedPool(pipeline.settings.host_limit, pinned=False)
    steps, arenas = [], []
    with patch.object(activations, "_blank", poisoned), patch.dict(pipeline.offloading.__dict__, pool=pool):
        for iteration in range(iterations):
            steps.append(trained.step(iteration))
            for trained.microbatches in others:
                steps += [trained.step(iteration, forward_only=True), trained.step(10 + iteration)]
            trained.microbatches = microbatches
            arenas.append(pool.allocations)
    assert pool.in_use == 0
    report = pipeline.report()
    assert report is not None
    record = report.ranks[parallel_state.get_pipeline_model_parallel_rank()]
    return Ran(steps, sum(work.kind.is_copy for work, _, _ in record.passes), len(record.copies), arenas)


def moving_all(schedule: Schedule) -> Schedule:
    """Every microbatch of every chunk goes to host memory behind the next forward, and comes back during the pass before it is
    needed. That it pays does not matter here."""

    def row(passes: tuple[Pass, ...]) -> list[Pass]:
        again = {work[1:3] for work in passes if work.kind is Kind.R}
        found: list[Pass] = []
        leaving: list[Pass] = []
        for work in passes:
            if work.kind is Kind.R or (work.kind in (Kind.B, Kind.BW) and work[1:3] not in again):
                if leaving and leaving[0][1:3] == work[1:3]:
                    found.append(leaving.pop())
                at = len(found) if found[-1].kind.is_copy else len(found) - 1
                found.insert(at, work._replace(kind=Kind.H2D))
            found.append(work)
            if work.kind is Kind.F:
                found += leaving
                leaving = [work._replace(kind=Kind.D2H)]
        return found

    return replace(schedule, passes=tuple(tuple(row(passes)) for passes in schedule.passes))


def written(schedule: str, pp: int, microbatches: int, vocabulary: str | None, directory: Path) -> tuple[str, str]:
    """The same schedule without copies and with all there can be, as what ``--pipeline-schedule`` takes."""
    name, _, recomputes = schedule.partition(", ")
    options: dict[str, Any] = {"vocabulary": vocabulary and Vocabulary(vocabulary)}
    stages = range(families.placement(name, pp).last_stage + 1)
    plain = planning.plan(name, pp, microbatches, recompute=stages if recomputes else (), **options)
    for one, file in ((plain, "plain"), (moving_all(plain), "moving")):
        (directory / file).write_text(one.to_json())
    return f"file:{directory}/plain", f"file:{directory}/moving"


def check(pool: Pool, directory: Path, schedule: str, pp: int, microbatches: int, how: str, flags: str = "", **more: Any) -> None:
    """Without and with offload, the same."""
    tp, cp = (2 if f"--{kind}-parallel-size 2" in flags else 1 for kind in ("tensor-model", "context"))
    sizes = {"pp": pp, "tp": tp, "cp": cp, "microbatches": microbatches, "iterations": 2, **more}
    ranks = 4 if "-parallel-size" in flags or "-optimizer" in flags else pp
    plain, moving = schedule, schedule
    if how == ALL:
        vocabulary = flags.partition("--vocab-parallel ")[2] or None
        plain, moving = written(schedule, pp, microbatches, vocabulary, directory)
    offload = SMALL if how == ALL else f"{how} {SMALL}"
    layers = f"--num-layers {2 * pp}"
    without = pool.run(ranks, run, plain, f"{layers} {flags}", **sizes)
    found = pool.run(ranks, run, moving, f"{layers} {flags} {offload}", **sizes)
    assert [one.steps for one in found] == [one.steps for one in without]
    losses = [loss for loss, _ in next(one.steps for one in found if one.steps[0][0] is not None)]
    assert len(set(losses)) == len(losses), "they change"
    assert any(one.copied for one in found), "something moves"
    assert schedule == RECOMPUTED or all(one.planned == one.copied for one in found)  # the first stage has nothing but tokens
    assert all(one.planned == 0 for one in without)
    if "--num-experts" not in flags:  # how many tokens an expert gets changes
        assert all(len(set(one.arenas)) == 1 for one in found), "nothing is allocated after the first iteration"


SIZES: list[Any] = [
    ("interleaved", 2, 3, SELECTIVE),
    rest("gis-h", 4, 6, FULL),
    ("zb-h1", 2, 1, ALL),
    rest("zb-h2", 4, 7, FULL),
    rest("zb-auto", 4, 8, ALL),
    rest("zb-v", 2, 4, FULL),
    rest("v-half", 4, 8, SELECTIVE),
    rest("v-auto", 4, 5, f"{FULL} --pipeline-memory-limit 0.5"),
    ("zb-v", 4, 5, ALL),
]


@pytest.mark.parametrize(("schedule", "pp", "microbatches", "how"), SIZES)
def test_schedules(pool: Pool, tmp_path: Path, schedule: str, pp: int, microbatches: int, how: str) -> None:
    check(pool, tmp_path, schedule, pp, microbatches, how)


LAYOUTS: list[Any] = [
    ("interleaved", FULL, f"{DROPOUT} {CHECKPOINTS}"),
    (RECOMPUTED, ALL, DROPOUT),
    ("v-half", FULL, "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --swiglu"),
    rest("zb-v", FULL, "--tensor-model-parallel-size 2 --sequence-parallel --normalization RMSNorm"),
    rest("1f1b", ALL, "--context-parallel-size 2 --position-embedding-type rope --calculate-per-token-loss"),
    rest("zb-h2", ALL, "--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear"),
    ("gis", FULL, "--mtp-num-layers 1 --position-embedding-type rope --untie-embeddings-and-output-weights"),
    ("zb-v", FULL, "--vocab-parallel 2"),
]


@pytest.mark.parametrize(("schedule", "how", "flags"), LAYOUTS)
def test_layouts_and_settings(pool: Pool, tmp_path: Path, schedule: str, how: str, flags: str) -> None:
    check(pool, tmp_path, schedule, 2, 5, how, flags)


@pytest.mark.rest
def test_other_numbers_of_microbatches(pool: Pool, tmp_path: Path) -> None:
    """Of iterations, which move as much as they can, and of evaluations, which move nothing."""
    check(pool, tmp_path, "v-half", 2, 5, FULL, others=(5, 1, 7))


LARGE = "--num-layers 8 --hidden-size 64 --seq-length 64"


def planned_and_measured(schedule: str, **sizes: Any) -> tuple[list[float], list[int], list[float]]:
    """Peaks in bytes of every rank: planned at what has been measured, and then measured again; and those of nothing copied."""
    trained = tiny_gpt.Run(schedule, flags=tuple(f"{LARGE} {FULL} {SMALL}".split()), **sizes)
    pipeline = trained.pipeline
    trained.step(0)
    report = pipeline.report()
    assert report is not None
    measured = cost_profile.agree(cost_profile.measured_costs([report], report), [])
    # Bytes are as they were measured. Seconds are not those of a busy machine, and copies take a fifth of the passes.
    third = 1 / pipeline.placement.chunks
    stages = tuple(replace(stage, forward=third, backward=third, weight=third, fused=None) for stage in measured.stages)
    costs = cutting.with_equal_copies(replace(measured, stages=stages))
    copies = replace(costs.copies, to_host=costs.copies.to_host / 5, to_device=costs.copies.to_device / 5)
    costs = replace(costs, copies=copies)
    pipeline.plans.adopt(planned_again(pipeline.plans, costs), costs)
    trained.step(1)
    again = pipeline.report()
    assert again is not None
    made = pipeline.plans.plan(trained.microbatches).schedule
    peaks = activation_peaks(made, costs), activation_peaks(without_copies(made), costs)
    return list(peaks[0]), again.peak_activation_bytes, list(peaks[1])


@pytest.mark.parametrize(("schedule", "pp", "microbatches"), [rest("zb-h2", 4, 8), rest("gis-h", 2, 6), ("zb-v", 2, 6)])
def test_peaks_are_the_planned_ones(pool: Pool, schedule: str, pp: int, microbatches: int) -> None:
    found = pool.run(pp, planned_and_measured, schedule, pp=pp, microbatches=microbatches)
    planned, measured, without = found[0]
    assert measured == pytest.approx(planned, rel=0.02)
    assert measured[0] < 0.7 * without[0], "the first rank holds longest"


def slowly(schedule: str, bandwidth: float, **sizes: Any) -> tuple[list[tiny_gpt.Step], Any]:
    """Copies that take many times as long as passes; this rank's losses and norms, and its last record."""
    flags = f"--num-layers 8 {FULL} {SMALL} --offload-cpu-bandwidth {bandwidth / 1e9}"
    trained = tiny_gpt.Run(schedule, flags=tuple(flags.split()), **sizes)
    steps = [trained.step(iteration) for iteration in range(2)]
    report = trained.pipeline.report()
    assert report is not None
    return steps, report.ranks[parallel_state.get_pipeline_model_parallel_rank()]


def test_passes_wait_for_slow_copies(pool: Pool) -> None:
    schedule, bandwidth = "zb-v", 5e6
    sizes = {"pp": 2, "microbatches": 4}
    without = pool.run(2, run, schedule, "--num-layers 8", 2, **sizes)
    found = pool.run(2, slowly, schedule, bandwidth, **sizes)
    assert [steps for steps, _ in found] == [one.steps for one in without]
    for _, record in found:
        times = {work: (start, end) for work, start, end in record.passes}
        sizes_of = {
            work: abs(held - before)
            for (work, _, _), held, before in zip(record.passes, record.held, (0, *record.held), strict=False)
        }
        assert record.copies
        for copy, start, end in record.copies:
            assert end - start >= 0.99 * sizes_of[copy] / bandwidth > 0
            if copy.kind is Kind.D2H:
                assert times[copy._replace(kind=Kind.F)][1] <= start
                assert end <= times[copy][0], "memory is free where the schedule says so, not before the copy's end"
            else:
                need = next(times[one] for kind in (Kind.B, Kind.BW) if (one := copy._replace(kind=kind)) in times)
                assert end <= need[0]


def left_behind(**sizes: Any) -> tuple[int, int]:
    """Threads of copies while there is a pipeline, and once there is none."""

    def count() -> int:
        return sum(one.name.startswith("copies to the ") for one in threading.enumerate())

    trained = tiny_gpt.Run("zb-v", flags=tuple(f"{FULL} {SMALL}".split()), **sizes)
    trained.step(0)
    during = count()
    schedules.restore()
    del trained
    gc.collect()
    return during, count()


def test_threads_end_with_their_pipeline(pool: Pool) -> None:
    assert pool.run(2, left_behind, pp=2, microbatches=3) == [(2, 0)] * 2
