"""Upstream's own parser, validation and training loop under our schedules: what a user of ``mpipe launch`` meets first.

pip's megatron-core brings ``megatron.training`` from 0.17 on; ``scripts/check_core_versions.py`` runs this file with each such
release. The flags of 0.16, whose wheel has no parser, are those of ``flags/importers/upstream.json``.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from launch.launched import launch, written_board
from pool import forked
from releases import CORE

from megatron.pipeline.flags.importers.upstream import table
from megatron.pipeline.launch.check import check_flags, untested
from megatron.pipeline.launch.run import Run
from megatron.pipeline.launch.versions import Versions
from megatron.pipeline.planner.schedule.families import AUTO, FAMILIES

CONVERSATIONS = Path(__file__).parents[1] / "conversations"
SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_with_pip.py"
FROZEN_HALF = Path(__file__).parents[1] / "frozen_half.py"
SIZES = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-3 --train-iters 4 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data "
)
PARALLEL = {
    "nothing else": "",
    "tensor parallelism": "--tensor-model-parallel-size 2",
    "experts": "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 --expert-model-parallel-size 2 "
    "--disable-bias-linear",
    "bf16 and the distributed optimizer": "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
}
NAMES = sorted({*FAMILIES, AUTO})
WITHOUT_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
TRAINING = f"{SIZES} {WITHOUT_DROPOUT} --num-workers 0 --eval-iters 0 --eval-interval 100 --clip-grad 0 --log-interval 1"
# Letters of every kind but latent attention, which upstream has in the place of attention.
LETTERS = (
    "--spec reference_letters STACK --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --num-experts 4 "
    "--moe-router-topk 2 --position-embedding-type rope --mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2 "
    "--linear-num-key-heads 2 --linear-key-head-dim 8 --linear-num-value-heads 4 --linear-value-head-dim 8 "
    "--linear-conv-kernel-dim 4 --moe-shared-expert-intermediate-size 32"
)
LATENT = f"{LETTERS} --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 --position-embedding-type none"
RECOMPUTED = "--recompute-granularity selective --recompute-modules core_attn mlp"
# Flags, and the letters of four stages and of eight: with schedules whose ranks have two one may be without a letter. Behind /
# is what predicts a further token.
PATTERNS = {
    "attention": (f"{LETTERS} --pipeline-model-parallel-size 4", "M*|-E|GE|M*-/*-", "M|*|-|E|G||E|M*-/*-"),
    "latent attention": (
        f"{LATENT} {RECOMPUTED} mla_up_proj shared_experts --pipeline-model-parallel-size 4",
        "M+|-E|GE|M+-",
        "M|+|-|E|G||E|M+-",
    ),
    "recomputed experts, context parallelism": (
        f"{LETTERS} {RECOMPUTED} moe --pipeline-model-parallel-size 2 --context-parallel-size 2",
        "M*-E|GEM*-",
        "M*|-E|GE|M*-",
    ),
}
PACKED = (
    "--sft --tokenizer-type SFTTokenizer --tokenizer-model none --no-create-attention-mask-in-dataloader --split 100,0,0 "
    "--data-path drawn --spec packed_layers LAYERS"
)
# Ranks that read data, stages between the ends, and ranks that have parts of what is packed.
PACKED_LAYOUTS = {
    "stages between the ends": "--pipeline-model-parallel-size 4 --mtp-num-layers 1 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights",
    "tensor parallelism": "--tensor-model-parallel-size 2",
    "context parallelism": "--context-parallel-size 2 --calculate-per-token-loss",
}
needs_upstream = pytest.mark.skipif(find_spec("megatron.training") is None, reason="this megatron-core has no megatron.training")
needs_patterns = pytest.mark.skipif(CORE < (0, 19), reason="this megatron-core has no loop for HybridModel from a configuration")


def validated(output: Path) -> None:
    """What upstream's parser and validation, as a launched script runs them, say under every family, as JSON."""
    os.environ.update(RANK="0", WORLD_SIZE="8", LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    log = output.with_suffix(".log")
    for stream in (sys.stdout, sys.stderr):
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream.fileno())
    from megatron.pipeline.launch import install

    install()
    from megatron.training import arguments, initialize

    said = {}
    for flags, name in product(PARALLEL.values(), NAMES):
        sys.argv = [str(SCRIPT), *f"{SIZES} --pipeline-model-parallel-size 4 {flags} --pipeline-schedule {name}".split()]
        # Dropout is on by upstream's default, and a launch has none in slices.
        sys.argv += WITHOUT_DROPOUT.split() if name == "seq-1f1b" else []
        began = log.stat().st_size
        try:
            # Up to 0.17 start-up validates, from 0.18 on the parser's module.
            getattr(initialize, "validate_args", arguments.validate_args)(arguments.parse_args())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            said[f"{name} {flags}"] = [line for line in log.read_text()[began:].splitlines() if line.startswith(" WARNING")]
    output.write_text(json.dumps(said))


