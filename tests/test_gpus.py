"""Only tests marked ``cuda`` see GPUs, and what lacks GPUs is skipped with the reason."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpus
import pytest
import rehearse_llama
import torch
from pool import Pool

from megatron.pipeline.trainer import program


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_other_tests_and_their_ranks_see_no_gpu(pool: Pool) -> None:
    assert visible() == ""
    assert pool.run(2, visible) == ["", ""]


@pytest.mark.parametrize(
    ("wanted", "marks", "found", "reason"),
    [
        (1, "cuda", 1, None),
        (2, " cuda ", 8, None),
        (1, "not whole", 8, "needs a GPU, which this run hides"),
        (2, "", 0, "needs 2 GPUs, which this run hides"),
        (1, "cuda or slow", 1, "needs a GPU, which this run hides"),  # slow tests would compute on it, too
        (1, "cuda", 0, "needs a GPU, and torch sees none"),
        (4, "cuda", 2, "needs 4 GPUs, and torch sees 2"),
    ],
)
def test_who_runs_and_why_not(wanted: int, marks: str, found: int, reason: str | None) -> None:
    said = gpus.missing(wanted, marks, found)
    assert said == reason if reason is None or said is None else said.startswith(reason)


@pytest.mark.parametrize("wanted", [1, 3])
def test_a_marked_test_is_skipped_with_the_reason(request: pytest.FixtureRequest, wanted: int) -> None:
    request.node.add_marker(pytest.mark.cuda(devices=wanted))
    with pytest.raises(pytest.skip.Exception, match=r"^needs (a GPU|3 GPUs), which this run hides"):
        request.config.hook.pytest_runtest_setup(item=request.node)


MISSING = """
import sys


class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith({names}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Missing())
"""
OPTIONAL = tuple("uvicorn starlette ortools matplotlib playwright shtab pybind11 transformer_engine tensorboard".split())


def pytest_without(names: tuple[str, ...], directory: Path, *flags: str) -> str:
    """What pytest prints in a process that cannot import these packages."""
    (directory / "sitecustomize.py").write_text(MISSING.format(names=names))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *flags],
        cwd=gpu.ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_all_tests_for_gpus_are_found_on_a_machine_with_few_packages(tmp_path: Path) -> None:
    """``make gpu`` installs nothing, and what no marked test needs may be missing."""
    found = pytest_without(OPTIONAL, tmp_path, "-m", "cuda", "--collect-only", "tests")
    files = {line.split(":")[0] for line in found.splitlines() if line.startswith("tests/")}
    assert files == set(gpu.MARKED) - {"tests/test_gpus.py"}  # which marks a test as it runs
    assert {word for step in gpu.STEPS for word in step.command if word.startswith("tests/")} == set(gpu.MARKED)


def test_tests_of_the_script_need_torch_alone(tmp_path: Path) -> None:
    assert "passed" in pytest_without((*OPTIONAL, "megatron.core"), tmp_path, "-v", "tests/test_gpu_script.py")


def on_gpu_of(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch say that there is one."""
    size = int(gib * 2**30)
    properties = SimpleNamespace(total_memory=size, L2_cache_size=50 * 2**20, multi_processor_count=132, name="NVIDIA H100")
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("current_device", 0),
        ("get_device_name", "NVIDIA H100 80GB HBM3"),
        ("get_device_capability", (9, 0)),
        ("get_device_properties", properties),
        ("mem_get_info", (size - 2**29, size)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


@pytest.mark.parametrize("gib", [79.1, 139.8, None])  # an H100, an H200, no GPU
@pytest.mark.parametrize("schedule", rehearse_llama.SCHEDULES.values())
def test_a_rehearsal_is_accepted_and_planned(monkeypatch: pytest.MonkeyPatch, schedule: str, gib: float | None) -> None:
    """With as many layers as the benchmark takes for the memory that is free."""
    layers = 16
    if gib is not None:
        on_gpu_of(gib, monkeypatch)
        layers = rehearse_llama.layers_that_fit(torch.cuda.mem_get_info()[0])
    flags = rehearse_llama.flags_of(schedule, layers, gib is not None)
    args, _, pipeline = program.prepare([*shlex.split(flags), "--rehearse"], rehearse_llama.RANKS)
    program.destroy_num_microbatches_calculator()
    assert pipeline.placement.ranks == rehearse_llama.RANKS and args.num_layers == layers
    assert (args.offloading.cpu_bandwidth is None) == (gib is not None or args.offloading.mode is None)
