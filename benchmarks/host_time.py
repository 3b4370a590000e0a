"""What does the split backward cost the host? Python of F, and of B and W, over Transformer Engine's own forward and backward.

    python scripts/fetch_transformer_engine.py
    python benchmarks/host_time.py                # a dense layer: two LayerNormLinear, two Linear
    python benchmarks/host_time.py --experts 32   # and its experts, two GroupedLinear

On a CPU, with operations of torch on a few numbers in place of the compiled module (tests/engine/stand_in.py), under DDP. Counted
is the time that the thread runs; both take turns, and medians of the rounds' ratios are reported.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engine import releases, stand_in

WIDTH, TOKENS = 16, 16


def build(delayed: bool, experts: int) -> Any:
    """A layer's linears under DDP, split if they delay."""
    import transformer_engine.pytorch as te
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from megatron.pipeline.model.split_linear import split_weights

    options: dict[str, Any] = {"bias": False, "device": "cpu", "delay_wgrad_compute": delayed, "fuse_wgrad_accumulation": True}
    kinds = [te.LayerNormLinear, te.Linear] * 2
    module = torch.nn.ModuleList(kind(WIDTH, WIDTH, **options) for kind in kinds)
    module.extend(te.GroupedLinear(experts, WIDTH, WIDTH, **options) for _ in range(2 if experts else 0))
    if delayed:
        assert split_weights(module) == []
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1, use_cpu_initialization=True)
    return DistributedDataParallel(config, DistributedDataParallelConfig(delay_wgrad_compute=delayed), module)


def forward(model: Any, experts: int) -> torch.Tensor:
    hidden = torch.ones(TOKENS * max(experts, 1), WIDTH, requires_grad=True)
    for linear in model.module:
        rows = ([TOKENS] * experts,) if hasattr(linear, "num_gemms") else ()
        hidden = linear(hidden, *rows)
    return hidden


def microbatch(model: Any, split: bool, experts: int) -> tuple[float, float]:
    """Seconds of F, and of the backward or of B and W."""
    from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
    from megatron.pipeline.runtime.stage_passes import run_weights

    began = time.thread_time()
    output = forward(model, experts)
    middle = time.thread_time()
    if split:
        tasks: list[WeightTask] = []
        with deferring(tasks):
            backward(output)
        run_weights([(task, []) for task in tasks])
    else:
        backward(output)
    return middle - began, time.thread_time() - middle


def backward(output: torch.Tensor) -> None:
    torch.autograd.backward(output, torch.ones_like(output))


def ratios(rounds: int, experts: int) -> list[list[float]]:
    """Of every round: F, and B and W, over Transformer Engine's own."""
    own, split = build(False, experts), build(True, experts)

    def both() -> list[float]:
        times = [
            [statistics.median(one) for one in zip(*(microbatch(model, model is split, experts) for _ in range(10)), strict=True)]
            for model in (own, split)
        ]
        return [mine / its for its, mine in zip(*times, strict=True)]

    both()
    return [both() for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    release = releases.fetched()[-1]
    stand_in.load(releases.FOLDER / release)
    from one_device import one_rank

    one_rank()
    stand_in.see_the_cpu()
    for name, found in zip(("F", "B + W"), zip(*ratios(options.rounds, options.experts), strict=True), strict=True):
        print(f"{name}: {statistics.median(found):.3f} times Transformer Engine {release}'s own ({options.rounds} rounds)")


if __name__ == "__main__":
    main()
