"""``mpipe tune`` as users meet it: the table, the report, the files, and one line for what is wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from command import refusal
from tune import forked_ranks
from tune.small import Here

from megatron.pipeline.cli import main, tune
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.cli.progress import Progress
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner.costmodel import origin
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.tune import search
from megatron.pipeline.tune.iteration import Result

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
MODEL = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 65535 --train-iters 1 --lr 1e-4"
).split()
BATCH = ["--global-batch-size", "32"]
FOUR = ["--gpus", "4", "--gpu", "A100-80GB"]
FEW = "--pipeline 2,4 --micro-batch-sizes 1 --schedules 1f1b,zb-h1 --processes 1".split()


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a small search, and what it printed."""
    directory = tmp_path_factory.mktemp("tuned") / "deep" / "x"
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patched.setattr(search, "_pool", lambda processes: Here())
        assert main(["tune", *MODEL, *BATCH, *FOUR, *FEW, "-o", str(directory)]) == 0
    assert "\r" not in err.getvalue() and "0:00:0" not in err.getvalue(), "a bar is for terminals"
    return directory, out.getvalue()


def test_the_table_has_the_best_and_stock(searched: tuple[Path, str]) -> None:
    directory, text = searched
    assert text.startswith("0.537 billion parameters on 4 x A100-80GB, 4 per node; 32 samples of 2048 tokens per iteration\n")
    assert re.search(r"^\d+ trainings planned, \d+ skipped as slower; \d+ do not fit$", text, re.M)
    assert text.count("tokens/s    MFU") == 2
    gain = re.search(
        r"^the fastest of ours is \+(\d+\.\d)% against stock's(, within the error of 4%: keep what you have)?$", text, re.M
    )
    assert gain and (float(gain[1]) > 4) is (gain[2] is None)
    assert re.search(r"^the best: .*; its fullest GPU likely needs \d+\.?\d* to \d+\.?\d* GiB of 76$", text, re.M)
    for name in ("best.yaml", "second.yaml", "third.yaml", "stock.yaml", "throughput.png", "report.json"):
        assert f"wrote {directory / name}\n" in text and (directory / name).stat().st_size > 0
    flags = f"--config {directory / 'best.yaml'} --data-path ...\n"
    assert text.endswith(
        f"\ntorchrun --nproc-per-node 4 pretrain_gpt.py {flags}"
        f"mpipe launch --nproc-per-node 4 Megatron-LM/pretrain_gpt.py {flags}"
    )
    assert "Published trainings of this class had 0.87 to 1.12 times the predicted\ntokens/s" in text
    report = json.loads((directory / "report.json").read_text())
    likely = [0.873 * report["best"][0]["tokens_per_second"], 1.121 * report["best"][0]["tokens_per_second"]]
    assert report["best"][0]["tokens_per_second_range"] == pytest.approx(likely)
    assert f"\nthe best: {likely[0] / 1e3:.3g} to {likely[1] / 1e3:.3g} k tokens/s, learnt from 88 published throughputs" in text
    assert "\nassumes Transformer Engine, whose attention is fused: --transformer-impl local is without\n" in text
    assert (directory / "throughput.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_has_all_parts(searched: tuple[Path, str]) -> None:
    report = json.loads((searched[0] / "report.json").read_text())
    assert (report["gpus"], report["gpu"], report["seq_length"]) == (4, "A100-80GB", 2048)
    assert report["planned"] > 0 and report["left_out"] == 0
    layouts = [tuple(each[name] for name in ("tp", "cp", "ep", "pp", "dp", "micro_batch_size")) for each in report["best"]]
    assert len(set(layouts)) == len(layouts) == 3, "each layout once"
    for each in report["best"] + report["stock"] + report["front"]:
        assert sum(each["parts"].values()) == pytest.approx(each["iteration_seconds"])
        assert each["tokens_per_second"] == pytest.approx(32 * 2048 / each["iteration_seconds"])
        assert each["tp"] * each["cp"] * each["pp"] * each["dp"] == 4
        assert len(each["ranks"]) == each["pp"]
        size = each["bytes"]
        assert size["state"] + size["activations"] + size["other"] == pytest.approx(size["total"])
        assert size["total"] == pytest.approx(max(rank["total"] for rank in each["ranks"]))
        assert 0 <= each["bubble"] < 1 and each["lost_to"] in each["parts"]
    best, stock = report["best"][0], report["stock"][0]
    assert best["tokens_per_second"] > stock["tokens_per_second"] and stock["schedule"].startswith("stock")


def test_of_equal_ones_the_first_is_the_fastest_that_is_likely_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of tokens per second, and of the most bytes of 76 that are likely; in each layout."""
    made = SimpleNamespace
    gpu, known = made(memory=76), made(low=0.96)
    monkeypatch.setattr(tune, "_range", lambda what, result: known)
    monkeypatch.setattr(tune, "likely_bytes", lambda result: (0, result.fullest.total))
    monkeypatch.setattr(search, "place", lambda candidate: candidate)
    monkeypatch.setattr(tune, "place", lambda candidate: candidate)

    def order(*rows: tuple[float, float, int]) -> list[tuple[float, float]]:
        """Of what was found in layouts that are numbered."""
        results = [
            SimpleNamespace(
                tokens_per_second=speed, seconds=1 / speed, fullest=SimpleNamespace(total=size), candidate=(at,), device=gpu
            )
            for speed, size, at in rows
        ]
        ranked = tune.ranked(search.SearchResult(results=cast("list[Result]", results)))
        return [(one.tokens_per_second, one.fullest.total) for one in ranked]

    assert order((100, 79, 1), (98, 70, 2), (97, 60, 3)) == [(98, 70), (100, 79), (97, 60)]
    assert order((100, 79, 1), (99, 75, 1), (95, 60, 3)) == [(99, 75), (95, 60)]
    assert order((100, 79, 1), (97, 78, 2), (95, 60, 3)) == [(97, 78), (100, 79), (95, 60)]
    assert order((100, 75, 1), (99, 50, 2)) == [(100, 75), (99, 50)]


def test_what_is_written_runs_as_it_is(searched: tuple[Path, str]) -> None:
    """Accepted by all that training checks, with the memory that was said."""
    directory, _ = searched
    report = json.loads((directory / "report.json").read_text())
    told = dict(zip(("best", "second", "third"), report["best"], strict=True)) | {"stock": report["stock"][0]}
    for name, row in told.items():
        found = predicted(["--config", str(directory / f"{name}.yaml")], world_size=4)
        assert found.args.data_parallel_size == row["dp"] and found.microbatches == row["microbatches"]
        assert found.fullest.total == pytest.approx(row["bytes"]["total"], rel=0.01)
        first, second = (directory / f"{name}.yaml").read_text().splitlines()[:2]
        assert first.startswith("# Found by mpipe tune for 4 x A100-80GB, 4 per node: ")
        assert second.startswith(f"# Predicted: {row['tokens_per_second']:.0f} tokens/s, ")


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "--pipeline 2 --micro-batch-sizes 1 --tensor 1 --schedules zb-h1 --sequence-length 1024 --processes 1".split()
    assert main(["tune", *MODEL, *BATCH, *FOUR, *few, "-o", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["seq_length"] == 1024 and told == json.loads((tmp_path / "report.json").read_text())
    assert told["files"] == [str(tmp_path / f"{name}.yaml") for name in ("best", "stock")]
    assert yaml.safe_load((tmp_path / "best.yaml").read_text())["seq-length"] == 1024


@pytest.mark.usefixtures("here")
def test_without_what_draws_all_is_said_but_the_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And why stock cannot interleave, where it cannot."""
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    few = "--pipeline 4 --tensor 1 --micro-batch-sizes 1 --schedules zb-h1 --processes 1".split()
    wrong = ["--global-batch-size", "6"]
    assert main(["tune", *MODEL, *wrong, *FOUR, *few, "-o", str(tmp_path)]) == 0
    text, warning = capsys.readouterr()
    assert re.search(
        r"^the fastest of ours is \+\d+\.\d% against stock's, which cannot interleave there: 6 microbatches are not a multiple "
        r"of 4 pipeline ranks$",
        text,
        re.M,
    )
    assert f"wrote {tmp_path / 'report.json'}\n" in text and "throughput.png" not in text
    assert warning.startswith(f"WARNING: no picture in {tmp_path / 'throughput.png'} (") and "pip install 'matplotlib" in warning
    assert not (tmp_path / "throughput.png").exists() and (tmp_path / "best.yaml").exists()


class Stops(Here):
    """A pool in a process that is told to end while it plans: the first, of stock's, is done by then."""

    pools = 0

    def __init__(self, after: int, first: int) -> None:
        Stops.pools += 1
        self.left = after if Stops.pools >= first else 10**6

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().submit(function, *arguments)


@pytest.mark.parametrize(("first", "planned"), [(2, True), (1, False)])
def test_stopped_it_says_what_is_the_best_so_far(
    first: int, planned: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM, or Ctrl-C, which raises the same."""
    monkeypatch.setattr(Stops, "pools", 0)
    monkeypatch.setattr(search, "_pool", lambda processes: Stops(1, first))
    few = "--pipeline 4 --tensor 1 --micro-batch-sizes 1 --schedules zb-h1".split()
    before = signal.getsignal(signal.SIGTERM)
    assert main(["tune", *MODEL, *BATCH, *FOUR, *few, "-o", str(tmp_path)]) == 130
    text, line = capsys.readouterr()
    assert signal.getsignal(signal.SIGTERM) == before
    assert line == "mpipe: unfinished: stopped before all trainings were planned\n"
    assert (tmp_path / "best.yaml").exists() == (tmp_path / "report.json").exists() == planned
    if planned:
        assert re.search(r" were skipped when it was stopped$", text, re.M)
        assert "\nthe best is stock's, megatron-core's own schedule; none of ours was planned\n" in text
        assert yaml.safe_load((tmp_path / "best.yaml").read_text())["pipeline-schedule"] == "stock"


@pytest.mark.usefixtures("here")
def test_where_stock_is_the_best_all_say_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """V-Min, where stages are equal and there is memory for others."""
    few = "--pipeline 4 --tensor 1 --micro-batch-sizes 1 --schedules v-min".split()
    equal = ["--vocab-size", "127", "--untie-embeddings-and-output-weights"]
    assert main(["tune", *MODEL, *BATCH, *equal, *FOUR, *few, "-o", str(tmp_path)]) == 0
    text, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert report["best_is_stock"] and report["best"][0] == report["stock"][0]
    faster = (
        r"the best is stock's, megatron-core's own schedule, and none of ours that was planned is faster by more than the error"
    )
    assert re.search(rf"^{faster}$", text, re.M) and re.search(r"^4 trainings planned, \d+ skipped as slower", text, re.M)
    best, stock = ((tmp_path / f"{name}.yaml").read_text() for name in ("best", "stock"))
    assert "and none of ours that was planned is faster by more than the error" in best.splitlines()[0]
    assert best.split("\n\n")[1] == stock.split("\n\n")[1]


def test_where_not_all_of_ours_were_planned_it_says_how_many_were() -> None:
    stock, found = search.SearchResult(tried=3), search.SearchResult(tried=15, left_out=40)
    assert "none of the 12 of ours that were planned, of at least 52, is faster" in tune._stocks(found, stock)


def test_all_that_is_missing_is_asked_for_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = "--num-attention-heads, --seq-length and"
    asked = refusal(capsys, "tune", "--num-layers", "8", "--hidden-size", "64")
    assert f"give --gpus N, --gpu NAME, {lacking} --global-batch-size; known GPUs are A100" in asked
    asked = refusal(capsys, "costs", "--num-layers", "8", "--hidden-size", "64")
    assert f"give --gpu NAME, {lacking} --micro-batch-size; known GPUs are A100" in asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            BATCH,
            "give --gpus N and --gpu NAME; known GPUs are A100-40GB, A100-80GB, B200, B300, GB200, GB300, H100-80GB, H20, H200, "
            "MI300X, MI355X, RTX-4090, RTX-5090, RTX-6000-Ada, RTX-PRO-6000 and files of --gpu-from",
        ),
        ([*BATCH, *FOUR, "--gpu-from", "configs/none.json"], "configs/none.json"),
        (["--measure"], "--measure is gone: measure with mpipe rehearse, .*: mpipe tune --gpu-from runs/rehearsal/costs.json"),
        ([*BATCH, "--gpus", "4"], "give --gpu NAME; known GPUs are"),
        (
            [*BATCH, "--gpus", "4", "--gpu", "A100-8GB"],
            "unknown GPU 'A100-8GB'; known are .* did you mean A100-80GB.* writes gpu.json",
        ),
        ([*BATCH, "--gpus", "4", "--gpu", "none.json"], "none.json: No such file or directory"),
        ([*BATCH, "--gpus", "12", "--gpu", "A100-80GB"], "12 GPUs are not whole nodes of 8: change --gpus or --gpus-per-node"),
        ([*BATCH, "--gpus", "0", "--gpu", "A100-80GB"], "--gpus: expected a whole number of at least 1, got 0"),
        ([*BATCH, *FOUR, "--pipeline", "two"], "--pipeline: 'two': expected whole numbers of at least 1, such as 2 or 2,4"),
        ([*BATCH, *FOUR, "--schedules", "zb-h3"], "unknown schedule 'zb-h3'; known are .* did you mean zb-h2 or zb-h1"),
        ([*BATCH, *FOUR, "--no-such-flag"], "--no-such-flag"),
        ([*BATCH, *FOUR, "-o", str(TINY)], "is a file: give a directory"),
        ([*BATCH, *FOUR, "-o", f"{TINY}/below"], "Not a directory"),
        ([*BATCH, *FOUR, "--expert", "2,4"], "--expert 2,4 is for a model with --num-experts: leave it out"),
        (FOUR, "give --global-batch-size\n"),
        (
            "--gpus 64 --gpu A100-80GB --global-batch-size 7 --tensor 1 --pipeline 4".split(),
            "there is no layout of this model for 64 GPUs and a batch of 7: a batch of 7 cannot be divided among 16 data-par",
        ),
        (
            [*BATCH, *FOUR, "--tensor", "3"],
            "there is no layout of this model for 4 GPUs and a batch of 32: 4 GPUs are not a multiple of TP 3\n",
        ),
        (
            [*BATCH, *FOUR, "--tensor", "2", "--pipeline", "3,4"],
            "there is no layout of .*: 4 GPUs are not a multiple of TP 2 x CP 1 x PP 3 or 4\n",
        ),
        (
            (
                "--global-batch-size 64 --num-layers 16 --gpus 16 --gpu A100-80GB --work 1 --processes 1 --pipeline 16 "
                "--tensor 1 --micro-batch-sizes 1 --schedules v-auto"
            ).split(),
            r"nothing that fits was found with --work 1, and \d+ trainings were not planned: raise it, or restrict the search",
        ),
        (
            [*BATCH, *"--gpus 8 --gpu A100-80GB --pipeline 8 --num-layers 4 --tensor 1".split()],
            "there is no layout .*: --num-layers 4 cannot be split over 8 pipeline ranks",
        ),
    ],
)
def test_refusals(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refusal(capsys, "tune", *MODEL, *arguments))


@pytest.mark.usefixtures("here")
def test_a_model_that_fits_nowhere_is_told_what_is_short_and_what_would_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wide = [*MODEL, *BATCH, "--num-layers", "16", "--hidden-size", "8192", "--num-attention-heads", "64"]
    few = "--tensor 1 --schedules 1f1b --micro-batch-sizes 1 --processes 1".split()
    line = refusal(capsys, "tune", *wide, *few, "--gpus", "2", "--gpu", "A100-80GB", "-o", str(tmp_path))
    match = re.search(
        r"fits nowhere on 2 x A100-80GB: its fullest GPU needs at least (\d+\.\d) GiB, (\d+\.\d) GiB more than the 76 "
        r"that it may take \(PP 2; (\d+\.\d) GiB of it are weights, gradients and optimizer state\); what would fit: "
        r"(\d+) GPUs instead of 2",
        line,
    )
    assert match, line
    needs, short, state = map(float, match.groups()[:3])
    assert short == pytest.approx(needs - 76, abs=0.11) and 76 < state < needs
    gpus = match[4]
    assert main(["tune", *wide, *few, "--gpus", gpus, "--gpu", "A100-80GB", "-o", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"], "the suggested change fits"


def test_progress_is_one_line_of_a_terminal_and_silent_elsewhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress("things") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with Progress("things") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().err.split("\r\x1b[K") == [
        "",
        f"[{'#' * 10:20}] things: 1 of 2",
        f"[{'#' * 20}] things: 2 of 2",
        "",
    ]


def test_progress_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is done, not of the time in which what there is to do was counted."""
    clock = SimpleNamespace(monotonic=partial(next, iter([0.0, 100.0, 130.0, 180.0])))
    monkeypatch.setattr("megatron.pipeline.cli.progress.time", clock)
    with Progress("things") as progress:
        progress(0, 50)
        progress(10, 50, 0.1)
        progress(20, 50)
    lines = ["things: 0 of 50", "things: 10 of 50, about 4 min left", "things: 20 of 50, about 2 min left"]
    assert capsys.readouterr().err.splitlines() == lines


@pytest.mark.rest
def test_measured_searched_and_verified_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two ranks, of which one stage alone has times here."""
    forked_ranks.use(monkeypatch)
    monkeypatch.chdir(tmp_path)
    model = ["--config", str(TINY), *"--global-batch-size 8 --num-layers 4 --hidden-size 64 --seq-length 64".split()]
    directory, stage = tmp_path / "tuned", StageCosts(4e-3, 4e-3, 4e-3, 1e6)
    measured = describe(predicted([*model, "--micro-batch-size", "4", "--transformer-impl", "local"]).args)
    of = origin.described(measured, "none", [1] * 4)
    (machine := tmp_path / "costs.json").write_text(json.dumps(Costs((stage,) * 4).fields() | {"of": of}))

    def run(*arguments: str) -> str:
        assert main(["tune", *arguments]) == 0
        return capsys.readouterr().out

    sizes = ["--tensor", "1", "--micro-batch-sizes", "4"]
    few = f"--pipeline 2 --schedules zb-h1 --iterations 3 --gpu-from {machine}".split()
    text = run(*model, "--gpus", "2", "--gpu", "A100-80GB", *sizes, *few, "-o", str(directory), "--verify")
    table = text.split("predicted/measured")[1]
    for name in ("best: ", "stock: stock "):
        row = next(line for line in table.splitlines() if line.startswith(name))
        assert re.search(r" \d[\d.e-]* +\d[\d.e-]* +\d+\.\d\d +\d", row), row
    assert "failed" not in table and "WARNING" not in table


@pytest.mark.rest
def test_less_memory_than_a_gpu_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without being asked, a search leaves a twentieth of it alone."""
    few = [
        *MODEL,
        *BATCH,
        *"--gpus 2 --gpu A100-80GB --micro-batch-sizes 8 --schedules 1f1b --tensor 1".split(),
        "-o",
        str(tmp_path),
    ]
    peaks = []
    for more in ([], ["--gpu-memory", "12"]):
        assert main(["tune", *few, *more, "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["best"][0]["bytes"]["total"])
    assert peaks[1] <= 12 * 2**30 < peaks[0] <= 76 * 2**30
    assert "--gpu-memory 81: A100-80GB has 80 GB" in refusal(capsys, "tune", *few, "--gpu-memory", "81")
