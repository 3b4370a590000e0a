"""``scripts/compare.py``: what its table says of two runs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.timeline import Timed, Timeline
from megatron.pipeline.training.trace import read_median_trace


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", Path(__file__).parents[2] / "scripts" / "compare.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        ((2.0, 1.5), (0.5, 0.25), "bit-identical"),
        ((2.0, 1.5), (0.5, 0.2500001), "loss bit-identical, norm within 4e-07"),
        ((2.0, 1.5000001), (0.5, 0.25), "loss within 7e-08, norm bit-identical"),
    ],
)
def test_differences(compare: ModuleType, losses: tuple[float, ...], norms: tuple[float, ...], expected: str) -> None:
    def run(losses: tuple[float, ...], norms: tuple[float, ...]) -> object:
        records = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]
        return compare.Run("any", records, Path())

    assert compare.difference(run(losses, norms), run((2.0, 1.5), (0.5, 0.25))) == expected


def test_another_launcher_starts_the_ranks(compare: ModuleType, tmp_path: Path) -> None:
    """Here it only prints what it is to run on every rank."""
    flags = ["--launcher", "echo 'on all ranks:'", "--iterations", "7", "--", "--mock-data"]
    assert compare._train("zb-v", tmp_path / "log.txt", compare._parse(flags)) == 0
    words = (tmp_path / "log.txt").read_text()
    assert words.startswith(f"on all ranks: {sys.executable} {compare.PROGRAM} --mock-data --pipeline-schedule zb-v ")
    assert "--exit-interval 7 " in words


def test_the_picture_shows_the_iteration_of_median_length(tmp_path: Path) -> None:
    timelines = [Timeline(((Timed(Pass(Kind.F, 0, 0), 0.0, seconds),),)) for seconds in (9.0, 8.0, 3.0, 1.0, 2.0)]
    for number, timeline in enumerate(timelines, start=1):
        (tmp_path / f"iteration_{number:07d}.json").write_text(timeline.to_json())
    assert read_median_trace(str(tmp_path), warm_up=2) == timelines[4]
    assert read_median_trace(str(tmp_path / "none"), warm_up=2) is None
