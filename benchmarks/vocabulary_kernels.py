"""What does a shard of the output layer cost? S and T of one shard in 8 against megatron-core's whole output layer.

    python benchmarks/vocabulary_kernels.py                                                  # CPU, float32, a small layer
    python benchmarks/vocabulary_kernels.py --vocabulary 262144 --hidden 4096 --tokens 2048 --dtype bf16    # a GPU

Dense is megatron-core's linear and cross entropy, forward and backward, the weight gradient accumulated in a float32
``main_grad``. A shard runs S, T and what lies between them on every rank: the statistics of all shards, and for the variant with
one barrier the gradient by the hidden states. Every round runs all of them one after another; medians are reported, and the
median of the rounds' ratios of all shards' time to the dense layer's.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
from common import command_line, in_rounds, print_table, save
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce
from one_device import DEVICE, DTYPES, device_name, one_rank, synchronize, timed

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.model.vocabulary.loss import LossSettings, Statistics, weigh
from megatron.pipeline.model.vocabulary.output import OutputShard
from megatron.pipeline.planner.shape.shards import Shards


class Measured:
    """Seconds of named parts of a run, and the memory that it needed beside what lay there before."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.bytes = 0

    def __enter__(self) -> Measured:
        synchronize()
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        if DEVICE == "cuda":
            self.bytes = torch.cuda.max_memory_allocated() - self._before

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        self.seconds[name], result = timed(work)
        return result

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def weight_of(rows: int, options: argparse.Namespace) -> torch.nn.Parameter:
    weight: Any = torch.nn.Parameter(torch.empty(rows, options.hidden, dtype=DTYPES[options.dtype], device=DEVICE))
    torch.nn.init.normal_(weight, std=0.02)
    weight.main_grad = torch.zeros(rows, options.hidden, device=DEVICE)
    assert isinstance(weight, torch.nn.Parameter)
    return weight


def dense(weight: torch.nn.Parameter, batch: dict[str, torch.Tensor], cross_entropy: Callable[..., torch.Tensor]) -> Measured:
    """megatron-core's output layer and loss, forward and backward."""
    hidden = batch["hidden"].detach().requires_grad_()
    group = parallel_state.get_tensor_model_parallel_group()

    def forward() -> torch.Tensor:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            hidden, weight, None, False, False, False, None, tp_group=group
        )
        return cross_entropy(logits, batch["labels"].t().contiguous())

    with Measured() as measured:
        losses = measured.part("forward", forward)
        measured.part("backward", lambda: losses.backward(batch["weights"].t()))
    return measured


def shard(layer: OutputShard, batch: dict[str, torch.Tensor], one_barrier: bool) -> Measured:
    """S, what lies between, and T of one shard, as if all others were like it."""
    count, shape = layer.shards.count, (batch["labels"].size(0), batch["labels"].size(1))
    with Measured() as measured:
        part = measured.part("S", lambda: layer(batch["hidden"], batch["labels"], one_barrier))
        gathered = part.statistics.expand(count, -1, -1).contiguous()
        known = measured.part("statistics", lambda: Statistics(gathered, layer.settings, shape, layer.shards.total_counted))
        if one_barrier:
            measured.part("input gradient", lambda: weigh(part.input_gradient(known), batch["weights"]))
        measured.part("T", lambda: part.backward(known, batch["weights"], not one_barrier))
    return measured


def main() -> None:
    cuda = DEVICE == "cuda"
    parser = command_line(__doc__)
    parser.add_argument("--vocabulary", type=int, default=256 * 1024 if cuda else 16 * 1024)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096 if cuda else 512)
    parser.add_argument("--tokens", type=int, default=2048 if cuda else 256)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32")
    parser.add_argument("--logits-limit", type=float, metavar="MIB", help="of float32 logits of a shard at a time")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", metavar="FILE", help="append the seconds of every round, as JSON")
    options = parser.parse_args()

    one_rank()
    shards = Shards.of(options.vocabulary, options.vocabulary, options.shards)
    limit = None if options.logits_limit is None else int(options.logits_limit * 2**20)
    layer = OutputShard(weight_of(shards.rows, options), shards, 0, LossSettings(), logits_limit=limit)
    whole = weight_of(options.vocabulary, options)
    weight_tasks.prepare(whole)
    for module in (layer, torch.nn.ParameterList([whole])):
        weight_tasks.register_hook(module, partial(module.zero_grad, set_to_none=True))  # as DDP does
    batch = {
        "hidden": torch.randn(options.tokens, 1, options.hidden, device=DEVICE).to(DTYPES[options.dtype]),
        "labels": torch.randint(0, options.vocabulary, (1, options.tokens), device=DEVICE),
        "weights": torch.full((1, options.tokens), 1 / options.tokens, device=DEVICE),
    }
    ways: dict[str, Callable[[], Measured]] = {
        "dense": lambda: dense(whole, batch, tensor_parallel.vocab_parallel_cross_entropy),
        "shard, two barriers": lambda: shard(layer, batch, False),
        "shard, one barrier": lambda: shard(layer, batch, True),
    }
    if cuda:
        group = parallel_state.get_tensor_model_parallel_group()
        ways["dense, fused loss"] = lambda: dense(
            whole, batch, lambda logits, labels: fused_vocab_parallel_cross_entropy(logits, labels, group)
        )

    rounds = in_rounds(ways, options.rounds, warm_up=3)
    title = (
        f"{options.vocabulary} x {options.hidden}, {options.tokens} tokens, {options.dtype}, 1 of {options.shards} shards, "
        f"{device_name()}, {options.rounds} rounds"
    )
    rows = []
    for name, runs in rounds.items():
        parts = ", ".join(f"{part} {1000 * statistics.median(run.seconds[part] for run in runs):.2f}" for part in runs[0].seconds)
        times = options.shards if name.startswith("shard") else 1
        ratio = statistics.median(times * run.total / base.total for run, base in zip(runs, rounds["dense"], strict=True))
        memory = f"{max(run.bytes for run in runs) / 2**20:.0f}" if cuda else "-"
        rows.append([name, parts, f"{1000 * statistics.median(run.total for run in runs):.2f}", f"{ratio:.3f}", memory])
    save(options.save, f"Output layer {title}", {name: [run.total for run in runs] for name, runs in rounds.items()})
    print_table(title, ("layer", "median ms of its parts", "ms", "all shards to dense", "MiB"), rows, left=2, width=150)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
