"""``mpipe rehearse``: the processes that it starts, and one line for what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command import refusal

from megatron.pipeline.cli import rehearse

ROOT = Path(__file__).parents[2]
SIZES = "--config configs/tiny.yaml --mock-data"


def command(*arguments: str) -> list[str]:
    return rehearse.torchrun([token for argument in arguments for token in argument.split()])


def test_as_many_processes_as_the_flags_have_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    started = command("--", SIZES, "--pipeline-schedule zb-v --tensor-model-parallel-size 2")
    assert started[:6] == [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    assert started[6] == str(ROOT / "pretrain_gpt.py")
    assert started[-3:] == ["--rehearse", "--exit-interval", "5"]
    assert command("--ranks 16 --", SIZES)[5] == "16"


def test_a_script_of_megatron_lm_is_launched() -> None:
    flags = "--pipeline-model-parallel-size 4 --expert-model-parallel-size 2 --use-mup --exit-interval 7"
    assert command("Megatron-LM/pretrain_gpt.py", flags)[5:] == [
        *"8 -m megatron.pipeline.cli launch Megatron-LM/pretrain_gpt.py".split(), *flags.split(), "--rehearse",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "which training? mpipe rehearse -- FLAGS"),
        ("--", "which training? mpipe rehearse -- FLAGS"),
        ("-- --mock-dat", "unknown flag --mock-dat; did you mean --mock-data?"),
        ("there_is_none.py --mock-data", "there is no script there_is_none.py"),
        (f"-- {SIZES} --rehearse-hop -1", "--rehearse-hop -1: a message takes 0 seconds or more"),
        (f"-- {SIZES} --rehearse-replicas fake:3", "--rehearse-replicas: all ranks of a rehearsal are there; leave it out"),
        (f"-- {SIZES} --num-layers 4096 --hidden-size 8192", "--rehearse has all 4 ranks on one machine"),
    ],
)
def test_what_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert words in refusal(capsys, "rehearse", arguments)
