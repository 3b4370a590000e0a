"""What does the split backward cost the host? F, and B and W, of layers over F and BW of layers that delay nothing.

    python scripts/fetch_transformer_engine.py
    python benchmarks/host_time.py                # layers of a GPT as megatron-core builds them of Transformer Engine's modules
    python benchmarks/host_time.py --experts 32   # with experts in grouped products

On a CPU, with operations of torch on a few numbers in place of the compiled module (tests/engine/stand_in.py), in bf16 under DDP.
Counted are bytecode instructions, which are the same in every run, and the time of the thread: both models take turns, and
medians of ratios are reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from engine import releases, stand_in

LAYERS, WIDTH, TOKENS, HEADS = 4, 32, 16, 2
Measure = Callable[[Callable[[], Any]], float]


def build(delayed: bool, experts: int) -> Any:
    """Layers under DDP, split if they delay."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer import TransformerConfig, build_module

    from megatron.pipeline.model import te_linear
    from megatron.pipeline.model.split_linear import split_weights

    of_experts = {"num_moe_experts": experts, "moe_grouped_gemm": True, "moe_router_topk": 2, "moe_ffn_hidden_size": WIDTH}
    llama: dict[str, Any] = {"add_bias_linear": False, "gated_linear_unit": True, "normalization": "RMSNorm"}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        activation_func=torch.nn.functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        **llama,
        **(of_experts if experts else {}),
    )
    config.gradient_accumulation_fusion = True  # asks for apex where it is given
    if delayed:
        te_linear.delay_weight_gradients(config)
    spec = get_gpt_layer_with_transformer_engine_spec(experts or None, moe_grouped_gemm=bool(experts))
    layers = torch.nn.ModuleList(build_module(spec, config=config, layer_number=1 + number) for number in range(LAYERS))
    if delayed:
        split_weights(layers)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, delay_wgrad_compute=delayed)
    return DistributedDataParallel(config, ddp, layers)


class Stage:
    """What ``StagePasses`` runs: the layers."""

    def __init__(self, model: Any) -> None:
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

        self._model = model
        self._positions = RotaryEmbedding(WIDTH // HEADS, 1.0, use_cpu_initialization=True)(TOKENS)

    def forward(self, _: Any, inputs: list[Any], keep_graph: bool) -> list[Any]:
        hidden = inputs[0]
        for layer in self._model.module:
            hidden, _ = layer(hidden, attention_mask=None, rotary_pos_emb=self._positions)
        return [hidden]

    def backward(self, _: Any, inputs: list[Any], outputs: list[Any], gradients: list[Any]) -> list[Any]:
        torch.autograd.backward(outputs, gradients)
        return [inputs[0].grad]

    def release(self, outputs: list[Any]) -> None:
        """Nothing is sent."""


def microbatch(model: Any, split: bool, measure: Measure) -> tuple[float, float]:
    """Measures of F, and of BW or of B and W."""
    from megatron.pipeline.runtime.stage_passes import StagePasses
    from megatron.pipeline.schedule.core.passes import Kind, Pass

    stage: Any = Stage(model)
    passes = StagePasses(stage, program=())
    hidden = torch.ones(TOKENS, 1, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(TOKENS, 1, WIDTH, dtype=torch.bfloat16)

    def backward() -> None:
        passes.backward(Pass(Kind.B if split else Kind.BW, 0), [gradient])
        if split:
            passes.weight(Pass(Kind.W, 0), [])

    with model.no_sync():  # as in all microbatches but the last
        return measure(lambda: passes.forward(Pass(Kind.F, 0), [hidden])), measure(backward)


def seconds(work: Callable[[], Any]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def instructions(work: Callable[[], Any]) -> int:
    """Bytecode instructions that a function executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)
    return count


def ratios(own: Any, split: Any, measure: Measure, times: int) -> list[float]:
    """Of F, and of the backward, the split model's over the other's: medians of some microbatches in turn."""
    measured = [(*microbatch(own, False, measure), *microbatch(split, True, measure)) for _ in range(times)]
    f, backward, own_f, own_backward = (statistics.median(one) for one in zip(*measured, strict=True))
    return [own_f / f, own_backward / backward]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    release = releases.fetched()[-1]
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0")  # attention in operations of torch, too
    stand_in.load(releases.FOLDER / release)
    from one_device import one_rank

    one_rank()
    stand_in.see_the_cpu()
    own, split = build(False, options.experts), build(True, options.experts)
    ratios(own, split, seconds, times=20)  # caches are filled
    counted = ratios(own, split, instructions, times=1)
    timed = zip(*(ratios(own, split, seconds, times=10) for _ in range(options.rounds)), strict=True)
    print(f"Transformer Engine {release}: instructions, and time in {options.rounds} rounds")
    for name, count, times in zip(("F", "B + W"), counted, timed, strict=True):
        print(f"{name:5} x {count:.3f}, x {statistics.median(times):.3f}")


if __name__ == "__main__":
    main()
