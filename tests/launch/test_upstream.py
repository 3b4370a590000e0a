"""Scripts of a real checkout of Megatron-LM under our schedules, where MEGATRON_LM names one, with what its scripts import (six,
regex, pydantic, triton)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from launch.launched import OWN, SIZES, launch, run
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.pipeline.patches import compat

from megatron.pipeline.flags.support import FEATURES

CHECKOUT = os.environ.get("MEGATRON_LM")
UPSTREAM = Path(CHECKOUT or "nowhere") / "pretrain_gpt.py"
needs_upstream = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM is not set: it names a checkout of Megatron-LM")
ON_UPSTREAM = (
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --eval-iters 0 --eval-interval 100 --clip-grad 0 --train-iters 5 "
)
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"


@pytest.fixture(scope="module")
def flags_of_upstream() -> dict[str, str | None]:
    """What upstream's parser makes of no flags, by its names; what is no text, number or switch is None."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from argparse import ArgumentParser\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "args = vars(add_megatron_arguments(ArgumentParser()).parse_args([]))\n"
        "plain = {name: value if isinstance(value, (str, int, float)) else None for name, value in args.items()}\n"
        "print(json.dumps(plain))"
    )
    command = [sys.executable, "-c", code, str(UPSTREAM.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@needs_upstream
@pytest.mark.slow
def test_features_are_known_by_the_names_that_upstreams_parser_gives_them(flags_of_upstream: dict[str, str | None]) -> None:
    unknown = {feature.title for feature in FEATURES if not flags_of_upstream.keys() & set(feature.names)}
    # Of one release or another: gone from 0.19, or new from 0.18 on.
    assert unknown <= {
        "legacy models", "paged stash of experts", "weights gathered again", "batch size by steps",
        "Transformer Engine's fused operations and grouped products of dense layers", "maximal update parametrization",
        "frozen layers", "distillation, from a teacher or from saved logits", "output layer in FP8",
    }  # fmt: skip


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
@pytest.mark.skipif(compat.ramps_up_by_steps(), reason="this release ignores --rampup-batch-size")
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "v-half"])
def test_ramp_up_of_upstreams_own_script_with_overlaps(tmp_path: Path, schedule: str) -> None:
    samples = ON_UPSTREAM.replace("--train-iters 5", "--train-samples 44")  # in 1, 1, 2, 3 and 4 microbatches
    flags = f"{SIZES} {samples} --use-distributed-optimizer --rampup-batch-size 4 4 24 --pipeline-schedule {schedule}"
    overlaps = f"{flags} --overlap-grad-reduce --overlap-param-gather"
    plain, found = (launch(tmp_path / str(len(each)), UPSTREAM, each, 4, "--core pip") for each in (flags, overlaps))
    assert found == plain and len(found) == 5


def short_documents(prefix: Path) -> Path:
    """A dataset of documents of 3 to 8 tokens, in sequences of 16."""
    drawn, end = numpy.random.default_rng(5), 61  # the end is the token after the 61 of SIZES
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=numpy.uint16)
    for _ in range(400):
        tokens = drawn.integers(0, end, drawn.integers(2, 8))
        builder.add_document(numpy.append(tokens, end), [len(tokens) + 1])
    builder.finalize(get_idx_path(str(prefix)))
    return prefix


@needs_upstream
@pytest.mark.slow
@pytest.mark.parametrize("tensor", [1, 2])
def test_documents_of_upstreams_own_script_stay_apart_on_every_stage(tmp_path: Path, tensor: int) -> None:
    data = f"--data-path {short_documents(tmp_path / 'data')} --split 100,0,0 --data-cache-path {tmp_path}/cache"
    flags = f"{SIZES} {ON_UPSTREAM.replace('--mock-data', data)} --tensor-model-parallel-size {tensor} --eod-mask-loss "
    flags += f"--untie-embeddings-and-output-weights --reset-position-ids --{{}} {tmp_path}/checkpoint "

    def losses(pipeline: int, schedule: str, mask: str, verb: str = "load") -> list[float]:
        stages = f"--pipeline-model-parallel-size {pipeline} --pipeline-schedule {schedule} {mask}"
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        return [loss for loss, _ in launch(folder, UPSTREAM, flags.format(verb) + stages, pipeline * tensor, "--core pip")]

    reset, end = "--reset-attention-mask", "--save-interval 1 --exit-interval 1"
    losses(1, "stock", f"{reset} {end}", verb="save")
    within, across = losses(1, "stock", reset), losses(1, "stock", "")
    assert len(within) == 4 and within != pytest.approx(across, rel=1e-4)
    for pipeline, schedule in ((4, "zb-h1"), (4, "zb-v"), (2, "zb-v")) if tensor == 1 else ((2, "zb-v"),):
        assert losses(pipeline, schedule, reset) == within
    if tensor == 1:
        assert losses(4, "zb-v", f"{reset} --vocab-parallel 2") == pytest.approx(within, rel=1e-5)


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
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}  # no activated environment
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
