"""Train the same model under several schedules and compare: ``compare.py --iterations 20 -- --config configs/tiny.yaml ...``.

The schedules run one after another, from the same seed and data; what follows ``--`` goes to ``pretrain_gpt.py``.
Prints one table and writes one picture with a measured timeline per schedule. Both show each schedule's fastest iteration: other
work on the machine only makes an iteration longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.trainer.trace import read_trace
from megatron.pipeline.view.picture import draw

PROGRAM = Path(__file__).parent.parent / "pretrain_gpt.py"
_WARM_UP = 2  # iterations that are slower than the rest


class Run(NamedTuple):
    """What one schedule's run left.

    Attributes:
        metrics: one record per iteration.
        traces: the directory with a trace of every iteration.
    """

    schedule: str
    metrics: list[dict[str, Any]]
    traces: Path

    @property
    def fastest(self) -> dict[str, Any]:
        """The metrics of the fastest iteration after the warm-up."""
        return min(self.metrics[_WARM_UP:] or self.metrics, key=lambda record: record["iteration_seconds"])

    @property
    def trace(self) -> tuple[dict[str, Any], Timeline]:
        """The record and the timeline of the fastest iteration."""
        return read_trace(str(self.traces), self.fastest["iteration"])

    @property
    def planned_bubble(self) -> float:
        """The idle share of the planned makespan: what a core or a GPU for every rank would leave."""
        return float(self.trace[0]["planned"]["makespan_bubble_rate"])


def main(argv: Sequence[str]) -> int:
    """Run, print and draw; returns the exit code: that of the first run that failed, if one did."""
    args = _parse(argv)
    console = Console(width=max(150, Console().width))  # a cut-off digit would hide what the table is for
    runs = []
    for schedule in args.schedules:
        where = f"under {args.launcher}" if args.launcher else f"on {args.ranks} ranks"
        console.print(f"{schedule}: training {where}", markup=False, highlight=False)
        log = Path(args.output) / schedule.replace("/", "_") / "log.txt"
        code = _train(schedule, log, args)
        if code:
            console.print(f"{schedule} failed; the end of {log}:\n{log.read_text()[-3000:]}", markup=False)
            return code
        metrics = [json.loads(line) for line in (log.parent / "metrics.jsonl").read_text().splitlines()]
        runs.append(Run(schedule, metrics, log.parent))
    console.print(_table(runs))
    console.print(_note(args, os.cpu_count() or 1), markup=False, highlight=False)
    picture = Path(args.output) / "timelines.png"
    draw({run.schedule: run.trace[1] for run in runs}, picture, unit="s")
    console.print(f"timelines of the fastest iterations: {picture}")
    return 0


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
    parser.add_argument("--schedules", nargs="+", default=["stock", "1f1b", "zb-h1", "v-half"], help="the first is the reference")
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
    args.flags = list(argv[end + 1 :])
    return args


def _train(schedule: str, log: Path, args: argparse.Namespace) -> int:
    """Run one schedule, with torchrun on a free port unless there is a launcher; its output goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    for old in (*log.parent.glob("iteration_*"), *log.parent.glob("metrics.jsonl")):
        old.unlink()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    start = [*shlex.split(args.launcher), sys.executable] if args.launcher else torchrun
    command = [*start, str(PROGRAM), *args.flags, "--pipeline-schedule", schedule]
    command += ["--metrics", str(log.parent / "metrics.jsonl"), "--pipeline-trace", str(log.parent)]
    command += ["--exit-interval", str(args.iterations), "--log-interval", "1", "--eval-iters", "0"]
    with log.open("w") as file:
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode


def _table(runs: list[Run]) -> Table:
    reference = runs[0]
    table = Table(title=f"after {len(reference.metrics)} iterations", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("schedule")
    planned = "planned\nbubble", f"planned\nx {reference.schedule}"
    peak = "peak activation\nMiB by rank"
    for column in ("loss", "grad norm", f"against {reference.schedule}", peak, *planned, "fastest\ns", "its\nbubble"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        last = run.metrics[-1]
        table.add_row(
            run.schedule,
            repr(last["loss"]),
            repr(last["grad_norm"]),
            "reference" if run is reference else difference(run, reference),
            " ".join(f"{peak / 2**20:.1f}" for peak in last["peak_activation_bytes"]),
            f"{run.planned_bubble:.1%}",
            f"{(1 - run.planned_bubble) / (1 - reference.planned_bubble):.2f}",
            f"{run.fastest['iteration_seconds']:.3f}",
            f"{run.fastest['bubble_rate']:.1%}",
        )
    return table


def _note(args: argparse.Namespace, cores: int) -> str:
    """How to read the table's times."""
    planned = "planned: with a core or a GPU for every rank; F, B and W take equally long unless --pipeline-costs says otherwise."
    if args.launcher or args.ranks <= cores:
        return planned
    return (
        f"{planned}\nfastest s: {args.ranks} ranks share {cores} cores here, so these seconds say nothing about a cluster. "
        "benchmarks/sleep_stages.py measures schedules on such a machine, with stages that sleep."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
