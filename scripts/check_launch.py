"""Train with Megatron-LM's own script, with one feature of its flags after another: ``check_launch.py path/to/pretrain_gpt.py``.

Under ZB-H1 losses must be those of megatron-core's own schedule, bit for bit, from the same start. docs/support.md has the table
that this fills. It needs what the script itself imports (docs/launch.md). ``--only TEXT`` takes the features with a text in their
title; megatron-core is the one that pip has installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.pipeline.flags.support import FEATURES

_MODEL = (
    "--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --mock-data "
    "--num-workers 0 --tokenizer-type NullTokenizer --vocab-size 127 --eval-iters 0 --eval-interval 100 --log-interval 1"
)
_NO_DROPOUT = "--attention-dropout 0 --hidden-dropout 0"
# By the feature's title: ranks, and the flags that switch it on.
_FLAGS = {
    "bfloat16": (2, "--bf16"),
    "float16, with a loss scale": (2, "--fp16"),
    "tensor and sequence parallelism": (4, "--tensor-model-parallel-size 2"),
    "context parallelism": (4, "--context-parallel-size 2"),
    "experts": (4, "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --disable-bias-linear"),
    "expert communication behind another microbatch": (
        4,
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16",
    ),
    "multi-token prediction": (2, "--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope"),
    "distributed optimizer, both overlaps": (4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "optimizers: Adam, SGD": (2, "--optimizer sgd"),
    "recomputation, selective and full": (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "dropout": (2, "--attention-dropout 0.1 --hidden-dropout 0.1"),
    "rampup of the batch size": (2, "--rampup-batch-size 4 4 16 --train-samples 48"),
}
# The same, under ZB-H1 alone: megatron-core's own schedule would need another placement for it.
_OURS = {"expert communication behind another microbatch": "--overlap-moe-expert-parallel-comm"}


def main(argv: Sequence[str]) -> int:
    """Train under both schedules for each feature; returns 1 if losses differ or a training fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("script", help="Megatron-LM's pretrain_gpt.py")
    parser.add_argument("--only", default="", metavar="TEXT", help="features with this in their title")
    args = parser.parse_args(argv)
    unknown = _FLAGS.keys() - {feature.title for feature in FEATURES}
    assert not unknown, f"no such features: {unknown}"
    wrong = 0
    for title, (ranks, flags) in _FLAGS.items():
        if args.only in title:
            with tempfile.TemporaryDirectory() as folder:
                given = {"stock": flags, "zb-h1": f"{flags} {_OURS.get(title, '')}"}
                runs = [_train(args.script, ranks, own, name, Path(folder)) for name, own in given.items()]
            equal = isinstance(runs[0], list) and runs[0] == runs[1]
            wrong += not equal
            print(f"{title}: {'equal' if equal else 'DIFFERENT'}: {runs[0] if equal else runs}", flush=True)
    return int(bool(wrong))


def _train(script: str, ranks: int, flags: str, schedule: str, folder: Path) -> list[float] | str:
    """The losses of a training; or the end of what it said."""
    metrics = folder / f"{schedule}.jsonl"
    dropout = "" if "dropout" in flags else _NO_DROPOUT
    launch = f"-m megatron.pipeline.cli launch --core pip --nproc-per-node {ranks}".split()
    length = "" if "--train-samples" in flags else "--train-iters 3"
    ours = ["--pipeline-schedule", schedule, "--metrics", str(metrics), "--data-cache-path", str(folder)]
    ended = subprocess.run(
        [sys.executable, *launch, script, *f"{_MODEL} {length} {dropout} {flags}".split(), *ours],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    if ended.returncode:
        said = [line for line in ended.stdout.splitlines() if "Error" in line or "pretrain_gpt.py:" in line]
        return f"ended with {ended.returncode}: {' | '.join(said[:3])}"
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