@needs_upstream
@pytest.mark.slow
def test_upstreams_parser_and_validation_leave_every_schedule_as_it_is(tmp_path: Path) -> None:
    process = forked(validated, tmp_path / "said.json")
    process.join(timeout=300)
    process.kill()
    process.join()
    assert process.exitcode == 0, (tmp_path / "said.log").read_text()[-2000:]  # 2 where something is refused
    said = json.loads((tmp_path / "said.json").read_text())
    assert said == {case: [] for case in said} and len(said) == len(NAMES) * len(PARALLEL)


@pytest.mark.parametrize("name", NAMES)
def test_the_published_flags_of_0_16_leave_every_schedule_as_it_is(name: str) -> None:
    release = "0.16"
    run, parser = Run(Versions(release, Path("core"), Path("training"), release)), ArgumentParser(allow_abbrev=False)
    for row in table("upstream"):
        if row["since"] <= release <= row["until"]:
            whole: dict[str, Any] = {"dest": row["dest"]} if "dest" in row else {}
            switch = f"store_{str(not row.get('default', False)).lower()}"
            kind = {"int": int, "float": float}.get(row.get("type"), str)
            whole |= (
                {"action": switch}
                if row.get("nargs") == 0
                else {"type": kind, **{key: row.get(key) for key in ("default", "nargs")}}
            )
            parser.add_argument(*row["names"], **whole)
    run.add_flags(parser)
    without = WITHOUT_DROPOUT if name == "seq-1f1b" else ""
    args = parser.parse_args(f"--num-layers 8 --pipeline-model-parallel-size 4 --pipeline-schedule {name} {without}".split())
    check_flags(Namespace(**vars(args) | {"num_layers": 8, "pipeline_model_parallel_size": 4}))
    assert untested(args, run.unasked) == []


@needs_upstream
@pytest.mark.slow
def test_upstreams_loop_trains_as_its_own_schedule_does_and_its_checkpoints_go_both_ways(tmp_path: Path) -> None:
    """On two pipeline ranks with replicas, both overlaps, and timers of every bucket."""
    flags = f"{TRAINING} {PARALLEL['bf16 and the distributed optimizer']} --ddp-bucket-size 4096 --timing-log-level 1 "
    flags += f"--dist-ckpt-optim-fully-reshardable --data-cache-path {tmp_path}/cache"

    def losses(name: str, schedule: str, more: str) -> list[float]:
        steps = launch(tmp_path / name, SCRIPT, f"{flags} --pipeline-schedule {schedule} {more}", ranks=4)
        return [loss for loss, _ in steps]

    start, half = tmp_path / "start", tmp_path / "half"  # stock's checkpoint, and what zb-v saves half-way
    first = losses("first", "stock", f"--save {start} --save-interval 1 --exit-interval 1")
    stock = losses("stock", "stock", f"--load {start}")
    assert len(first) == 1 and len(stock) == 3
    board = f"--tensorboard-dir {tmp_path}/board"
    assert losses("zb-v", "zb-v", f"--load {start} --save {half} --save-interval 2 {board}") == stock
    written = written_board(tmp_path / "board").Tags()["scalars"]
    assert {"lm loss", "bubble-rate", "peak-activation-bytes", "tokens-per-second"} <= set(written)
    assert losses("back", "stock", f"--load {half} --ckpt-step 2") == stock[1:]
    assert losses("on", "zb-h1", f"--load {half} --ckpt-step 2") == stock[1:]


