"""A Llama-like model of 8 stages on the one device of this machine: what schedules would take on 8, and their memory.

    python benchmarks/rehearse_llama.py

Rehearses (``--rehearse``) stock interleaved 1F1B, zb-v, v-half and offload in bf16. The model has the width of Llama 3.2 1B and
as many layers, in multiples of 16, as the free memory of the GPU has room for: all 8 ranks live on it at once. On a CPU it is a
small model, in float32 unless ``--bf16``, which shows that the benchmark runs. For every schedule: tokens per second with a
device for each rank, the same for stock at its best from the same measurement, the bubble, and the most that a rank's peak of
activations is off its plan.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import command_line, print_table, rehearsed, save

ROOT = Path(__file__).resolve().parents[1]
RANKS, MICROBATCHES, SEQUENCE = 8, 16, 1024
SCHEDULES = {
    "stock interleaved": "stock --num-virtual-stages-per-pipeline-rank 2",
    "zb-v": "zb-v",
    "v-half": "v-half",
    "offload": "gis-h --offload full --offload-min-size 8KiB",
}
COMMON = (
    f"--pipeline-model-parallel-size {RANKS} --micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters 20 "
    "--exit-interval 5 --lr 1e-4 --mock-data --tokenizer-type ByteLevelTokenizer --num-workers 0 --eval-iters 0 --log-interval 1 "
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --untie-embeddings-and-output-weights"
)
ON_GPU = f"--hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
--seq-length {SEQUENCE} --bf16 --vocab-size 32000 --rehearse-hop H100-80GB"
COPIES_ON_CPU = "--offload-cpu-bandwidth 20"  # GB/s; a GPU has its own
ON_CPU = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 64 --rehearse-hop 1e-4"
_PARAMETERS = 2 * 2048 * (2048 + 512) + 3 * 2048 * 8192  # of a layer: attention with 8 groups, gated MLP
_OF_PARAMETER = 18  # bytes in bf16: weight, gradient in float32, and Adam's state
_OF_ACTIVATIONS = SEQUENCE * (40 * 2048 + 5 * 32 * SEQUENCE)  # of a layer and microbatch, attention not fused
_HELD = 9  # microbatches of a layer, with some room
_CONTEXT = 0.6e9  # bytes of a process on the GPU, before torch has any


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, help="a multiple of 16; by default as many as fit, and 16 on a CPU")
    parser.add_argument("--bf16", action="store_true", help="on a CPU")
    parser.add_argument("--save", help="a file for the seconds of the iterations")
    options = parser.parse_args()
    free = _free()
    layers = options.layers or (16 if free is None else layers_that_fit(free))
    found = {}
    for name, schedule in SCHEDULES.items():
        flags = flags_of(schedule, layers, on_gpu=free is not None)
        if options.bf16 and free is None:
            flags += " --bf16"
        found[name] = rehearsed(RANKS, str(ROOT / "pretrain_gpt.py"), flags)
        print(summary({name: found[name]}), flush=True)
    print_table(
        f"{layers} layers, {RANKS} stages, {MICROBATCHES} microbatches",
        ["schedule", "tokens/s", "stock's best", "bubble", "peak off plan", "most MiB of activations"],
        [row(name, one) for name, one in found.items()],
    )
    save(options.save, "Predicted iteration", {name: [one["iteration_seconds"]] for name, one in found.items()})
    print(summary(found))


def flags_of(schedule: str, layers: int, on_gpu: bool) -> str:
    """Those of a rehearsal, from the flags of a schedule."""
    more = f" {COPIES_ON_CPU}" if "--offload" in schedule and not on_gpu else ""
    return f"{COMMON} --num-layers {layers} {ON_GPU if on_gpu else ON_CPU} --pipeline-schedule {schedule}{more}"


def layers_that_fit(free: float) -> int:
    """The most layers, a multiple of 16 from 16 to 64, whose weights and activations all fit into ``free`` bytes."""
    each = _PARAMETERS * _OF_PARAMETER + _HELD * _OF_ACTIVATIONS
    room = 0.9 * free - RANKS * _CONTEXT - 2 * 32000 * 2048 * _OF_PARAMETER
    return max(16, min(64, int(room / each) // 16 * 16))


def row(name: str, found: Mapping[str, Any]) -> list[str]:
    """Of the table."""
    tokens, stock = found["tokens_per_second"], found["stock"]
    best = tokens * found["iteration_seconds"] / stock["iteration_seconds"]
    most = max(rank["activation_bytes"] for rank in found["ranks"]) / 2**20
    return [name, f"{tokens:,.0f}", f"{best:,.0f}", f"{found['bubble_rate']:.1%}", f"{_off_plan(found):.1%}", f"{most:,.0f}"]


def summary(found: Mapping[str, Mapping[str, Any]]) -> str:
    """One line, which scripts/gpu.py looks for."""
    parts = [f"{name} {one['tokens_per_second']:,.0f}" for name, one in found.items()]
    return f"predicted tokens/s: {', '.join(parts)}; peaks within {max(map(_off_plan, found.values())):.1%} of plan"


def _off_plan(found: Mapping[str, Any]) -> float:
    """The most that a rank's peak of activations differs from the planned one."""
    return max(abs(rank["activation_bytes"] / rank["planned_activation_bytes"] - 1) for rank in found["ranks"])


def _free() -> float | None:
    """Bytes of the GPU that nothing has; None without one. Asked in a process that ends, since a context takes some."""
    ask = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else -1)"
    free = float(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout.split()[-1])
    return None if free < 0 else free


if __name__ == "__main__":
    main()
