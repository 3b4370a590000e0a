"""``mpipe launch --dry-run``: what a start would refuse or leave out, what ranks need, and how long an iteration takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import refusal
from launch.launched import STAND_IN
from megatron.pipeline.patches import compat

from megatron.pipeline.cli import dry_run, main
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.flags import packages
from megatron.pipeline.launch import script
from megatron.pipeline.planner import Variant, device
from megatron.pipeline.tune.candidate import Candidate, Cluster
from megatron.pipeline.tune.iteration import Result, evaluate

MODEL = (
    "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1 --global-batch-size 16 "
    "--bf16 --tokenizer-type NullTokenizer --vocab-size 65535 --pipeline-model-parallel-size 4"
)
SHELL = """\
OPTIONS=(--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --micro-batch-size 1
  --global-batch-size 16 --bf16 --tokenizer-type NullTokenizer --vocab-size 65535 --pipeline-model-parallel-size 4)
torchrun --nproc-per-node 4 pretrain_gpt.py ${OPTIONS[@]} --tp-comm-overlap
"""


def answer(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> dict[str, Any]:
    """What ``--json`` prints."""
    capsys.readouterr()
    assert main(["launch", "--dry-run", "--json", *" ".join(words).split()]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture(autouse=True)
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """All packages are there, and nothing may be started."""
    monkeypatch.setattr(dry_run, "absent", lambda engine, folder: [])
    monkeypatch.setattr(script, "prepare", None)


def test_one_answer_before_a_job_is_queued(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, 0, f"--nproc-per-node 8 --gpu h100 {STAND_IN} {MODEL} --pipeline-schedule v-half")
    assert found["starts"] and found["fits"] and found["gpus"] == 8 and found["gpu"] == "H100-80GB"
    memory = found["memory"]
    assert len(memory["ranks"]) == 4 and (memory["dp"], memory["schedule"]) == (2, "v-half")
    low, high = found["tokens_per_second_range"]
    assert low < found["tokens_per_second"] < high
    assert found["tokens_per_second"] * found["iteration_seconds"] == pytest.approx(16 * 1024)
    graphed = answer(
        capsys, 0, f"{STAND_IN} {MODEL} --pipeline-schedule zb-h1 --disable-bias-linear --cuda-graph-impl transformer_engine"
    )
    assert graphed["starts"], "a Transformer Engine that is not here is taken for the newest"
    assert main(["launch", "--dry-run", "--gpu", "H100-80GB", str(STAND_IN), *MODEL.split()]) == 0
    said = capsys.readouterr().out
    assert "stock:" in said and "likely" in said and said.endswith("it starts; nothing was started\n")


def test_graphs_are_answered_where_no_transformer_engine_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{MODEL} --disable-bias-linear --pipeline-schedule zb-h1 --cuda-graph-impl"
    assert answer(capsys, 0, flags, "transformer_engine")["starts"]
    answer(capsys, 2 if compat.version() < "0.19" else 0, flags, "local")
    monkeypatch.setattr(compat, "version", lambda: "0.18.2")
    assert answer(capsys, 2, flags, "local")["refused"].startswith("--cuda-graph-impl local needs megatron-core 0.19")


def test_a_file_that_others_wrote_is_answered_with_what_adapt_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SHELL)
    more = f"--config {file} --pipeline-schedule zb-v"
    assert "with --adapt leaves it out" in answer(capsys, 2, more)["refused"]
    found = answer(capsys, 0, more, "--adapt")
    assert found["refused"] is None and found["left_out"][0].startswith("--tp-comm-overlap leaves inputs")
    assert not any("tp-comm-overlap" in warning for warning in found["warnings"])
    assert any("--tp-comm-overlap" in warning for warning in answer(capsys, 0, f"--config {file}")["warnings"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--save x", "--save x without --save-interval"),
        ("--pipeline-schedule zb-v3", "unknown schedule 'zb-v3'"),
        ("--pipeline-schedule zb-v --fp4-format e2m1", "--fp4-format e2m1 is not tested with delayed weight gradients"),
        ("--pipeline-schedule seq-1f1b --hidden-dropout 0.1", "dropout masks"),
        ("--num-layers 18", "--num-layers 18 do not split evenly"),
        ("--no-such-flag", "unknown flag --no-such-flag"),
    ],
)
def test_what_would_be_refused_is_one_line(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, 2, MODEL, flags)
    assert words in found["refused"] and not found["starts"]
    assert words in refusal(capsys, "launch --dry-run", str(STAND_IN), MODEL, flags)


def test_its_own_flags_behind_the_script_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` was called an unknown flag of Megatron-LM."""
    said = refusal(capsys, "launch --dry-run", str(STAND_IN), "--world-size=8", MODEL)
    assert "--world-size=8 is a flag of mpipe launch itself: give it before the script" in said


def test_exit_codes_say_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert answer(capsys, 1, MODEL, "--hidden-size 16384")["fits"] is False
    assert "there is no script none.py" in refusal(capsys, "launch --dry-run none.py", MODEL)
    monkeypatch.setattr(dry_run, "absent", packages.absent)
    monkeypatch.setattr(packages, "SCRIPTS", ("no_such_package",))
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "train.py").touch()
    found = answer(capsys, 3, str(tmp_path / "train.py"), MODEL, "--transformer-impl local")
    assert found["missing"] == ["no_such_package"] and not found["starts"] and found["memory"]


@pytest.mark.parametrize(("flags", "variant"), [("--pipeline-schedule stock", "1f1b"), ("--pipeline-schedule gis", "gis")])
def test_seconds_are_those_of_tune(flags: str, variant: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu = device.named("A100-80GB")
    found = answer(capsys, 0, f"--world-size 8 --gpu {gpu.name} {MODEL} {flags}")
    prediction = predicted([*MODEL.split(), *flags.split()], world_size=8)
    chunks = prediction.schedule.placement.chunks
    candidate = Candidate(prediction.args, {}, Variant(variant, chunks), tuple(prediction.layers))
    result = evaluate(Cluster(replace(gpu, memory=1e18), 8, 8), candidate)
    assert isinstance(result, Result) and found["iteration_seconds"] == pytest.approx(result.seconds, rel=0.02)