@needs_patterns
@pytest.mark.slow
@pytest.mark.parametrize(("letters", "line", "halves"), PATTERNS.values(), ids=PATTERNS)
def test_a_pattern_trains_as_under_upstreams_own_schedule_and_its_checkpoints_go_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: str, line: str, halves: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPT.parent)])  # reference_letters imports local_letters
    flags = f"{TRAINING.replace('--num-layers 8', letters)} --data-cache-path {tmp_path}/cache"

    def losses(name: str, schedule: str, pattern: str, more: str) -> list[float]:
        given = f"{flags} --pipeline-schedule {schedule} --hybrid-layer-pattern {pattern} {more}"
        return [loss for loss, _ in launch(tmp_path / name, SCRIPT, given, ranks=4)]

    stock = losses("stock", "stock", line, f"--save {tmp_path}/2 --save-interval 2")
    half = f"--load {tmp_path}/2 --ckpt-step 2"
    assert len(stock) == 4
    for schedule, pattern in (("zb-h1", line), ("interleaved", halves)):
        assert losses(schedule, schedule, pattern, half) == stock[2:]
    assert losses("v", "zb-v", halves, f"{half} --save {tmp_path}/3 --save-interval 3") == stock[2:]
    assert losses("back", "stock", line, f"--load {tmp_path}/3 --ckpt-step 3") == stock[3:]


@needs_patterns
@pytest.mark.slow
@pytest.mark.parametrize("layout", PACKED_LAYOUTS.values(), ids=PACKED_LAYOUTS)
def test_packed_sequences_are_apart_on_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Of ``--sft``, by attention that refuses a stage without bounds."""
    monkeypatch.setattr(sys, "path", [str(CONVERSATIONS), *sys.path])
    flags = TRAINING.replace("--tokenizer-type NullTokenizer --vocab-size 127 --mock-data", PACKED)
    flags = flags.replace("--micro-batch-size 2", "--micro-batch-size 1") + f" {layout} --data-cache-path {tmp_path}/cache"

    def steps(name: str, schedule: str, more: str) -> list[tuple[float, float]]:
        return launch(tmp_path / name, SCRIPT, f"{flags} --pipeline-schedule {schedule} {more}", ranks=4)

    stock = steps("stock", "stock", f"--save {tmp_path}/1 --save-interval 1")
    from_there = f"--load {tmp_path}/1 --ckpt-step 1"
    assert len({loss for loss, _ in stock}) == 4
    assert steps("zb-h1", "zb-h1", from_there) == stock[1:]
    on_a_v = steps("zb-v", "zb-v", from_there)
    assert [loss for loss, _ in on_a_v] == [loss for loss, _ in stock[1:]]
    assert [norm for _, norm in on_a_v] == pytest.approx([norm for _, norm in stock[1:]], rel=1e-6)


@needs_patterns
@pytest.mark.slow
def test_what_a_hook_of_a_model_freezes_is_equal_to_stocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half of the layers, and tied ends: the first stages have no B."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPT.parent)])
    script = tmp_path / "frozen_half.py"  # processes may be forked from one that knows no later environment
    script.write_text(f"import os\nos.environ['FROZEN'] = {str(SCRIPT)!r}\n{FROZEN_HALF.read_text()}")
    flags = f"{TRAINING} --pipeline-model-parallel-size 4 --no-save-optim --no-load-optim --data-cache-path {tmp_path}/cache"

    def losses(name: str, schedule: str, more: str) -> list[float]:
        steps = launch(tmp_path / name, script, f"{flags} --pipeline-schedule {schedule} {more}", ranks=4)
        return [loss for loss, _ in steps]

    losses("start", "stock", f"--save {tmp_path}/1 --save-interval 1 --exit-interval 1")
    stock = losses("stock", "stock", f"--load {tmp_path}/1")
    assert len(set(stock)) == 3
    assert [losses(schedule, schedule, f"--load {tmp_path}/1") for schedule in ("zb-h1", "zb-v")] == [stock] * 2


@needs_patterns
@pytest.mark.slow
def test_a_gpts_checkpoint_goes_on_as_a_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and the optimizer's state, which upstream translates: another state would give other losses from the second on."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(SCRIPT.parent)])
    flags = f"{TRAINING} --pipeline-model-parallel-size 4 --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable "
    flags += f"--data-cache-path {tmp_path}/cache"

    def losses(name: str, schedule: str, more: str) -> list[float]:
        steps = launch(tmp_path / name, SCRIPT, f"{flags} --pipeline-schedule {schedule} {more}", ranks=4)
        return [loss for loss, _ in steps]

    gpt = losses("gpt", "zb-v", f"--save {tmp_path}/1 --save-interval 1")
    flags = flags.replace("--num-layers 8", f"--spec local_letters STACK --load {tmp_path}/1 --ckpt-step 1")
    assert len(gpt) == 4
    for schedule, pattern in (("zb-h1", "*-" * 8), ("zb-v", "*-|" * 7 + "*-")):
        assert losses(schedule, schedule, f"--hybrid-layer-pattern {pattern}") == gpt[1:]
