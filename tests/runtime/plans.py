"""Trainings of a tiny model with experts, for the tests of layer plans: what each parameter's gradient and value become."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import tiny_gpt
import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from runtime import braids

EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 1e-2 "
    "--disable-bias-linear --lr 1e-3 --clip-grad 0"
)
Result = tuple[Any, dict[Any, str], dict[str, int]]
OVERLAP = "--overlap-moe-expert-parallel-comm"


def train(
    schedule: str,
    pp: int,
    microbatches: int = 4,
    flags: str = "",
    iterations: int = 3,
    braided: bool = False,
    digested: bool = True,
) -> Any:
    """Losses and norms of this rank, a digest of every parameter and its gradient by names that no placement changes, and how
    many braids ran.

    Args:
        digested: False for no digests.
    """
    given = f"{EXPERTS} {flags}" if "--fp16" in flags else f"{EXPERTS} --bf16 {flags}"
    run = tiny_gpt.Run(schedule, pp=pp, microbatches=microbatches, flags=tuple(given.split()))
    braids.BraidingExecutor.braids.clear()
    if braided:
        braids.install(run)
    try:
        steps = [run.step(iteration) for iteration in range(iterations)]
    finally:
        braids.uninstall()
    counts = dict(braids.BraidingExecutor.braids)
    if not digested:
        return steps, counts
    if run.args.overlap_param_gather:  # of the last step
        for chunk in run.chunks:
            chunk.start_param_sync(force_sync=True)
    return steps, digests(run.chunks, gradients="--use-distributed-optimizer" not in flags), counts


def digests(chunks: Any, gradients: bool) -> dict[Any, str]:
    """By name and by place among the ranks that have the same layers.

    Args:
        gradients: whether this rank has whole ones.
    """
    replica, found = parallel_state.get_data_parallel_rank(), {}
    for chunk in unwrap_model(list(chunks)):
        numbers = {f"decoder.layers.{place}.": layer.layer_number for place, layer in enumerate(chunk.decoder.layers)}
        for name, parameter in chunk.named_parameters():
            of_layer = re.match(r"decoder\.layers\.\d+\.", name)
            key = name if of_layer is None else f"layer {numbers[of_layer[0]]} {name[of_layer.end() :]}"
            found[replica, key, "value"] = _digest(parameter.data)
            if gradients:
                found[replica, key, "gradient"] = _digest(parameter.main_grad)
    return found


def merged(results: list[Result]) -> dict[Any, str]:
    """Of all ranks."""
    return {key: digest for _, found, _ in results for key, digest in found.items()}


def losses(results: list[Result]) -> list[list[float]]:
    """Of every rank that has the loss."""
    return [[loss for loss, _ in steps] for steps, _, _ in results if steps[0][0] is not None]


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()
