"""What training cannot run is refused with a reason, before any process group exists; what it can is planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.pipeline.cli import main
from megatron.pipeline.schedule import families
from megatron.pipeline.training import program

MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-2 "
    "--tokenizer-type ByteLevelTokenizer --train-iters 6 --mock-data --pipeline-model-parallel-size 2 --global-batch-size 8"
)
RUN = ("1f1b", "zb-h1", "zb-h2", "zb-auto")
OTHERS = [name for name in families.FAMILIES if name not in (*RUN, "seq-1f1b")]
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


def refusal(flags: str) -> str:
    with pytest.raises(ValueError, match="--pipeline-schedule") as refused:
        program.prepare(f"{MODEL} {flags}".split(), world_size=2)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", RUN)
def test_what_runs_is_planned(name: str) -> None:
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule {name}".split(), world_size=2)
    schedule = pipeline.plan(4).schedule
    assert (schedule.name, schedule.placement.stages, schedule.splits) == (name, ((0,), (1,)), 1)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [("seq-1f1b", ""), *((name, chunks) for name in OTHERS for chunks in ("", TWO_CHUNKS))],
)
def test_what_does_not_run_is_refused_whatever_the_model_is_cut_into(name: str, chunks: str) -> None:
    message = refusal(f"--pipeline-schedule {name} {chunks}")
    assert f"--pipeline-schedule {name} " in message
    assert "training cannot run: take 1f1b, zb-h1, zb-h2, zb-auto with one chunk per rank, file:PATH" in message
    assert ("2 slices" if name == "seq-1f1b" else "2 chunk(s) per rank") in message


def test_more_chunks_of_a_family_that_runs_with_one_are_refused() -> None:
    assert "has 2 chunk(s) per rank" in refusal(f"--pipeline-schedule zb-auto {TWO_CHUNKS}")


def test_stock_takes_chunks() -> None:
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule stock {TWO_CHUNKS}".split(), world_size=2)
    assert pipeline.placement.chunks == 2


def test_auto_names_what_to_do() -> None:
    message = refusal("--pipeline-schedule auto")
    assert "training does not choose a schedule" in message and "mpipe compare --schedules 1f1b,zb-h1,zb-h2,zb-auto" in message


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("zb-h1", None),
        ("v-half", "has 2 chunk(s) per rank"),
        ("interleaved", "has 2 chunk(s) per rank"),
        ("seq-1f1b", "cuts every microbatch into 2 slices"),
        ("zb-h1 --recompute 0", "runs a forward again, as R0.0"),
        ("chimera", "has 2 chunk(s) per rank"),
    ],
)
def test_a_file_is_held_to_the_same(tmp_path: Path, plan: str, reason: str | None) -> None:
    path = tmp_path / "plan.json"
    assert main(f"plan --pp 2 --microbatches 4 --json -o {path} --schedule {plan}".split()) == 0
    if reason is None:
        program.prepare(f"{MODEL} --pipeline-schedule file:{path}".split(), world_size=2)
    else:
        assert reason in refusal(f"--pipeline-schedule file:{path}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff", "can't decode"),
        (b'{"stages": [{"forward": 1}]}', "stage 0: missing backward, weight"),
        (b'{"stages": [{"forward": 1, "backward": 1, "weight": -1}]}', "stage 0: weight must be a number"),
    ],
)
def test_bad_costs_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--pipeline-costs {path}: .*{message}"):
        program.prepare(f"{MODEL} --pipeline-costs {path}".split(), world_size=2)


def test_costs_may_leave_out_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"stages": [{"forward": 1, "backward": 2, "weight": 1}, {"forward": 1, "backward": 1, "weight": 1}]}')
    program.prepare(f"{MODEL} --pipeline-costs {path}".split(), world_size=2)
