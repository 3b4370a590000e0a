"""Flags of a rehearsal."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner import Links, device, reading

MEASURED = 5  # iterations: what ``runtime/profiling.py`` takes
_PER_NODE = 8  # GPUs of a machine that is rehearsed for


def least_replicas(args: Namespace) -> int:
    """The fewest data-parallel replicas of the other layers whose ranks can share the experts of a layer as the flags say."""
    if not args.num_experts:
        return 1
    shared = args.tensor_model_parallel_size * args.context_parallel_size
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return math.lcm(shared, experts) // shared


def least_ranks(args: Namespace) -> int:
    """The fewest ranks of a training: those of one replica of the model, or of as many as share its experts."""
    sizes = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    return math.prod(sizes) * least_replicas(args)


def of_rehearsal(args: Settings) -> Settings:
    """Settings of ``--rehearse``, with what ``--rehearse-hop`` says: seconds, and the links of the machine that it names.

    Raises:
        ValueError: says which, and what to do.
    """
    if not args.rehearsal.on:
        return args
    for flag, last in (("--train-iters", args.train_iters), ("--exit-interval", args.exit_interval)):
        if last is not None and last < MEASURED:
            raise ValueError(f"--rehearse measures {MEASURED} iterations, and {flag} is {last}: raise it")
    if (text := args.rehearsal.hop) is None:
        return args
    try:
        seconds, links = float(text), None
    except ValueError:
        with reading.NamedErrors(f"--rehearse-hop {text}: seconds, or"):
            links = Links.of(device.read(text), _PER_NODE, describe(args).ranks)
        seconds = links.hop.seconds(_message_bytes(args))
    if not 0 <= seconds < math.inf:
        raise ValueError(f"--rehearse-hop {text}: a message takes 0 seconds or more")
    return args | {"rehearsal": replace(args.rehearsal, seconds=seconds, links=links)}


def _message_bytes(args: Namespace) -> float:
    number = 2 if args.bf16 or args.fp16 else 4  # bytes
    size = number * args.micro_batch_size * args.seq_length * args.hidden_size
    shared = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return float(size / shared)
