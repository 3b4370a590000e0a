"""Do the flags about activations in host memory fit the others? Part of ``validation.validate``."""

from __future__ import annotations

from argparse import Namespace

import torch

from megatron.pipeline.flags.flags import PROFILE, given
from megatron.pipeline.schedule.core.names import OFF


def check_offload(args: Namespace) -> None:
    """Check offloading, and make ``--offload-profile`` what it stands for.

    Raises:
        ValueError: another flag contradicts it, or makes it impossible; says what to change.
    """
    details = ("profile", "host_memory", "min_size", "cpu_bandwidth", "numa_binding")
    named = given(args, *(f"offload_{name}" for name in details))
    if args.offload == OFF and named and not args.pipeline_schedule.startswith("file:"):  # a file may have copies of its own
        raise ValueError(
            f"{' and '.join(named)}: there is nothing to offload: give --offload full or selective, or leave "
            f"{'them' if len(named) > 1 else named[0]} out"
        )
    if args.offload_cpu_bandwidth is not None and torch.cuda.is_available():
        raise ValueError("--offload-cpu-bandwidth is for machines without a GPU, whose own bandwidth counts: leave it out")
    if args.offload_profile:
        args.pipeline_costs = PROFILE
    if args.offload != OFF and args.offload_host_memory is not None and args.pipeline_costs is None:
        raise ValueError(
            f"--offload-host-memory {args.offload_host_memory / 2**20:g}MiB: how much fits is known once activations have "
            "been measured: give --offload-profile, or --pipeline-costs FILE with what a run before has measured"
        )
