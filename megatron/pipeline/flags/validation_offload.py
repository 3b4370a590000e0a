"""Do the flags about activations in host memory fit the others? Part of ``validation.validate``."""

from __future__ import annotations

import torch

from megatron.pipeline.flags.flags import given
from megatron.pipeline.flags.settings import PROFILE, Settings


def of_offload(args: Settings) -> Settings:
    """Settings of offloading; ``--offload-profile`` is what it stands for.

    Raises:
        ValueError: another flag contradicts it, or makes it impossible; says what to change.
    """
    own = args.offloading
    details = ("profile", "host_memory", "min_size", "cpu_bandwidth", "numa_binding")
    named = given(args, *(f"offload_{name}" for name in details))
    if own.mode is None and named and not args.pipeline.schedule.startswith("file:"):  # a file may have copies of its own
        raise ValueError(
            f"{' and '.join(named)}: there is nothing to offload: give --offload full or selective, or leave "
            f"{'them' if len(named) > 1 else named[0]} out"
        )
    if own.cpu_bandwidth is not None and torch.cuda.is_available():
        raise ValueError("--offload-cpu-bandwidth is for machines without a GPU, whose own bandwidth counts: leave it out")
    if own.profile:
        args |= {"pipeline_costs": PROFILE}
    if own.mode and own.host_memory is not None and args.pipeline.costs is None:
        raise ValueError(
            f"--offload-host-memory {own.host_memory / 2**20:g}MiB: how much fits is known once activations have "
            "been measured: give --offload-profile, or --pipeline-costs FILE with what a run before has measured"
        )
    return args
