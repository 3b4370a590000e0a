"""All that ``make gpu`` starts in one process runs on the device model, without packages that a machine with a GPU may lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
from gpu import ROOT
from marked import whole
from test_gpus import MISSING, OPTIONAL

SMALL = {  # after a step's own flags
    "split_backward.py": "--hidden 64 --tokens 32 --rounds 2",
    "vocabulary_kernels.py": "--vocabulary 1024 --hidden 64 --tokens 32 --rounds 2",
    "offload.py": "--hidden 128 --seq 32 --iterations 2",
    "queues.py": "--priority high --size 16 --rounds 1",  # what it starts for each number of queues
}
RANKS = "rehearse_llama.py"  # runs under torchrun: test_rehearsal.py, and test_gpus.py for its flags
GRAPHS = "slot_graphs.py"  # test_slot_graphs.py


def posed(directory: Path, *command: str) -> str:
    """What a program prints that believes it has a GPU."""
    # Of Transformer Engine the product asks only whether it is there, and a blocked import is no answer.
    names = tuple(name for name in OPTIONAL if name != "transformer_engine")
    (directory / "sitecustomize.py").write_text(MISSING.format(names=names))
    paths = [str(directory), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "gpu_model.posed", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("whole_trainings", [whole(True), False])
def test_every_marked_test_passes_or_is_skipped(tmp_path: Path, whole_trainings: bool) -> None:
    """One is left out: it starts processes of its own, which do not pose."""
    flags = "-m cuda -n 0 -rs -p no:cacheprovider --deselect tests/tune/test_measure.py::test_a_measurement_on_gpus"
    files = [file for file in gpu.MARKED if file.startswith("tests/on_gpus/") == whole_trainings]
    found = posed(tmp_path, "pytest", *flags.split(), *files)
    assert " passed" in found
    reasons = {line.split(": ", maxsplit=1)[1] for line in found.splitlines() if line.startswith("SKIPPED")}
    several = {"needs 2 GPUs, and torch sees 1", "needs 4 GPUs, and torch sees 1"}
    assert reasons == (several if whole_trainings else {"transformer-engine is not installed"})


BENCHMARKS = [one for one in gpu.STEPS if one.command[1].startswith("benchmarks/")]
BENCHMARKS = [one for one in BENCHMARKS if Path(one.command[1]).name not in (RANKS, GRAPHS)]


@pytest.mark.parametrize("step", BENCHMARKS, ids=lambda one: one.name)
def test_a_benchmark_runs_with_the_flags_of_its_step(step: gpu.Step, tmp_path: Path) -> None:
    _, program, *flags = step.command
    name, saved = Path(program).name, tmp_path / "saved"
    flags = [str(saved) if flag == gpu.SAVED else flag for flag in flags]
    printed = posed(tmp_path, program, *flags, *SMALL[name].split())
    if name == "queues.py":
        assert '"a message waits": [' in printed
    else:
        assert list(gpu._rounds(saved.read_text()))
