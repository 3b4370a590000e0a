"""Scripts of a real checkout of Megatron-LM under our schedules, where MEGATRON_LM names one, with what its scripts import (six,
regex, pydantic, triton)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from launch.launched import OWN, SIZES, launch, run

from megatron.pipeline.flags.support import FEATURES

CHECKOUT = os.environ.get("MEGATRON_LM")
UPSTREAM = Path(CHECKOUT or "nowhere") / "pretrain_gpt.py"
needs_upstream = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM is not set: it names a checkout of Megatron-LM")
ON_UPSTREAM = (
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --eval-iters 0 --eval-interval 100 --clip-grad 0 --train-iters 5 "
)
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


@needs_upstream
@pytest.mark.slow
def test_features_are_known_by_the_names_that_upstreams_parser_gives_them() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from argparse import ArgumentParser\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "print(*{action.dest for action in add_megatron_arguments(ArgumentParser())._actions})"
    )
    command = [sys.executable, "-c", code, str(UPSTREAM.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    names = set(done.stdout.splitlines()[-1].split())
    unknown = {feature.title for feature in FEATURES if not names & set(feature.names)}
    # Of one release or another: gone from 0.19, or new in 0.18 or 0.19.
    assert unknown <= {"legacy models", "paged stash of experts", "weights gathered again", "batch size by steps"}


@needs_upstream
@pytest.mark.slow
def test_upstreams_own_script(tmp_path: Path) -> None:
    # Upstream draws weights by rank, so a placement starts from a checkpoint.
    checkpoint = f"{SIZES} {ON_UPSTREAM} {DISTRIBUTED} --{{}} {tmp_path}/checkpoint "
    launch(tmp_path / "start", UPSTREAM, checkpoint.format("save") + "--save-interval 1 --exit-interval 1", before="--core pip")
    found = {
        name: launch(tmp_path / name, UPSTREAM, f"{checkpoint.format('load')} --pipeline-schedule {name}", before="--core pip")
        for name in ("stock", "zb-h1", "v-half")
    }
    assert len(found["stock"]) == 4  # and one before the checkpoint
    for steps in found.values():
        assert [loss for loss, _ in steps] == [loss for loss, _ in found["stock"]]
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in found["stock"]], rel=1e-6)


@needs_upstream
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "equal"), [("zb-h1", "stock"), ("zb-v", "zb-v")])
def test_layer_plans_of_upstreams_own_script(tmp_path: Path, schedule: str, equal: str) -> None:
    experts = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16"
    overlap = "--overlap-moe-expert-parallel-comm"
    found = [
        launch(tmp_path / f"{name}{flag}", UPSTREAM, flags, ranks=4, before="--core pip")
        for name, flag in ((equal, ""), (schedule, overlap))
        for flags in [f"{SIZES} {ON_UPSTREAM} {experts} --pipeline-schedule {name} {flag}"]
    ]
    assert found[0] == found[1] and len(found[0]) == 5


@needs_upstream
@pytest.mark.slow
def test_checkpoints_of_upstreams_own_script_and_of_ours_go_on_in_the_other(tmp_path: Path) -> None:
    flags = f"{SIZES} {ON_UPSTREAM} "
    theirs, ours = f"--save {tmp_path}/theirs --save-interval 1 --exit-interval 1", f"--save {tmp_path}/ours --exit-interval 3"
    launch(tmp_path / "start", UPSTREAM, flags + theirs, before="--core pip")
    whole = launch(tmp_path / "whole", UPSTREAM, f"{flags} --load {tmp_path}/theirs", before="--core pip")
    here = launch(tmp_path / "here", OWN, f"{flags} --pipeline-schedule v-half --load {tmp_path}/theirs {ours}")
    back = f"{flags} --pipeline-schedule zb-h1 --load {tmp_path}/ours"
    codes, output, there = run(tmp_path / "there", UPSTREAM, back, 2, before="--core pip")
    assert codes == [0, 0], output
    assert [loss for loss, _ in (*here, *there)] == [loss for loss, _ in whole] and len(whole) == 4
    assert "checkpoint version 3.0" in output
    for warning in ("could not find arguments", "fixed query-key-values ordering", "not found in checkpoint args"):
        assert warning not in output


@needs_upstream
@pytest.mark.slow
def test_upstreams_own_script_with_its_own_core(tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="a checkout compiles its datasets with pybind11")
    command = [sys.executable, "-m", "megatron.pipeline.cli", "launch", "--standalone", "--nproc-per-node", "2", str(UPSTREAM)]
    # In a virtual environment the python3-config that make finds may be another Python's.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MAKEFLAGS": "-e", "LIBEXT": sysconfig.get_config_var("EXT_SUFFIX")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    losses = []
    for schedule in ("stock", "zb-h1"):
        metrics = tmp_path / f"{schedule}.jsonl"
        flags = f"{SIZES} {ON_UPSTREAM} --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --metrics {metrics}"
        done = subprocess.run(
            [*command, *flags.split()], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"of the checkout, {UPSTREAM.parent}" in done.stdout
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert losses[0] == losses[1] and len(losses[0]) == 5
