"""Train the same model under several schedules and compare: ``compare.py --iterations 20 -- --config configs/tiny.yaml ...``.

Every schedule trains from the same seed and data; what follows ``--`` goes to ``pretrain_gpt.py``. Prints one table and writes
one picture with a timeline per schedule. On one machine every training is rehearsed: the ranks share its cores, run their passes
one at a time, and the seconds are those of an iteration with a device for every rank. The trainings take turns, an iteration
each, so that a machine that becomes slower or faster does so for all of them; and a stage of the same layers computes the same
under all schedules, so that it takes the least that any of them measured. With ``--launcher``, for devices that the ranks have,
they run one after another and the seconds are measured: those of each schedule's fastest iteration.

With ``--pipeline-costs profile`` all but ``stock`` are planned from measured costs. On one machine a short training under the
last schedule measures them, which should have the most chunks, and passes W.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.pipeline.flags.settings import PROFILE
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.names import STOCK
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.view.picture import draw
from megatron.pipeline.runtime.profiling import ITERATIONS
from megatron.pipeline.session.rehearsal.files import COSTS, RESULT
from megatron.pipeline.session.trace import trace_of

PROGRAM = Path(__file__).parent.parent / "pretrain_gpt.py"
_WARM_UP = 2  # iterations that are slower than the rest


class Training:
    """A schedule's training, started by torchrun on a free port unless there is a launcher; its output goes to a file."""

    def __init__(self, schedule: str, args: argparse.Namespace, folder: str = "") -> None:
        self.schedule, self.folder = schedule, Path(args.output) / (folder or schedule.replace("/", "_"))
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in (*self.folder.glob("iteration_*"), self.folder / "metrics.jsonl", self.folder / RESULT):
            old.unlink(missing_ok=True)
        with self.log.open("w") as file:
            environment = {"OMP_NUM_THREADS": "1", **os.environ}
            self._process = subprocess.Popen(
                self._command(args),
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=_end_with_parent,  # noqa: PLW1509  # this script has no threads
            )

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One record per iteration that has ended."""
        return list(map(json.loads, self._lines()))

    def runs(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        return self._process.wait()

    def iterate(self) -> None:
        """Let the ranks go on until another iteration has ended, and stop them there; or until they end."""
        done = self._lines()
        self._signal(signal.SIGCONT)
        while self.runs() and len(self._lines()) == len(done):
            time.sleep(0.01)
        self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Let the ranks go on, and torchrun end them."""
        self._signal(signal.SIGCONT)
        self._process.terminate()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank, not to torchrun, which watches them."""
        with suppress(FileNotFoundError, ProcessLookupError):
            for children in Path(f"/proc/{self._process.pid}/task").glob("*/children"):
                for child in children.read_text().split():
                    os.kill(int(child), number)

    def _lines(self) -> list[str]:
        with suppress(FileNotFoundError):
            return (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]  # the last one may be half a record
        return []

    def _command(self, args: argparse.Namespace) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
        start = [*shlex.split(args.launcher), sys.executable] if args.launcher else torchrun
        command = [*start, str(PROGRAM), *args.flags, "--pipeline-schedule", self.schedule]
        if args.costs and self.schedule != STOCK:
            command += ["--pipeline-costs", args.costs]
        command += ["--metrics", str(self.folder / "metrics.jsonl")]
        if args.launcher:
            command += ["--pipeline-trace", str(self.folder)]
        else:
            command += ["--rehearse", "--rehearse-dir", str(self.folder)]
            if "--rehearse-hop" not in args.flags:
                command += ["--rehearse-hop", "0"]  # what is measured among ranks that share cores differs from run to run
        return [*command, "--exit-interval", str(args.iterations), "--log-interval", "1", "--eval-iters", "0"]


class Run(NamedTuple):
    """What one schedule's training left.

    Attributes:
        metrics: one record per iteration.
        folder: has a trace of every iteration, or what a rehearsal found.
        costs: of a rehearsal, by which its passes are timed; None where the iterations themselves were measured.
        step: of a rehearsal, seconds of the optimizer's step.
    """

    schedule: str
    metrics: list[dict[str, Any]]
    folder: Path
    costs: Costs | None = None
    step: float = 0.0

    @property
    def fastest(self) -> dict[str, Any]:
        return min(self.metrics[_WARM_UP:] or self.metrics, key=lambda record: record["iteration_seconds"])

    @property
    def rehearsal(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / RESULT).read_text())
        return found

    @property
    def timeline(self) -> Timeline:
        if self.costs:
            return simulate(Schedule.from_json(json.dumps(self.rehearsal["plan"])), self.costs)
        return Timeline.from_json(trace_of(str(self.folder), self.fastest["iteration"]).read_text())

    @property
    def seconds(self) -> float:
        """Of an iteration: with a device for every rank, or the fastest one that was measured."""
        if self.costs is None:
            return float(self.fastest["iteration_seconds"])
        return self.timeline.makespan + self.step + float(self.rehearsal["replicas_seconds"] or 0.0)


def main(argv: Sequence[str]) -> int:
    """Run, print and draw; returns the exit code: that of the first run that failed, if one did."""
    args = _parse(argv)
    console = Console(width=max(150, Console().width))  # a cut-off digit would hide what the table is for
    runs: list[Run] = []
    for training in (_one_after_another if args.launcher else _in_turn)(args, console):
        if code := training.wait():
            words = f"{training.schedule} failed; the end of {training.log}:\n{training.log.read_text()[-3000:]}"
            console.print(words, markup=False)
            return code
        runs.append(Run(training.schedule, training.metrics, training.folder))
    runs = runs if args.launcher else _alike(runs)
    console.print(_table(runs))
    console.print(_note(args), markup=False, highlight=False)
    picture = Path(args.output) / "timelines.png"
    draw({run.schedule: run.timeline for run in runs}, picture, unit="s")
    console.print(f"timelines: {picture}")
    return 0


def _alike(runs: list[Run]) -> list[Run]:
    """Rehearsed runs with the same seconds for the same computation: the least that any of them measured.

    Stages compute the same where as many have the same layers, and their backwards where these are split, or are not; optimizers
    where ranks have the same stages.
    """
    names, least = ("forward", "backward", "weight"), dict[Any, float]()
    rows: list[
        tuple[Costs, list[Any], str]
    ] = []  # of every run: its costs, and where among the least the seconds of each stage and of the step are
    for run in runs:
        costs, found = Costs.from_json((run.folder / COSTS).read_text()), run.rehearsal
        split = any(row["kind"] == "W" for row in found["passes"])
        places = [
            [(*found["layers"], number, name, split or name == "forward") for name in names]
            for number in range(len(costs.stages))
        ]
        step = str((found["layers"], found["plan"]["placement"]))
        rows.append((costs, places, step))
        least[step] = min(found["step_seconds"], least.get(step, math.inf))
        for stage, own in zip(costs.stages, places, strict=True):
            for name, place in zip(names, own, strict=True):
                least[place] = min(getattr(stage, name), least.get(place, math.inf))

    def alike(costs: Costs, places: list[list[Any]]) -> Costs:
        seconds = [{name: least[place] for name, place in zip(names, own, strict=True)} for own in places]
        return replace(costs, stages=tuple(replace(stage, **own) for stage, own in zip(costs.stages, seconds, strict=True)))

    return [
        run._replace(costs=alike(costs, places), step=least[step]) for run, (costs, places, step) in zip(runs, rows, strict=True)
    ]


def difference(run: Run, reference: Run) -> str:
    """How losses and gradient norms compare: ``bit-identical``, or the largest relative difference of any iteration.

    On another placement the same gradients are added up in another order for the norm.
    """
    words = {}
    for key, name in (("loss", "loss"), ("grad_norm", "norm")):
        pairs = [(ours[key], theirs[key]) for ours, theirs in zip(run.metrics, reference.metrics, strict=True)]
        equal = all(ours == theirs for ours, theirs in pairs)
        words[name] = (
            "bit-identical" if equal else f"within {max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs):.0e}"
        )
    return words["loss"] if len(set(words.values())) == 1 else ", ".join(f"{name} {how}" for name, how in words.items())


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    end = list(argv).index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--schedules", nargs="+", default=["stock", "interleaved", "zb-h1", "zb-v", "v-half"], help="the first is the reference"
    )
    parser.add_argument("--iterations", type=int, default=20, help="of each schedule, if --train-iters is not less")
    parser.add_argument("--ranks", type=int, default=4, help="processes on this machine")
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="runs what follows it on every rank, on any number of machines, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR "
        "and MASTER_PORT set; instead of --ranks",
    )
    parser.add_argument("--output", default="runs/compare", metavar="DIR", help="metrics, logs, traces and the picture")
    args = parser.parse_args(argv[:end])
    planned = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    planned.add_argument("--pipeline-costs", dest="costs")
    _, args.flags = planned.parse_known_args(argv[end + 1 :], args)
    return args


def _end_with_parent() -> None:
    """Have torchrun end, and its ranks with it, however this script ends: ranks that are stopped would stay for ever."""
    pr_set_pdeathsig = 1  # prctl(2)
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _one_after_another(args: argparse.Namespace, console: Console) -> Generator[Training, None, None]:
    for schedule in args.schedules:
        console.print(f"{schedule}: training under {args.launcher}", markup=False, highlight=False)
        yield Training(schedule, args)


def _in_turn(args: argparse.Namespace, console: Console) -> Generator[Training, None, None]:
    """The trainings when they have ended, the first one that fails before all others: no two of them run at a time."""
    trainings: list[Training] = []
    try:
        if args.costs == PROFILE:
            console.print(f"measuring the costs of passes under {args.schedules[-1]}", markup=False, highlight=False)
            short = vars(args) | {"costs": None, "iterations": min(args.iterations, ITERATIONS)}
            trainings = [Training(args.schedules[-1], argparse.Namespace(**short), "costs")]
            if trainings[0].wait():
                yield trainings[0]
            args.costs = str(trainings.pop().folder / COSTS)
        for schedule in args.schedules:
            console.print(f"{schedule}: starting {args.ranks} ranks", markup=False, highlight=False)
            trainings.append(Training(schedule, args))
            trainings[-1].iterate()
            if not trainings[-1].runs():
                yield trainings[-1]
        console.print("training all of them in turn, an iteration each")
        while running := [training for training in trainings if training.runs()]:
            for training in running:
                training.iterate()
                if not training.runs() and training.wait():
                    yield training
        yield from trainings
    finally:
        for training in trainings:
            training.end()


def _table(runs: list[Run]) -> Table:
    reference = runs[0]
    table = Table(title=f"after {len(reference.metrics)} iterations", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("schedule")
    timed = "iteration\nms", "bubble", f"times as fast\nas {reference.schedule}"
    peak = "peak activation\nMiB by rank"
    for column in ("loss", "grad norm", f"against {reference.schedule}", peak, *timed):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        last = run.metrics[-1]
        table.add_row(
            run.schedule,
            repr(last["loss"]),
            repr(last["grad_norm"]),
            "reference" if run is reference else difference(run, reference),
            " ".join(f"{peak / 2**20:.1f}" for peak in last["peak_activation_bytes"]),
            f"{1e3 * run.seconds:.1f}",
            f"{run.timeline.bubble_rate:.1%}",
            f"{reference.seconds / run.seconds:.2f}",
        )
    return table


def _note(args: argparse.Namespace) -> str:
    if args.launcher:
        return "ms: of the fastest iteration, the optimizer's step included."
    return (
        "ms: an iteration if every rank had a device of its own, from passes and optimizer steps that ran one at a time on this "
        "machine. Messages take no time, or what --rehearse-hop says."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
