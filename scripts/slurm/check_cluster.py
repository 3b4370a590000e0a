"""Checks the batch scripts on the SLURM that ``local_cluster.sh`` has started: two emulated nodes without GPUs.

Jobs that are stopped go on and end with the losses of a run without SLURM, bit for bit; a killed rank ends its job, which
names it and leaves no process; a job that does not get on gives up; and schedules are compared. Every wait has an end.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
CONFIG = ROOT / "configs" / "tiny.yaml"
ITERATIONS = 12
FLAGS = f"--mock-data --eval-iters 0 --log-interval 1 --train-iters {ITERATIONS} --pipeline-model-parallel-size"

_LONGEST_WAIT = 240  # seconds
_ENDS = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


class Job:
    """A batch script that has been submitted from a directory, with parameters in its environment."""

    def __init__(self, place: Path, script: str, flags: str, held: bool = False, **parameters: str) -> None:
        options = ["--parsable", "--nodes=2", "--time=30", *["--hold"] * held]
        command = ["sbatch", *options, str(SCRIPTS / script), *shlex.split(flags)]
        environment = os.environ | {"CONFIG": str(CONFIG)} | parameters
        self.number = _output(command, cwd=place, env=environment).strip()
        self._output = place / f"slurm-{self.number}.out"

    def send(self, *flags: str) -> None:
        """A signal to the job's processes, as SLURM itself sends it: see scancel."""
        _output(["scancel", *flags, self.number])

    def release(self) -> None:
        _output(["scontrol", "release", self.number])

    def await_end(self) -> tuple[str, int]:
        """Its last state, such as COMPLETED, and how often it was started again."""
        self.wait("its end", self._has_ended)
        return self._state(), self.restarts()

    def says(self, words: str) -> None:
        self.wait(f"'{words}'", lambda: words in self.printed())

    def restarts(self) -> int:
        """How often it has been put into the queue again."""
        return int(self._fact("Restarts"))

    def wait(self, what: str, happened: Callable[[], bool]) -> None:
        """Until something has happened.

        Raises:
            TimeoutError: it has not, or the job has ended without; with all that the job printed.
        """
        deadline = time.monotonic() + _LONGEST_WAIT
        while not happened():
            if self._has_ended() and not happened():
                raise TimeoutError(f"job {self.number} has ended, {self._state()}, with no sign of {what}:\n{self.printed()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {self.number}: no sign of {what} in {_LONGEST_WAIT} s:\n{self.printed()}")
            time.sleep(0.1)

    def printed(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def check(self, holds: bool, what: str) -> None:
        """Raises an AssertionError with all that the job printed unless something holds."""
        if not holds:
            raise AssertionError(f"job {self.number}: {what}; it printed:\n{self.printed()}")

    def _has_ended(self) -> bool:
        return self._state() in _ENDS

    def _state(self) -> str:
        return self._fact("JobState")

    def _fact(self, name: str) -> str:
        words = _output(["scontrol", "show", "job", self.number]).split()
        return next(word.split("=", 1)[1] for word in words if word.startswith(f"{name}="))


def stopped_jobs_go_on(place: Path) -> None:
    """Once as before a time limit (the batch shell hears of it), once as when preempted (all processes of the ranks do)."""
    reference = place / "reference.jsonl"
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 4".split()]
    flags = [*f"{FLAGS} 4".split(), "--config", str(CONFIG), "--metrics", str(reference)]
    _output([*torchrun, str(ROOT / "pretrain_gpt.py"), *flags], env=os.environ | {"OMP_NUM_THREADS": "1"})

    metrics = place / "a run" / "metrics.jsonl"
    job = Job(place, "pretrain_gpt.sbatch", f"{FLAGS} 4 --num-workers 1", RANKS_PER_NODE="2", RUN="a run")
    _stop(job, metrics, "--batch", "--signal=USR1")
    _stop(job, metrics, "--signal=TERM")
    state, restarts = job.await_end()
    job.check((state, restarts) == ("COMPLETED", 2), f"{state} after {restarts} restarts instead of COMPLETED after 2")
    job.check(_losses(metrics) == _losses(reference), f"its losses {_losses(metrics)} are not {_losses(reference)}")
    logs = sorted(path.name for path in (place / "a run" / "logs" / f"{job.number}.2").glob("rank_*.log"))
    job.check(logs == [f"rank_{rank}.log" for rank in range(4)], f"logs of {logs}")


def _stop(job: Job, metrics: Path, *how: str) -> None:
    """Send a signal when this start has trained a little, and wait until the job is in the queue again."""
    done, restarts = len(_losses(metrics)), job.restarts()
    job.wait("an iteration", lambda: len(_losses(metrics)) > done)
    job.send(*how)
    job.wait("a requeue", lambda: job.restarts() > restarts)


def a_job_that_is_stopped_as_it_begins_goes_on(place: Path) -> None:
    """The signal comes as soon as the job can hear it, before there are ranks; a second job in its directory is turned away."""
    job = Job(place, "pretrain_gpt.sbatch", f"{FLAGS} 2 --train-iters 2", RANKS_PER_NODE="1", RUN="early")
    job.says(f"job {job.number}.0 starts")
    job.send("--batch", "--signal=USR1")
    job.wait("a requeue", lambda: job.restarts() == 1)
    job.says(f"job {job.number}.1 begins")
    other = Job(place, "pretrain_gpt.sbatch", f"{FLAGS} 2 --train-iters 2", RANKS_PER_NODE="1", RUN="early")
    state, _ = other.await_end()
    other.check(state == "FAILED" and f"job {job.number} is training in early" in other.printed(), state)
    found = job.await_end()
    job.check(found == ("COMPLETED", 1), f"{found} instead of COMPLETED after 1 restart")


def a_killed_rank_ends_the_job(place: Path) -> None:
    """The message names rank and node; the job is not started again."""
    job = Job(place, "pretrain_gpt.sbatch", f"{FLAGS} 2 --train-iters 500", RANKS_PER_NODE="1", RUN="killed")
    job.wait("an iteration", lambda: bool(_losses(place / "killed" / "metrics.jsonl")))
    os.kill(_ranks(job.number)[1], signal.SIGKILL)
    state, restarts = job.await_end()
    job.check((state, restarts) == ("FAILED", 0), f"{state} after {restarts} restarts instead of FAILED after 0")
    job.check("rank 1 on node d2 ended first: signal 9 (KILL)" in job.printed(), "no word about rank 1 on node d2")
    job.check(not _ranks(job.number), f"ranks go on: processes {_ranks(job.number)}")


def a_job_that_does_not_get_on_gives_up(place: Path) -> None:
    """Its fourth start at the same iteration is the last one."""
    job = Job(place, "pretrain_gpt.sbatch", f"{FLAGS} 2", held=True, RANKS_PER_NODE="1", RUN="idle")
    starts = place / "idle" / "logs" / f"{job.number}.starts"
    starts.parent.mkdir(parents=True)
    starts.write_text("0\n0\n0\n")
    job.release()
    state, _ = job.await_end()
    job.check(state == "FAILED" and "3 restarts in a row have found the training at iteration 0" in job.printed(), state)


def schedules_are_compared(place: Path) -> None:
    schedules = "stock zb-v"
    job = Job(place, "compare.sbatch", f"{FLAGS} 2", RANKS_PER_NODE="1", SCHEDULES=schedules, ITERATIONS="3", RUN="compared")
    state, _ = job.await_end()
    job.check(state == "COMPLETED", state)
    lines = [line for line in job.printed().splitlines() if line.split()[:1] in (["stock"], ["zb-v"])]
    job.check(len(lines) == 2 and "reference" in lines[0] and "loss bit-identical" in lines[1], "another table was expected")
    job.check((place / "compared" / "timelines.png").stat().st_size > 1000, "no picture")
    stock, ours = (_losses(place / "compared" / name / "metrics.jsonl") for name in schedules.split())
    job.check(len(stock) == 3 and stock == ours, f"losses {ours} instead of {stock}")


CHECKS = (
    schedules_are_compared,
    stopped_jobs_go_on,
    a_job_that_is_stopped_as_it_begins_goes_on,
    a_killed_rank_ends_the_job,
    a_job_that_does_not_get_on_gives_up,
)


def main() -> int:
    """Run all checks; returns the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(prefix="a place ") as folder:
        print(f"{len(CHECKS)} checks, of about 4 minutes together", flush=True)
        for check in CHECKS:
            print(f"{check.__name__.replace('_', ' ')}: ", end="", flush=True)
            began = time.monotonic()
            try:
                check(Path(folder))
            except (AssertionError, TimeoutError) as error:
                print(f"{check.__name__}: {error}", file=sys.stderr)
                return 1
            print(f"yes ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


def _losses(path: Path) -> list[tuple[int, float]]:
    """Iteration and loss of every line that is complete."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(record["iteration"], record["loss"]) for record in records]


def _ranks(job: str) -> dict[int, int]:
    """The processes of a job's ranks on this machine, by rank: the Python that rank.sh has started, not what that starts."""
    found: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = dict(entry.split("=", 1) for entry in (process / "environ").read_text().split("\0") if "=" in entry)
            command = (process / "cmdline").read_text().split("\0")
            parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
            started_by = (Path("/proc") / parent / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):  # it has ended, or is none of ours
            continue
        trains = any(word.endswith("pretrain_gpt.py") for word in command[:2]) and "rank.sh" in started_by
        if trains and environment.get("SLURM_JOB_ID") == job:
            found[int(environment["RANK"])] = int(process.name)
    return found


def _output(command: Sequence[str], cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """What a command prints.

    Raises:
        AssertionError: it failed.
    """
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=_LONGEST_WAIT, check=False)
    if done.returncode:
        raise AssertionError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
