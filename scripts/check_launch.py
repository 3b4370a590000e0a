"""Train with Megatron-LM's own script, with one feature of its flags after another: ``check_launch.py path/to/pretrain_gpt.py``.

Megatron-LM's own schedule trains one iteration on 4 pipeline ranks and saves. From there iterations under ZB-H1 (a line) and ZB-V
(a V) must have its losses, bit for bit, and so must its own iterations from what ZB-V saves half-way. docs/support.md has the
table that this fills. It needs what the script itself imports (docs/launch.md). ``--only TEXT`` takes the features with a text in
their title; megatron-core is the one that pip has installed, or with ``--core checkout`` the script's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron.pipeline.flags.support import FEATURES

_MODEL = (
    "--pipeline-model-parallel-size 4 --num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 "
    "--num-workers 0 --eval-iters 0 --eval-interval 100 --log-interval 1 "
    "--clip-grad 0"  # a norm is a sum over ranks, and a V has others
)
_DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 127"
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
_SCHEDULES = ("zb-h1", "zb-v")
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # For local_letters.py, reference_letters.py and packed_layers.py, and in place of what --sft imports.
    "PYTHONPATH": os.pathsep.join(
        filter(
            None,
            (
                *(str(Path(__file__).parents[1] / each) for each in ("examples", "tests", "tests/conversations")),
                os.environ.get("PYTHONPATH"),
            ),
        )
    ),
}
_SPREAD = "vocabulary spread over all stages, and the distributed optimizer"
_PATTERN = "HybridModel: attention, experts, Mamba-2 and others by pattern"
# A letter is a layer, and the number of layers is that of the letters. Upstream has * or +, not both.
_LETTERS = (
    "--spec reference_letters STACK --swiglu --num-experts 4 --moe-router-topk 2 --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --mamba-head-dim 16 --mamba-state-dim 8 --mamba-num-groups 2 --linear-num-key-heads 2 "
    "--linear-key-head-dim 8 --linear-num-value-heads 4 --linear-value-head-dim 8 --linear-conv-kernel-dim 4 "
    "--disable-bias-linear --moe-shared-expert-intermediate-size 32 --hybrid-layer-pattern"
)
_LATENT = "M+-EGE+- --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12 --position-embedding-type none"
_PACKED = "packed sequences (--sft)"
_FROZEN = "frozen layers"
_SFT = (
    "--sft --tokenizer-type SFTTokenizer --tokenizer-model none --no-create-attention-mask-in-dataloader --split 100,0,0 "
    "--data-path drawn --spec packed_layers LAYERS --micro-batch-size 1"
)
# By the feature's title: ranks for each of the 4 stages, and the flags that switch it on.
_FLAGS = {
    "bfloat16": (1, "--bf16"),
    "float16, with a loss scale": (1, "--fp16 --initial-loss-scale 1024"),
    "tensor and sequence parallelism": (2, "--tensor-model-parallel-size 2"),
    "experts": (2, "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear"),
    "expert communication behind another microbatch": (
        2,
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16",
    ),
    "multi-token prediction": (1, "--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope"),
    "distributed optimizer, both overlaps": (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --dist-ckpt-optim-fully-reshardable",
    ),
    # Megatron-LM cannot save the state of SGD: init_state_fn is None for it.
    "optimizers: Adam, SGD": (1, "--optimizer sgd --sgd-momentum 0 --no-save-optim --no-load-optim"),
    "recomputation, selective and full": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "dropout": (1, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "rampup of the batch size": (1, "--rampup-batch-size 4 4 16 --train-samples 48"),
    _SPREAD: (
        2,
        "--use-distributed-optimizer --overlap-grad-reduce --dist-ckpt-optim-fully-reshardable "
        "--untie-embeddings-and-output-weights",
    ),
    _PATTERN: (
        1,
        "--hybrid-layer-pattern *-*E*-*E --spec local_letters STACK --num-experts 4 --moe-router-topk 2 --disable-bias-linear",
    ),
    f"{_PATTERN}; all but latent attention": (1, f"{_LETTERS} M*-EGE*-/*-"),
    f"{_PATTERN}; latent attention": (1, f"{_LETTERS} {_LATENT}"),
    f"{_PATTERN}; context parallelism": (2, f"{_LETTERS} M*-EGE*- --context-parallel-size 2"),
    _PACKED: (1, _SFT),
    f"{_PACKED}; tensor parallelism": (2, f"{_SFT} --tensor-model-parallel-size 2"),
    f"{_PACKED}; context parallelism": (2, f"{_SFT} --context-parallel-size 2 --calculate-per-token-loss"),
    f"{_PACKED}; multi-token prediction": (
        1,
        f"{_SFT} --mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope",
    ),
    # Megatron-LM cannot save the optimizer's state of some layers.
    f"{_FROZEN}; the first half": (1, "--no-save-optim --no-load-optim --untie-embeddings-and-output-weights"),
    f"{_PATTERN}; latent attention, context parallelism": (2, f"{_LETTERS} {_LATENT} --context-parallel-size 2"),
}
# The same, under our schedules alone: megatron-core's own would need another placement for it.
_OURS = {
    "expert communication behind another microbatch": "--overlap-moe-expert-parallel-comm",
    _SPREAD: "--vocab-parallel 2",
}
# Masks are drawn by the rank that has a layer, so another placement draws others.
_ON_A_LINE = {"dropout"}
# From its own checkpoint, too, Megatron-LM goes on with other masks, and without the optimizer's state at another learning rate.
_ONE_WAY = {"dropout", "optimizers: Adam, SGD", f"{_FROZEN}; the first half"}
# By another script beside the one that is given.
_SCRIPTS = {title: "pretrain_hybrid.py" for title in _FLAGS if title.startswith(_PATTERN)}
_HALF = Path(__file__).parents[1] / "tests" / "frozen_half.py"  # which runs the script that is given
# Sums over the vocabulary are in another order (docs/numerics.md): the largest relative difference of two losses.
_CLOSE = {_SPREAD: 1e-5}


def main(argv: Sequence[str]) -> int:
    """Train under each schedule for each feature; returns 1 if losses differ or a training fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", help="Megatron-LM's pretrain_gpt.py")
    parser.add_argument("--only", default="", metavar="TEXT", help="features with this in their title")
    parser.add_argument("--core", default="pip", choices=["checkout", "pip"], help="whose megatron-core runs")
    args = parser.parse_args(argv)
    unknown = {title.partition(";")[0] for title in _FLAGS} - {feature.title for feature in FEATURES} - {_SPREAD}
    assert not unknown, f"no such features: {unknown}"
    wrong = 0
    for title, (replicas, flags) in _FLAGS.items():
        if args.only in title:
            script = Path(args.script).with_name(_SCRIPTS.get(title, Path(args.script).name)).resolve()
            with tempfile.TemporaryDirectory() as folder:
                path, frozen = Path(folder), title.startswith(_FROZEN)
                train = partial(_train, script, args.core, 4 * replicas, folder=path, frozen=frozen)
                runs = _compared(title, train, flags, path)
            stock, *others = runs.values()
            close = _CLOSE.get(title, 0.0)
            # From the checkpoint half-way on there is only the end of the losses.
            equal = isinstance(stock, list) and len(stock) >= 3 and all(_ends_as(run, stock, close) for run in others)
            wrong += not equal
            print(f"{title}: {'equal' if equal else 'DIFFERENT'}: {', '.join(runs)}: {stock if equal else runs}", flush=True)
    return int(bool(wrong))


