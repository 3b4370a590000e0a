"""Run what this project has for GPUs on those of this machine, and write what was found into docs/gpu.md.

    make gpu                                  # or: python scripts/gpu.py
    python scripts/gpu.py --part 1            # at most 9 minutes; then --part 2, ..
    python scripts/gpu.py --minutes 9 --only "CUDA tests" queues.py

One GPU is enough; tests that need more are skipped. The steps are the list ``STEPS``: the tests marked ``cuda``, torch's and
CUDA's sanitizers, and benchmarks. Each has a time limit, and none outlasts ``--minutes``. A step that fails or runs out of time
is a row that says so; the others still run. The page is written after each step; rows of steps that do not run now stay.

It uses the packages of the Python that runs it and installs nothing but this checkout, in ``build/gpu``, where that is needed.
Exit code: 0 if all steps passed or were skipped for want of a tool, 1 if one did not, 2 without a GPU or without packages that
all steps need, which changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from importlib import metadata
from pathlib import Path

from gpu_page import Measured, Outcome, Row, parts_of, report, write

ROOT = Path(__file__).resolve().parents[1]
PYTHON, SAVED = "{python}", "{saved}"  # in commands: the interpreter, and the file for the rounds of a benchmark
# Modules that every step imports, and what to install for them: of megatron-core the release that all tests are run with.
PACKAGES = {
    "megatron.core": "megatron-core==0.16.1",
    **{name: name for name in ("einops", "hypothesis", "numba", "numpy", "packaging", "psutil", "pytest", "rich")},
    "yaml": "PyYAML",
}


@dataclass(frozen=True)
class Step:
    """A command, run at the root of the repository.

    Attributes:
        name: what it shows.
        command: words; ``PYTHON`` and ``SAVED`` are replaced.
        seconds: it is ended after that.
        finds: an expression whose last match in the output goes into the table.
        program: without which it is skipped.
        environment: in addition to this process's.
        part: of the whole, which takes at most 9 minutes (``--part``).
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    part: int = 1
    finds: str = ""
    program: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


_TESTS = (PYTHON, "-m", "pytest", "-m", "cuda", "-rs", "-p", "no:cacheprovider")
_COUNTS = r"\d+ (?:passed|failed|skipped|error|deselected)[^\n]* in [\d.]+s"
# By name: other modules may import what this machine lacks, and looking through all takes half a minute.
MARKED = sorted(
    str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if "mark.cuda" in path.read_text(encoding="utf-8")
)
# Tests whose kernels run in pytest's own process: a sanitizer need not follow ranks.
_KERNELS = (
    "tests/model/test_split_linear.py",
    "tests/model/test_vocabulary.py",
    "tests/runtime/test_offload_store.py",
    "tests/optimizer/test_on_gpu.py",
    "-k",
    "accumulates or embeddings or gradients_are_the_same or copy_is_complete",
)
# Every rank compiles, in its own process: torch would start a process per core for each.
_COMPILED = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
_UNCOMPILED = {"TORCHDYNAMO_DISABLE": "1"}  # that takes every rank half a minute


def _sanitizer(tool: str, seconds: float, **environment: str) -> Step:
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_TESTS, *_KERNELS)
    finds = r"[A-Z]+ SUMMARY: [^\n]+"
    return Step(f"compute-sanitizer {tool}", command, seconds, 5, finds, "compute-sanitizer", environment)


def _benchmark(name: str, seconds: float, part: int, *flags: str) -> Step:
    return Step(" ".join([name, *flags]), (PYTHON, f"benchmarks/{name}", *flags, "--save", SAVED), seconds, part)


