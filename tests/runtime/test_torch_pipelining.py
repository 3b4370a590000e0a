"""torch.distributed.pipelining loads our CSV, runs it, and computes what plain autograd does."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from marked import rest
from pool import Pool

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import v
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.torch_csv import from_csv, to_csv
from megatron.pipeline.planner.schedule.rules.verify import verify

MICROBATCHES, ROWS, WIDTH = 6, 3, 8
BY_HAND = "v by hand"


class Step(NamedTuple):
    """What one step computes: the outputs, if the rank has the last stage, and every parameter's gradient by stage."""

    outputs: list[list[float]] | None
    gradients: dict[int, list[list[float]]]


def stage_module(stage: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(stage)
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / WIDTH**0.5)
    return module


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1234)
    size = MICROBATCHES * ROWS, WIDTH
    return (
        torch.randn(size, generator=generator, dtype=torch.float64),
        torch.randn(size, generator=generator, dtype=torch.float64),
    )


def gradients(module: torch.nn.Module) -> list[list[float]]:
    grads = [parameter.grad for parameter in module.parameters()]
    assert all(grad is not None for grad in grads), "every pass added its part"
    return [grad.flatten().tolist() for grad in grads if grad is not None]


def in_torchs_runtime(text: str) -> Step:
    """One step of a schedule from CSV, on this rank."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    placement = from_csv(text, "csv").placement
    modules = {stage: stage_module(stage) for stage in placement.stages[torch.distributed.get_rank()]}
    count, device = placement.last_stage + 1, torch.device("cpu")
    stages = [PipelineStage(module, stage, count, device) for stage, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "schedule.csv"
        path.write_text(text)
        runtime._load_csv(str(path))
    inputs, target = batch()
    outputs = runtime.step(*([inputs] if 0 in modules else []), target=target if placement.last_stage in modules else None)
    return Step(None if outputs is None else outputs.tolist(), {stage: gradients(module) for stage, module in modules.items()})


def in_plain_autograd(count: int) -> Step:
    """The same step on one rank, microbatch by microbatch."""
    modules = [stage_module(stage) for stage in range(count)]
    model = torch.nn.Sequential(*modules)
    outputs = []
    for inputs, target in zip(*(whole.split(ROWS) for whole in batch()), strict=True):
        outputs.append(model(inputs))
        (torch.nn.functional.mse_loss(outputs[-1], target) / MICROBATCHES).backward()
    return Step(torch.cat(outputs).tolist(), {stage: gradients(module) for stage, module in enumerate(modules)})


def schedule(name: str, ranks: int) -> Schedule:
    return v_by_hand(ranks) if name == BY_HAND else planning.plan(name, ranks, MICROBATCHES)


def v_by_hand(ranks: int) -> Schedule:
    """All forwards and then all backwards of a V; the second half of the model fused, the first split."""
    every = range(MICROBATCHES)
    forwards = [Pass(Kind.F, number, chunk) for chunk in (0, 1) for number in every]
    backwards = [Pass(Kind.BW, number, 1) for number in every] + [Pass(Kind.B, number, 0) for number in every]
    row = (*forwards, *backwards, *(Pass(Kind.W, number, 0) for number in every))
    return Schedule(BY_HAND, v(ranks), MICROBATCHES, (row,) * ranks)


NAMES = [name for name in ("1f1b", "zb-h1", "interleaved", "zb-v", "v-half", "dualpipe-v") if name in families.FAMILIES]


@pytest.mark.parametrize("name", [rest(name) if name == "v-half" else name for name in NAMES] + [BY_HAND])
def test_torch_runs_our_csv(name: str, pool: Pool) -> None:
    planned = schedule(name, 4)
    verify(planned)
    expected = in_plain_autograd(planned.placement.last_stage + 1)
    steps = pool.run(4, in_torchs_runtime, to_csv(planned))
    (outputs,) = [step.outputs for step in steps if step.outputs is not None]
    torch.testing.assert_close(outputs, expected.outputs, rtol=1e-12, atol=1e-14)
    found = {stage: grads for step in steps for stage, grads in step.gradients.items()}
    assert found.keys() == expected.gradients.keys()
    torch.testing.assert_close(found, expected.gradients, rtol=1e-12, atol=1e-14)


def torchs_own_csv(name: str) -> str:
    """What one of torch's schedules dumps of itself."""
    from torch.distributed.pipelining import PipelineStage, schedules

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = (rank, rank + ranks) if name.startswith("ScheduleInterleaved") else (rank, 2 * ranks - 1 - rank)
    stages = [PipelineStage(stage_module(stage), stage, 2 * ranks, torch.device("cpu")) for stage in mine]
    own = getattr(schedules, name)(stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "schedule.csv"
        own._dump_csv(str(path), format="compute_only")
        return path.read_text()


@pytest.mark.parametrize(
    "name", ["ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
)
def test_schedules_of_torch_are_read_and_obey_the_rules(name: str, pool: Pool) -> None:
    texts = pool.run(2, torchs_own_csv, name)
    assert texts[0] == texts[1]
    read = from_csv(texts[0], name)
    assert read.microbatches == MICROBATCHES
    verify(read)
    steps = pool.run(2, in_torchs_runtime, to_csv(read))
    expected = in_plain_autograd(4).gradients
    torch.testing.assert_close({**steps[0].gradients, **steps[1].gradients}, expected, rtol=1e-12, atol=1e-14)