def _compared(title: str, train: Callable[..., list[float] | str], flags: str, folder: Path) -> dict[str, list[float] | str]:
    """The losses of each training of a feature, or the end of what it said; Megatron-LM's own come first."""
    train("stock", f"{flags} --save {folder}/start --save-interval 1 --exit-interval 1")
    schedules = _SCHEDULES[:1] if title in _ON_A_LINE else _SCHEDULES
    given = {"stock": flags} | {name: f"{flags} {_OURS.get(title, '')}" for name in schedules}
    half_way = f"--save {folder}/half --save-interval 2"  # in iteration 2, and at the end
    runs = {
        name: train(name, f"{own} --load {folder}/start {half_way if name == schedules[-1] else ''}")
        for name, own in given.items()
    }
    if title not in _ONE_WAY:
        runs[f"stock from {schedules[-1]}'s checkpoint"] = train("stock", f"{flags} --load {folder}/half --ckpt-step 2")
    return runs


def _ends_as(run: list[float] | str, stock: list[float], close: float) -> bool:
    if isinstance(run, str) or len(run) < 2:
        return False
    return all(abs(loss - other) <= close * abs(other) for loss, other in zip(run, stock[-len(run) :], strict=True))


def _train(script: Path, core: str, ranks: int, schedule: str, flags: str, folder: Path, frozen: bool) -> list[float] | str:
    """The losses of a training; or the end of what it said."""
    wrapped = {"FROZEN": str(script), "PYTHONPATH": f"{script.parent}{os.pathsep}{_ENVIRONMENT['PYTHONPATH']}"} if frozen else {}
    metrics = folder / f"{schedule}{len(list(folder.glob('*.jsonl')))}.jsonl"
    dropout = "" if "dropout" in flags else _NO_DROPOUT
    launch = f"-m megatron.pipeline.cli launch --core {core} --nproc-per-node {ranks} {_HALF if frozen else script}".split()
    data = "" if "--data-path" in flags else _DATA
    length = "" if "--train-samples" in flags else "--train-iters 4"
    ours = ["--pipeline-schedule", schedule, "--metrics", str(metrics), "--data-cache-path", str(folder)]
    ended = subprocess.run(
        [sys.executable, *launch, *f"{_MODEL} {data} {length} {dropout} {flags}".split(), *ours],
        env=os.environ | _ENVIRONMENT | wrapped,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    if ended.returncode:
        said = [line for line in ended.stdout.splitlines() if "Error" in line or "launch:" in line]
        return f"ended with {ended.returncode}: {' | '.join(said[:3])[:500]}"
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
