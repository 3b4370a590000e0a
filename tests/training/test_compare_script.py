"""``scripts/compare.py``: what its table says of two runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import compare
import pytest
from rich.console import Console

from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        ((2.0, 1.5), (0.5, 0.25), "bit-identical"),
        ((2.0, 1.5), (0.5, 0.2500001), "loss bit-identical, norm within 4e-07"),
        ((2.0, 1.5000001), (0.5, 0.25), "loss within 7e-08, norm bit-identical"),
    ],
)
def test_differences(losses: tuple[float, ...], norms: tuple[float, ...], expected: str) -> None:
    def run(losses: tuple[float, ...], norms: tuple[float, ...]) -> compare.Run:
        records = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]
        return compare.Run("any", records, Path())

    assert compare.difference(run(losses, norms), run((2.0, 1.5), (0.5, 0.25))) == expected


@pytest.mark.parametrize("costs", ["profile", "given.json", None])
def test_costs_are_measured_once_and_stock_takes_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, costs: str | None) -> None:
    """``--pipeline-costs profile`` beside ``stock``."""
    started: list[tuple[str, str, str | None]] = []

    class Recorded(compare.Training):
        def __init__(self, schedule: str, args: Namespace, folder: str = "") -> None:
            self.schedule, self.folder = schedule, Path(args.output) / (folder or schedule)
            command = self._command(args)
            flag = "--pipeline-costs"
            started.append((schedule, self.folder.name, command[command.index(flag) + 1] if flag in command else None))

        def wait(self) -> int:
            return 0

        def runs(self) -> bool:
            return False

        def iterate(self) -> None: ...
        def end(self) -> None: ...

    monkeypatch.setattr(compare, "Training", Recorded)
    flags = [f"--pipeline-costs={costs}"] if costs else []
    args = compare._parse(["--schedules", "stock", "zb-h1", "zb-v", "--output", str(tmp_path), "--", "--mock-data", *flags])
    list(compare._in_turn(args, Console()))
    measuring = [("zb-v", "costs", None)] if costs == "profile" else []
    path = str(tmp_path / "costs" / "costs.json") if measuring else costs
    assert started == [*measuring, ("stock", "stock", None), ("zb-h1", "zb-h1", path), ("zb-v", "zb-v", path)]


RANK = """
import os, sys, time
metrics, schedule = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--metrics", "--pipeline-schedule"))
journal = os.path.join(os.path.dirname(metrics), "..", "journal")
if schedule == "fails":
    sys.exit(3)
