"""Run what this project has for GPUs on those of this machine, and write what was found into docs/gpu.md.

    make gpu                                  # or: python scripts/gpu.py
    python scripts/gpu.py --minutes 9 --only "CUDA tests"

One GPU is enough; tests that need more are skipped. The steps are the list ``STEPS``: the tests marked ``cuda``, torch's and
CUDA's sanitizers, and benchmarks. Each has a time limit, and none outlasts ``--minutes``. A step that fails or runs out of time
is a row that says so; the others still run. The page is written after each step.

It uses the packages of the Python that runs it and installs nothing but this checkout, in ``build/gpu``, where that is needed.
Exit code: 0 if all steps passed or were skipped for want of a tool, 1 if one did not, 2 without a GPU, which changes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import StrEnum
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- written by make gpu: begin -->", "<!-- written by make gpu: end -->"
PYTHON, SAVED = "{python}", "{saved}"  # in commands: the interpreter, and the file for the rounds of a benchmark
PACKAGES = {"megatron.core": "megatron-core", "pytest": "pytest", "hypothesis": "hypothesis", "rich": "rich", "numba": "numba"}


class Outcome(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    RAN_OUT = "ran out of time"
    SKIPPED = "skipped"
    NOT_REACHED = "not reached"


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
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    finds: str = ""
    program: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """The seconds of the rounds of one way of a benchmark."""

    title: str
    name: str
    rounds: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    name: str
    outcome: Outcome
    seconds: float = 0.0
    found: str = ""
    measured: tuple[Measured, ...] = ()


_TESTS = (PYTHON, "-m", "pytest", "-m", "cuda", "-rs", "-p", "no:cacheprovider")
_COUNTS = r"\d+ (?:passed|failed|skipped|error|deselected)[^\n]* in [\d.]+s"
# Tests whose kernels run in pytest's own process: a sanitizer need not follow ranks.
_KERNELS = (
    "tests/model/test_split_linear.py",
    "tests/model/test_vocabulary.py",
    "tests/runtime/test_offload_store.py",
    "tests/optimizer/test_on_gpu.py",
    "-k",
    "accumulates or embeddings or gradients_are_the_same or copy_is_complete",
)


def _sanitizer(tool: str, **environment: str) -> Step:
    command = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9", *_TESTS, *_KERNELS)
    return Step(f"compute-sanitizer {tool}", command, 120, r"[A-Z]+ SUMMARY: [^\n]+", "compute-sanitizer", environment)


def _benchmark(name: str, seconds: float, *flags: str) -> Step:
    return Step(" ".join([name, *flags]), (PYTHON, f"benchmarks/{name}", *flags, "--save", SAVED), seconds)


STEPS = (
    Step("CUDA tests", (*_TESTS, "tests"), 420, _COUNTS),
    _benchmark("queues.py", 60),
    _benchmark("split_backward.py", 90, *"--hidden 4096 --tokens 4096 --dtype bf16".split()),
    _benchmark("vocabulary_kernels.py", 120),
    replace(_benchmark("rehearse_llama.py", 330), finds=r"predicted tokens/s: [^\n]+"),
    _benchmark("offload.py", 240, *"--hidden 4096 --seq 4096 8192".split()),
    Step(
        "torch's sanitizer of streams",
        (*_TESTS, "tests/on_gpus/test_one_gpu.py", "tests/runtime/test_offload_store.py", "-k", "losses or gradients"),
        180,
        _COUNTS,
        environment={"TORCH_CUDA_SANITIZER": "1"},
    ),
    _sanitizer("memcheck", PYTORCH_NO_CUDA_MEMORY_CACHING="1"),  # so that it knows where each tensor ends
    _sanitizer("racecheck"),
    _sanitizer("synccheck"),
)


def run(steps: Sequence[Step], seconds: float, logs: Path, python: str, note: Callable[[list[Row]], None]) -> list[Row]:
    """Run steps one after another.

    Args:
        seconds: for all of them.
        logs: a folder for their output and the rounds of benchmarks.
        note: called after each step with a row for every one of them, those not reached as well.
    """
    logs.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    rows = [Row(step.name, Outcome.NOT_REACHED) for step in steps]
    for number, step in enumerate(steps):
        left = min(step.seconds, end - time.monotonic())
        if left <= 0:
            continue
        print(f"[{number + 1}/{len(steps)}] {step.name}: at most {left:.0f} s", flush=True)
        rows[number] = _run(step, left, logs / f"{number + 1}.log", python)
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
        # A session of its own: all that it starts ends with it.
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
    if outcome is not Outcome.PASSED:
        found = [*found, _last_line(text), f"({log.name})"]
    return Row(step.name, outcome, time.monotonic() - begin, " ".join(filter(None, found)), measured)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
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


def report(about: Mapping[str, str], rows: Sequence[Row]) -> str:
    """The tables in Markdown: the machine, what came of every step, and medians and spread of the benchmarks."""
    lines = ["| | |", "|---|---|", *(f"| {name} | {_cell(value)} |" for name, value in about.items()), ""]
    lines += ["| step | outcome | took | found |", "|---|---|---:|---|"]
    lines += [f"| {_cell(row.name)} | {row.outcome} | {row.seconds:.0f} s | {_cell(row.found)} |" for row in rows]
    for title in dict.fromkeys(one.title for row in rows for one in row.measured):
        lines += ["", f"{title}:", "", "| | median | middle half of the rounds | rounds |", "|---|---:|---:|---:|"]
        for one in (one for row in rows for one in row.measured if one.title == title):
            low, middle, high = (1000 * each for each in _quartiles(one.rounds))
            lines.append(f"| {_cell(one.name)} | {middle:.3f} ms | {low:.3f} to {high:.3f} ms | {len(one.rounds)} |")
    return "\n".join(lines)


def _quartiles(rounds: Sequence[float]) -> tuple[float, float, float]:
    if len(rounds) == 1:
        return rounds[0], rounds[0], rounds[0]
    low, middle, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return low, middle, high


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write(page: Path, text: str) -> None:
    """Put a text between the markers of a page.

    Raises:
        ValueError: the page does not have both markers, once each.
    """
    whole = page.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise ValueError(f"{page} does not have the lines {BEGIN} and {END}, once each")
    before, rest = whole.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}", encoding="utf-8")


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


def missing_packages() -> list[str]:
    """Of those that tests and benchmarks import."""

    def there(module: str) -> bool:
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of its parent
            return False

    return [package for module, package in PACKAGES.items() if not there(module)]


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="for all steps; the default is 30")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="some steps, by their names")
    parser.add_argument(
        "--page", type=Path, default=ROOT / "docs/gpu.md", help="has the markers between which tables are written"
    )
    options = parser.parse_args(arguments)
    if options.only and (unknown := set(options.only) - {step.name for step in steps}):
        parser.error(f"no steps are named {', '.join(sorted(unknown))}: there are {', '.join(step.name for step in steps)}")
    if (reason := no_gpu()) is not None:
        print(reason, file=sys.stderr)
        return 2
    if missing := missing_packages():
        print(f"not installed, so steps that import them will fail: {', '.join(missing)}", flush=True)
    about = machine(" ".join(["python scripts/gpu.py", *arguments]))
    if missing:
        about["missing"] = ", ".join(missing)
    chosen = [step for step in steps if not options.only or step.name in options.only]
    logs = ROOT / "runs" / "gpu"
    rows = run(chosen, 60 * options.minutes, logs, interpreter(), lambda rows: write(options.page, report(about, rows)))
    print(f"{options.page} has the tables, {logs} the output")
    return exit_code(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