STEPS = (
    Step(
        "does it work at all",
        (*_TESTS, "-x", "tests/model/test_split_linear.py", "tests/on_gpus/test_ranks_on_one_gpu.py"),
        120,
        1,
        _COUNTS,
        environment=_UNCOMPILED,
    ),
    Step("CUDA tests", (*_TESTS, *MARKED), 360, 2, _COUNTS, environment=_COMPILED),
    _benchmark("queues.py", 60, 2),
    _benchmark("split_backward.py", 90, 2, *"--hidden 4096 --tokens 4096 --dtype bf16".split()),
    replace(_benchmark("rehearse_llama.py", 330, 3), finds=r"predicted tokens/s: [^\n]+", environment=_COMPILED),
    _benchmark("vocabulary_kernels.py", 120, 3),
    _benchmark("slot_graphs.py", 60, 4),
    _benchmark("offload.py", 210, 4, *"--hidden 4096 --seq 4096 8192".split()),
    Step(
        "torch's sanitizer of streams",
        (*_TESTS, "tests/on_gpus/test_one_gpu.py", "tests/runtime/test_offload_store.py", "-k", "losses or gradients"),
        120,
        4,
        _COUNTS,
        environment={"TORCH_CUDA_SANITIZER": "1", **_UNCOMPILED},
    ),
    _sanitizer("memcheck", 120, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),  # so that it knows where each tensor ends
    _sanitizer("racecheck", 120),
    _sanitizer("synccheck", 90),
)
PARTS = sorted({step.part for step in STEPS})


def run(steps: Sequence[Step], end: float, logs: Path, python: str, note: Callable[[list[Row]], None]) -> list[Row]:
    """Run steps one after another.

    Args:
        end: when they end, by ``time.monotonic``.
        logs: a folder for their output and the rounds of benchmarks.
        note: called after each step with a row for every one of them, those not reached as well.
    """
    logs.mkdir(parents=True, exist_ok=True)
    rows = [Row(step.name, Outcome.NOT_REACHED) for step in steps]
    for number, step in enumerate(steps):
        left = min(step.seconds, end - time.monotonic())
        if left <= 0:
            continue
        print(f"[{number + 1}/{len(steps)}] {step.name}: at most {left:.0f} s", flush=True)
        rows[number] = _run(step, left, logs / f"{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}.log", python)
        print(f"    {rows[number].outcome} after {rows[number].seconds:.0f} s: {rows[number].found}", flush=True)
        note(rows)
    return rows


def _run(step: Step, seconds: float, log: Path, python: str) -> Row:
    program = _find(step.program) if step.program else None
    if step.program and program is None:
        return Row(step.name, Outcome.SKIPPED, found=f"{step.program} is not installed")
    saved = log.with_suffix(".rounds")
    saved.unlink(missing_ok=True)
    values = {PYTHON: python, SAVED: str(saved), step.program: program}
    command = [values.get(word) or word for word in step.command]
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **step.environment},
            start_new_session=True,
        )
        try:
            outcome = Outcome.FAILED if process.wait(timeout=seconds) else Outcome.PASSED
        except subprocess.TimeoutExpired:
            outcome = Outcome.RAN_OUT
        finally:
            _end(process)
    text = log.read_text(encoding="utf-8", errors="replace")
    measured = tuple(_rounds(saved.read_text(encoding="utf-8"))) if saved.exists() else ()
    found = re.findall(step.finds, text)[-1:] if step.finds else [f"{len(measured)} ways"] if measured else []
    if outcome is Outcome.PASSED and found and step.finds == _COUNTS and " passed" not in found[0]:
        outcome = Outcome.SKIPPED
    if outcome in (Outcome.FAILED, Outcome.RAN_OUT):
        found = [*found, _last_line(text), f"({log.name})"]
    return Row(step.name, outcome, time.monotonic() - begin, " ".join(filter(None, found)), measured)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started, torchrun's ranks among them, which have sessions of their own and would keep the GPU."""
    import psutil  # type: ignore[import-untyped]

    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/local/cuda/bin")


def _rounds(text: str) -> Iterable[Measured]:
    """What benchmarks/common.py ``save`` has written."""
    for line in text.splitlines():
        saved = json.loads(line)
        for name, seconds in saved["seconds"].items():
            yield Measured(saved["title"], name, tuple(seconds))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def exit_code(rows: Iterable[Row]) -> int:
    return 0 if all(row.outcome in (Outcome.PASSED, Outcome.SKIPPED) for row in rows) else 1