for iteration in range(4):
    time.sleep(0.02)
    if os.environ["RANK"] == "0":
        print(schedule, file=open(journal, "a"))
        print('{}', file=open(metrics, "a"), flush=True)
    time.sleep(0.3)  # so that this rank is stopped before its next iteration
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the script trains with, in these tests."""
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    monkeypatch.setattr(compare, "PROGRAM", path)
    return path


@pytest.mark.rest
@pytest.mark.slow
@pytest.mark.usefixtures("program")
def test_trainings_take_turns(tmp_path: Path) -> None:
    args = compare._parse(["--schedules", "a", "b", "--ranks", "2", "--output", str(tmp_path)])
    ended = [(one.schedule, one.wait(), len(one.metrics)) for one in compare._in_turn(args, Console())]
    assert ended == [("a", 0, 4), ("b", 0, 4)]
    assert (tmp_path / "journal").read_text().split() == ["a", "b"] * 4


@pytest.mark.usefixtures("program")
def test_a_training_that_fails_ends_the_others(tmp_path: Path) -> None:
    sizes = ["--schedules", "a", "fails", "--ranks", "1", "--launcher", "env RANK=0", "--output", str(tmp_path)]
    args = compare._parse(sizes)
    trainings = compare._in_turn(args, Console())
    failed = next(trainings)
    assert failed.schedule == "fails" and failed.wait()
    trainings.close()
    assert len((tmp_path / "journal").read_text().split()) < 4, "the other one was stopped, and then ended"


@pytest.mark.whole  # torchrun gives ranks 30 s to end
def test_ranks_that_are_stopped_end_with_the_script(tmp_path: Path, program: Path) -> None:
    """A killed script once left them stopped for ever."""
    sizes = ["--schedules", "a", "b", "--ranks", "1", "--output", str(tmp_path)]
    start = f"import compare, sys; from pathlib import Path; compare.PROGRAM = Path({str(program)!r}); compare.main({sizes!r})"
    script = subprocess.Popen([sys.executable, "-c", start], cwd=Path(compare.__file__).parent)
    while not (tmp_path / "journal").exists():
        assert script.poll() is None
        time.sleep(0.1)
    script.kill()
    script.wait()

    def ranks() -> list[Path]:
        lines = (path for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
        return [path for path in lines if str(program).encode() in path.read_bytes()]

    for _ in range(600):
        if not ranks():
            return
        time.sleep(0.1)
    raise AssertionError(f"60 s later there are still {ranks()}")


def test_table_and_picture_show_the_fastest_iteration(tmp_path: Path) -> None:
    """Table and picture once came from different iterations, and the median of a busy machine put 1F1B behind stock."""
    seconds = (0.5, 0.4, 3.0, 1.0, 2.0)  # the first two warm up
    for number, length in enumerate(seconds, start=1):
        timeline = Timeline(((Timed(Pass(Kind.F, 0, 0), 0.0, length),),))
        record = {"timeline": json.loads(timeline.to_json())}
        (tmp_path / f"iteration_{number:07d}.json").write_text(json.dumps(record))
    metrics = [
        {"iteration": number, "iteration_seconds": length, "bubble_rate": length / 10, "loss": 1.0, "grad_norm": 1.0}
        | {"peak_activation_bytes": [2**20]}
        for number, length in enumerate(seconds, start=1)
    ]
    run = compare.Run("zb-v", metrics, tmp_path)
    assert run.fastest["iteration"] == 4
    assert run.timeline.makespan == 1.0
    cells = [next(iter(column.cells)) for column in compare._table([run]).columns]
    assert cells[-3:] == ["1000.0", "0.0%", "1.00"]


def test_rehearsals_are_compared_by_what_they_predict_of_the_same_computation(tmp_path: Path) -> None:
    """Each training is a process of its own, and the same stage took up to a twelfth longer in one than in another."""
    runs = []
    for name, family, kinds, (forward, backward, weight) in (
        ("stock", "1f1b", ("F", "BW"), (0.2, 0.15, 0.15)),
        ("zb-h1", "zb-h1", ("F", "B", "W"), (0.1, 0.1, 0.1)),
        ("zb-h2", "zb-h2", ("F", "B", "W"), (0.3, 0.2, 0.05)),
    ):
        costs = uniform(linear(2), forward=forward, backward=backward, weight=weight)
        plan = Request(family, 2, 2, costs).plan().schedule
        found = {"plan": plan.fields(), "layers": [1, 1], "step_seconds": 0.01, "replicas_seconds": None}
        (tmp_path / name).mkdir()
        (tmp_path / name / "rehearsal.json").write_text(json.dumps(found | {"passes": [{"kind": kind} for kind in kinds]}))
        (tmp_path / name / "costs.json").write_text(costs.to_json())
        metrics = [{"iteration": 1, "iteration_seconds": 9.0, "loss": 1.0, "grad_norm": 1.0, "peak_activation_bytes": [2**20]}]
        runs.append(compare.Run(name, metrics, tmp_path / name))
    alike = compare._alike(runs)
    seconds = [[(one.forward, one.backward, one.weight) for one in run.costs.stages] for run in alike if run.costs]
    assert seconds == [[(0.1, 0.15, 0.15)] * 2, *[[(0.1, 0.1, 0.05)] * 2] * 2]
    assert alike[0].seconds == pytest.approx(3 * (0.1 + 0.3) + 0.01)
    last = [list(column.cells)[-1] for column in compare._table(alike).columns]
    assert last[-3:] == [
        f"{1e3 * alike[2].seconds:.1f}",
        f"{alike[2].timeline.bubble_rate:.1%}",
        f"{1.21 / alike[2].seconds:.2f}",
    ]


def test_one_machine_rehearses_and_a_launcher_measures() -> None:
    assert "one at a time on this machine" in compare._note(compare._parse(["--ranks", "4"]))
    assert "of the fastest iteration" in compare._note(compare._parse(["--launcher", "srun"]))
