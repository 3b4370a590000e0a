"""Flags of a rehearsal."""

from __future__ import annotations

import math
from argparse import Namespace

from megatron.pipeline.costmodel import device
from megatron.pipeline.costmodel.links import links_of
from megatron.pipeline.flags.flags import given

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


def rehearsed_ranks(args: Namespace, world_size: int) -> int:
    """The ranks of the training that is rehearsed, of which ``world_size`` are there: all, or with ``--rehearse-replicas`` one
    of every stage.

    Sets ``rehearse_share``: how many ranks of a stage there are for one that is there.

    Raises:
        ValueError: the flag is wrong, or another number of ranks was started.
    """
    args.rehearse_share = 1
    if args.rehearse_replicas is None:
        return world_size
    word, colon, number = args.rehearse_replicas.partition(":")
    if word != "fake" or (colon and not (number.isdecimal() and int(number))):
        raise ValueError(
            f"--rehearse-replicas {args.rehearse_replicas}: fake, or fake:8 for 8 data-parallel replicas; leave it out to start "
            "all ranks"
        )
    pipeline, shared = args.pipeline_model_parallel_size, args.tensor_model_parallel_size * args.context_parallel_size
    args.rehearse_share = shared * (int(number) if number else least_replicas(args))
    if world_size != pipeline:
        raise ValueError(
            f"--rehearse-replicas {args.rehearse_replicas} runs one rank for each of the {pipeline} of "
            f"--pipeline-model-parallel-size, which stands in for {args.rehearse_share}, and {world_size} were started: start "
            f"{pipeline}, or leave --rehearse-replicas out"
        )
    return world_size * args.rehearse_share


def check_rehearsal(args: Namespace) -> None:
    """Refuse flags that do not go with ``--rehearse``, and make a number of ``--rehearse-hop``: seconds.

    Sets ``rehearse_links``: those of the machine that ``--rehearse-hop`` names, or None.

    Raises:
        ValueError: says which, and what to do.
    """
    args.rehearse_links = None
    vars(args).setdefault("rehearse_share", 1)  # a script's ranks are all there: launch/check.py
    if not args.rehearse:
        if wrong := given(args, "rehearse_hop", "rehearse_dir", "rehearse_park", "rehearse_replicas"):
            raise ValueError(f"{wrong[0]} is for a rehearsal: add --rehearse, or leave it out")
        return
    if args.train_iters is not None and args.train_iters < MEASURED:
        raise ValueError(f"--rehearse measures {MEASURED} iterations, and --train-iters is {args.train_iters}: raise it")
    if args.rehearse_hop is not None:
        args.rehearse_hop = _hop(args.rehearse_hop, args)


def _hop(text: str | float, args: Namespace) -> float:
    """Seconds of a message between two stages, from the flag's text."""
    try:
        seconds = float(text)
    except ValueError:
        return _over_links(device.read(str(text)), args)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"--rehearse-hop {text}: a message takes 0 seconds or more")
    return seconds


def _over_links(gpu: device.Device, args: Namespace) -> float:
    """The same over the links of a kind of GPU, for the layout that the flags have; keeps these links."""
    number = 2 if args.bf16 or args.fp16 else 4  # bytes
    size = number * args.micro_batch_size * args.seq_length * args.hidden_size
    args.rehearse_links = links = links_of(gpu, _PER_NODE, args)
    shared = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    return links.hop.seconds(size / shared)