def no_gpu() -> str | None:
    """Why there is no GPU to run on; None if there is one."""
    try:
        import torch
    except ImportError:
        return f"no CUDA device: torch is not installed for {sys.executable}"
    if torch.cuda.is_available():
        return None
    return f"no CUDA device: torch {torch.__version__} of {sys.executable} sees none; docs/gpu.md stays as it is"


def machine(command: str) -> dict[str, str]:
    """The device and versions, for the page."""
    import torch

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
        "date": date.today().isoformat(),
        "commit": _output("git", "describe", "--always", "--dirty") or "unknown",
        "Python, torch, CUDA": f"{sys.version.split()[0]}, {torch.__version__}, {torch.version.cuda}",
        "NCCL, driver": f"{'.'.join(map(str, torch.cuda.nccl.version()))}, {driver[0] if driver else 'unknown'}",
        "megatron-core": _version("megatron-core"),
        "Transformer Engine": _version("transformer-engine"),
        "command": f"`{command}`",
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """Of a program; empty if it is not there or fails."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def missing_packages() -> str | None:
    """What to do where packages are missing without which no step runs; None if all are there."""

    def there(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of its parent
            return False

    missing = " ".join(package for module, package in PACKAGES.items() if not there(module))
    if not missing:
        return None
    platforms = " ".join(f"--platform manylinux{tag}_{platform.machine()}" for tag in ("_2_28", "2014"))
    return (
        f"not installed for {sys.executable}, and no step runs without: {missing}\n"
        "Where there is a network, in this checkout, whose build/wheels is then brought here:\n"
        f"    python3 -m pip download --no-deps --only-binary=:all: --implementation cp --python-version "
        f"{sys.version_info.major}.{sys.version_info.minor} {platforms} -d build/wheels {missing}\n"
        "Here, once:\n"
        "    python3 -m pip install --no-index --no-deps --target build/site build/wheels/*.whl\n"
        "    export PYTHONPATH=$PWD/build/site"
    )


def interpreter() -> str:
    """A Python in which this checkout is installed: this one, or one in ``build/gpu`` that sees the packages of this one.

    Raises:
        subprocess.CalledProcessError: pip cannot install the checkout; it has printed why.
    """
    probe = "import megatron.pipeline.patches as p, sys; sys.exit(not p.__file__.startswith(sys.argv[1]))"
    if subprocess.run([sys.executable, "-c", probe, str(ROOT)], cwd="/", capture_output=True, check=False).returncode == 0:
        return sys.executable
    folder = ROOT / "build" / "gpu"
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8")
    python = str(folder / "bin" / "python")
    install = ("install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=True)
    return python


def main(arguments: Sequence[str], steps: Sequence[Step] = STEPS) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="for all steps; the default is 9 with --part, and 30 without")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--part", type=int, choices=PARTS, help="steps that together take at most 9 minutes")
    choice.add_argument("--only", nargs="+", metavar="STEP", help="some steps, by their names")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs/gpu.md", help="has the markers between which tables are written"
    )
    options = parser.parse_args(arguments)
    if options.only and (unknown := set(options.only) - {step.name for step in steps}):
        parser.error(f"no steps are named {', '.join(sorted(unknown))}: there are {', '.join(step.name for step in steps)}")
    if (reason := no_gpu() or missing_packages()) is not None:
        print(reason, file=sys.stderr)
        return 2
    _, old, _ = parts_of(options.page)
    about = machine(shlex.join(["python", "scripts/gpu.py", *arguments]))
    chosen = [step for step in steps if step.name in (options.only or [step.name]) and step.part == (options.part or step.part)]
    logs, order = ROOT / "runs" / "gpu", [step.name for step in steps]
    end = began + 60 * (options.minutes or (9 if options.part else 30))
    rows = run(chosen, end, logs, interpreter(), lambda rows: write(options.page, report(old, about, rows, order)))
    print(f"{options.page} has the tables, {logs} the output")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
