"""``pretrain_gpt.py`` refuses what cannot work: one line, exit code 2, before any process group exists."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from pool import forked
from session.test_planning import MODEL

from megatron.pipeline.distributed import processes
from megatron.pipeline.session.startup_lines import first_words, obstacles
from megatron.pipeline.trainer import program

LAUNCHER = Path(__file__).parents[2] / "pretrain_gpt.py"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-schedule zb-h9", "unknown schedule 'zb-h9'"),
        ("--pipeline-schedule file:/nowhere.json", "cannot read /nowhere.json: No such file or directory"),
        ("--pipeline-memory-limit much", "--pipeline-memory-limit much: expected a share of 1F1B's peak"),
        ("--post-validation --post-validation-copy disk", "'disk'"),
    ],
)
def test_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    slept: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    assert program.main(f"{MODEL} {flags}".split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
    assert not slept
    monkeypatch.setenv("RANK", "1")
    assert program.main(f"{MODEL} {flags}".split()) == 2
    assert slept == [10], "until then torchrun has ended the other ranks, if rank 0 ends with the same error"
    assert err.startswith("pretrain_gpt.py: ")


def test_costs_file_and_memory_limit_in_bytes(tmp_path: Path) -> None:
    stage = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "activation": 2**20, "retained": 2**20}
    (tmp_path / "costs.json").write_text(json.dumps({"hop": 0.1, "stages": [stage, stage]}))
    flags = f"{MODEL} --pipeline-costs {tmp_path}/costs.json --pipeline-memory-limit".split()
    program.prepare([*flags, "2MiB"], world_size=2)
    program.prepare([*flags, "1.0"], world_size=2)
    with pytest.raises(ValueError, match="limit"):
        program.prepare([*flags, "1MiB"], world_size=2)


@pytest.mark.parametrize(("unit", "activation", "refused"), [("bytes", 2**10, "zb-h1"), ("microbatches", 2**20, "bytes: give")])
def test_a_costs_file_says_its_unit_of_memory(tmp_path: Path, unit: str, activation: float, refused: str) -> None:
    """Bytes may be few, and microbatches many: nothing is guessed where the file says it."""
    stage = {"forward": 1.0, "backward": 1.0, "weight": 1.0, "activation": activation}
    (tmp_path / "costs.json").write_text(json.dumps({"unit": unit, "stages": [stage, stage]}))
    flags = f"{MODEL} --pipeline-costs {tmp_path}/costs.json --pipeline-memory-limit".split()
    program.prepare([*flags, "1.0"], world_size=2)
    with pytest.raises(ValueError, match=f"--pipeline-memory-limit (of )?1KiB.* {refused}"):
        program.prepare([*flags, "1KiB"], world_size=2)
    if unit == "bytes":
        program.prepare([*flags, "2KiB"], world_size=2)


def launcher(stderr: Path, arguments: list[str]) -> None:
    """``pretrain_gpt.py`` as a process of its own, which was forked with torch imported."""
    with stderr.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = [str(LAUNCHER), *arguments]
    runpy.run_path(str(LAUNCHER), run_name="__main__")


def test_launcher_exits_with_2(tmp_path: Path) -> None:
    process = forked(launcher, tmp_path / "stderr", [*MODEL.split(), "--num-layer", "4"])
    process.join(timeout=120)
    assert process.exitcode == 2
    assert (tmp_path / "stderr").read_text() == "pretrain_gpt.py: unknown flag --num-layer; did you mean --num-layers?\n"


@pytest.mark.parametrize(("flags", "words"), [("", ", going on from saved"), ("--finetune", ", with the weights of saved")])
def test_what_is_taken_from_a_checkpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, words: str) -> None:
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    args, _, pipeline = program.prepare(f"{MODEL} --load {tmp_path} {flags}".split(), world_size=2)
    [line] = first_words(args, pipeline, Path("saved"))
    assert line.startswith(" schedule zb-h1 on 2 ranks") and line.endswith(words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--pipeline-schedule zb-h2", ["tied embeddings"]),
        ("--pipeline-schedule zb-h2 --untie-embeddings-and-output-weights", []),
        ("--pipeline-schedule zb-h2 --vocab-parallel 2", []),
        ("--pipeline-schedule zb-v --calculate-per-token-loss", []),
        ("--pipeline-schedule 1f1b --calculate-per-token-loss", ["tied embeddings", "how many tokens"]),
    ],
)
def test_what_keeps_ranks_waiting_in_spite_of_post_validation_is_said(flags: str, words: list[str]) -> None:
    args, _, pipeline = program.prepare(f"{MODEL} {flags} --post-validation".split(), world_size=2)
    found = obstacles(args, pipeline.placement)
    assert [word for word, obstacle in zip(words, found, strict=True) if word in obstacle] == words
    assert not obstacles(args | {"post_validation": False}, pipeline.placement)
