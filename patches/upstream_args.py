"""The one place that writes Megatron-LM's flags: those of which its own code has to see another value than was given."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_DIVIDES = "upstream's validation divides layers as its own schedule places them, unless a layout has one stage a rank"
_REASONS = {
    "num_layers_per_virtual_pipeline_stage": _DIVIDES,
    "num_virtual_stages_per_pipeline_rank": _DIVIDES,
    "pipeline_model_parallel_layout": _DIVIDES,
    "hybrid_layer_pattern": _DIVIDES,
    "dist_ckpt_optim_fully_reshardable": "a checkpoint of buckets is for one placement",
    "barrier_with_L1_time": "timers would make all ranks wait for each other, which step ahead",
    "exit_signal_handler": "without it SIGTERM loses what was trained since the last checkpoint",
    "rerun_mode": "else ranks agree after every backward whether to run it again",
    "virtual_pipeline_model_parallel_size": "upstream builds that many chunks",
    "masked_softmax_fusion": "the kernel has causal masks for as many keys as queries only, and slices have more keys",
    "pipeline_placement": "what it saves says where each rank's chunks are",
    "pipeline_model_parallel_size": "a rank with both ends of the model shares whole batches, as a pipeline of one rank does",
}


def write(args: Namespace, **values: Any) -> None:
    """Give upstream's flags other values, from now on."""
    assert values.keys() <= _REASONS.keys(), "every flag that is written has its reason"
    vars(args).update(values)


@contextmanager
def written(args: Namespace, **values: Any) -> Iterator[None]:
    """The same for as long as upstream's own function runs."""
    given = {name: getattr(args, name, None) for name in values}
    write(args, **values)
    try:
        yield
    finally:
        write(args, **given)
