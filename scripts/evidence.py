"""Train thousands of iterations on real text under several schedules, and write what differs into docs/evidence.md.

    python scripts/evidence.py                    # trains what is missing, then writes the table and the picture
    python scripts/evidence.py --only stock zb-v  # some of the trainings
    python scripts/evidence.py --report           # writes them from the trainings that are finished

Two pipeline ranks on this machine, one training at a time. A training that was stopped goes on from its last checkpoint; one that
is finished is not repeated. All is kept in ``--output``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCUMENT, PICTURE = ROOT / "docs/evidence.md", ROOT / "docs/images/evidence.png"
BEGIN, END = "<!-- scripts/evidence.py writes from here -->", "<!-- to here -->"
RANKS = 2
CHECKPOINTS_EVERY = 250
RESTART = 1000  # the iteration whose checkpoint of stock another schedule goes on from

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --pipeline-model-parallel-size 2 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 "
    "--adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 --tokenizer-type ByteLevelTokenizer --split 90,10,0 --num-workers 0 "
    "--eval-interval 250 --eval-iters 8 --log-interval 50 --seed 1234"
)
EXPERTS = (
    "--num-experts 4 --moe-layer-freq ([0]+[1])*2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-aux-loss-coeff 1e-2"
)
_EVALUATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


class Run(NamedTuple):
    """A training.

    Attributes:
        flags: added to the model's.
        reference: the name of the training that it is compared with.
        start: whose checkpoint of iteration ``RESTART`` it begins with, if not from nothing.
    """

    name: str
    flags: str
    reference: str = "stock"
    start: str | None = None


RUNS = [
    Run("stock", "--pipeline-schedule stock"),
    Run("zb-v", "--pipeline-schedule zb-v"),
    Run("zb-h2 post-validation", "--pipeline-schedule zb-h2 --post-validation --post-validation-when always"),
    Run("stock to v-half at 1,000", "--pipeline-schedule v-half", start="stock"),
    Run("v-half", "--pipeline-schedule v-half"),
    Run("zb-h2", "--pipeline-schedule zb-h2"),
    Run("zb-v vocab-parallel 2", "--pipeline-schedule zb-v --vocab-parallel 2"),
    Run("gis-h offload full", "--pipeline-schedule gis-h --offload full"),
    Run("experts stock", f"--pipeline-schedule stock {EXPERTS}", reference="experts stock"),
    Run("experts zb-v", f"--pipeline-schedule zb-v {EXPERTS}", reference="experts stock"),
]


class Found(NamedTuple):
    """What a training left.

    Attributes:
        losses: of training, by iteration.
        evaluations: mean losses of validation, by iteration.
        undone: iterations whose step was rolled back.
    """

    losses: dict[int, float]
    evaluations: dict[int, float]
    undone: int


def folder(run: Run, output: Path) -> Path:
    """Where a training keeps its log, metrics and checkpoints."""
    return output / re.sub(r"[^\w-]+", "_", run.name)


def found(run: Run, output: Path) -> Found:
    """What a training has left so far. Of an iteration that ran twice, before and after a stop, the last record counts."""
    where = folder(run, output)
    text = (where / "metrics.jsonl").read_text(encoding="utf-8") if (where / "metrics.jsonl").exists() else ""
    records = {record["iteration"]: record for record in map(json.loads, text.splitlines())}
    log = (where / "log.txt").read_text(encoding="utf-8") if (where / "log.txt").exists() else ""
    return Found(
        {iteration: records[iteration]["loss"] for iteration in sorted(records)},
        {int(iteration): float(loss) for iteration, loss in _EVALUATION.findall(log)},
        sum(record["optimizer_step"] == "undone" for record in records.values()),
    )


def is_finished(run: Run, output: Path, iterations: int) -> bool:
    """Whether its last iteration and the evaluation behind it are there."""
    left = found(run, output)
    return iterations in left.losses and iterations in left.evaluations


def train(run: Run, output: Path, iterations: int, data: str) -> None:
    """Train to the end, from the last checkpoint if there is one.

    Raises:
        RuntimeError: the training failed; has the end of its log.
    """
    where = folder(run, output)
    saved = where / "checkpoints"
    if run.start and not saved.exists():
        _copy_checkpoint(folder(_named(run.start), output) / "checkpoints", saved)
    saved.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += [str(ROOT / "pretrain_gpt.py"), *MODEL.split(), *run.flags.split(), "--data-path", data]
    command += ["--train-iters", str(iterations), "--metrics", str(where / "metrics.jsonl")]
    command += ["--save", str(saved), "--load", str(saved), "--save-interval", str(CHECKPOINTS_EVERY)]
    with (where / "log.txt").open("a", encoding="utf-8") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                time.sleep(5)
                _show(run, output, iterations)
        finally:
            if process.poll() is None:  # stopped by hand: SIGTERM saves a checkpoint
                process.terminate()
                process.wait(60)
    print(flush=True)
    if process.returncode:
        end = (where / "log.txt").read_text(encoding="utf-8")[-3000:]
        raise RuntimeError(f"{run.name} failed; the end of {where / 'log.txt'}:\n{end}")


def _copy_checkpoint(source: Path, target: Path) -> None:
    if not (source / f"iter_{RESTART:07d}").exists():
        raise RuntimeError(f"there is no checkpoint of iteration {RESTART} in {source}: train that first")
    shutil.copytree(source / f"iter_{RESTART:07d}", target / f"iter_{RESTART:07d}")
    (target / "latest_checkpointed_iteration.txt").write_text(str(RESTART), encoding="utf-8")


def _named(name: str) -> Run:
    return next(run for run in RUNS if run.name == name)


def _show(run: Run, output: Path, iterations: int) -> None:
    done = max(found(run, output).losses, default=0)
    print(f"{time.strftime('%H:%M:%S')} {run.name}: {done} of {iterations} iterations", end="\r", flush=True)


def row(run: Run, left: Found, reference: Found) -> str:
    """A row of the table: how a training compares with its reference over the iterations that both have."""
    common = [iteration for iteration in left.losses if iteration in reference.losses]
    apart = {iteration: abs(left.losses[iteration] - reference.losses[iteration]) for iteration in common}
    equal = sum(difference == 0 for difference in apart.values())
    last = common[-100:]
    mean = sum(left.losses[iteration] for iteration in last) / len(last)
    theirs = sum(reference.losses[iteration] for iteration in last) / len(last)
    final = max(left.evaluations)
    columns = [
        run.name,
        f"{len(common):,}",
        f"{mean:.4f}",
        f"{mean - theirs:+.4f}",
        f"{left.evaluations[final]:.4f}",
        f"{left.evaluations[final] - reference.evaluations[final]:+.4f}",
        f"{equal:,}",
        f"{max(apart.values()):.1e}",
        str(left.undone) if "post-validation" in run.flags else "",
    ]
    return f"| {' | '.join(columns)} |"


def table(output: Path, iterations: int) -> str:
    """All trainings that are finished, and the names of those that are not."""
    done = [run for run in RUNS if is_finished(run, output, iterations)]
    rows = [row(run, found(run, output), found(_named(run.reference), output)) for run in done if _named(run.reference) in done]
    head = (
        "| training | iterations | loss | against stock | validation | against stock | equal | largest | undone |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    missing = [run.name for run in RUNS if run not in done]
    note = f"\n\nNot finished yet: {', '.join(missing)}." if missing else ""
    return "\n".join([head, *rows]) + note


def draw(output: Path, iterations: int, picture: Path) -> None:
    """Smoothed training losses with the evaluations, and below them the differences of the training losses from the reference."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True)
    for run in RUNS:
        left, reference = found(run, output), found(_named(run.reference), output)
        if not is_finished(run, output, iterations) or not is_finished(_named(run.reference), output, iterations):
            continue
        at = list(left.losses)
        windows = [[left.losses[k] for k in at[max(0, i - 49) : i + 1]] for i in range(len(at))]
        (line,) = above.plot(at, [sum(window) / len(window) for window in windows], label=run.name, linewidth=1)
        above.plot(left.evaluations.keys(), left.evaluations.values(), "o", color=line.get_color(), markersize=3)
        apart = [abs(left.losses[k] - reference.losses[k]) for k in at if k in reference.losses]
        if any(apart):
            below.plot([k for k in at if k in reference.losses], apart, ".", color=line.get_color(), markersize=1)
    above.set(ylabel="loss: mean of 50 iterations; dots: validation", ylim=(1, 3.5))
    above.legend(fontsize=8, ncols=2)
    below.set(xlabel="iteration", ylabel="training loss, difference from stock", yscale="log")
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def report(output: Path, iterations: int, document: Path = DOCUMENT, picture: Path = PICTURE) -> None:
    before, _, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    behind = rest.partition(END)[2]
    document.write_text(f"{before}{BEGIN}\n\n{table(output, iterations)}\n\n{END}{behind}", encoding="utf-8")
    draw(output, iterations, picture)


def main(argv: Sequence[str] | None = None) -> int:
    """Train and report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--data-path", default="data/stdlib_text_document")
    parser.add_argument("--output", type=Path, default=Path("runs/evidence"), metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS], metavar="NAME")
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args(argv)
    runs = [run for run in RUNS if not args.report and (not args.only or run.name in args.only)]
    for run in runs:
        if not is_finished(run, args.output, args.iterations):
            try:
                train(run, args.output, args.iterations, args.data_path)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
    report(args.output, args.iterations)
    return 0


if __name__ == "__main__":
    sys.exit(main())
