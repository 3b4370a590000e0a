"""What does splitting the backward cost? The time of B plus W against megatron-core's fused backward, on the same layers.

    python benchmarks/split_backward.py                                             # CPU, float32, 1024 x 1024
    python benchmarks/split_backward.py --hidden 4096 --tokens 4096 --dtype bf16    # a GPU

A stack of ColumnParallelLinear under megatron-core's DDP, gradients accumulated in ``main_grad``. Every round times the
fused backward of upstream, ours fused (BW), and ours split (B, then W) one after the other; medians and the median of
the rounds' ratios are reported. On a GPU upstream's accumulates within its product, too (``gradient_accumulation_fusion``), as
with apex or Transformer Engine: by apex where that is installed, and otherwise by the kernel of torch that W takes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
from common import command_line, in_rounds, print_table, save
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel import layers as upstream_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from one_device import DEVICE, DTYPES, device_name, one_rank, timed

from megatron.pipeline.backward.linear import add_product
from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.model.split_linear import split_weights


class Stack(MegatronModule):
    """Linears, one after the other, without anything between them."""

    def __init__(self, config: TransformerConfig, layers: int) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.layers = torch.nn.ModuleList(
            ColumnParallelLinear(size, size, config=config, init_method=config.init_method, bias=False, gather_output=False)
            for _ in range(layers)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


def fuse_accumulation() -> None:
    """Have megatron-core's own linears find apex's product that accumulates, or one by torch that does the same."""
    module: Any = upstream_layers
    if not module._grad_accum_fusion_available:

        def add(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
            add_product(main_grad, grad_output, total_input)

        module.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=add, wgrad_gemm_accum_fp16=add)
        module._grad_accum_fusion_available = True


def build(options: argparse.Namespace, split: bool) -> DistributedDataParallel:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=1,
        params_dtype=DTYPES[options.dtype],
        use_cpu_initialization=DEVICE == "cpu",
        gradient_accumulation_fusion=DEVICE == "cuda",
    )
    stack = Stack(config, options.layers)
    if split:
        split_weights(stack)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=split)
    return DistributedDataParallel(config, ddp, stack)


def backward(model: DistributedDataParallel, options: argparse.Namespace, split: bool) -> tuple[float, float]:
    """Seconds of the backward (of B if it is split) and of W."""
    hidden = torch.ones(options.tokens, 1, options.hidden, dtype=DTYPES[options.dtype], device=DEVICE, requires_grad=True)
    output = model(hidden)
    gradient = torch.ones_like(output)
    if not split:
        return timed(lambda: output.backward(gradient))[0], 0.0
    tasks: list[WeightTask] = []

    def b() -> None:
        with deferring(tasks):
            output.backward(gradient)

    def w() -> None:
        with torch.no_grad():
            for task in tasks:
                task.run()

    return timed(b)[0], timed(w)[0]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", metavar="FILE", help="append the seconds of every round, as JSON")
    options = parser.parse_args()

    one_rank()
    fuse_accumulation()
    upstream, ours = build(options, split=False), build(options, split=True)

    def once() -> tuple[float, ...]:
        fused, _ = backward(upstream, options, split=False)
        whole, _ = backward(ours, options, split=False)
        return fused, whole, *backward(ours, options, split=True)

    rounds = in_rounds({"all": once}, options.rounds, warm_up=3)["all"]
    title = (
        f"{options.layers} linears of {options.hidden} x {options.hidden}, {options.tokens} tokens, {options.dtype}, "
        f"{device_name()}, {options.rounds} rounds"
    )
    rows, seconds_of = [], {}
    for name, chosen in (
        ("upstream fused", lambda r: r[0]),
        ("ours fused (BW)", lambda r: r[1]),
        ("ours B", lambda r: r[2]),
        ("ours W", lambda r: r[3]),
        ("ours B + W", lambda r: r[2] + r[3]),
    ):
        seconds_of[name] = [chosen(r) for r in rounds]
        ratio = statistics.median(chosen(r) / r[0] for r in rounds)
        rows.append([name, f"{1000 * statistics.median(seconds_of[name]):.2f}", f"{ratio:.3f}"])
    save(options.save, f"Backward of {title}", seconds_of)
    print_table(title, ("backward", "median ms", "ratio to upstream fused (median of rounds)"), rows, width=110)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
