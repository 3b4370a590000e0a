"""Time that data-parallel replicas add to an iteration: the sum of their gradients, and new weights on all of them."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.costmodel.links import Links
from megatron.pipeline.costmodel.memory import expert_copies, gathered_bytes, gradient_bytes
from megatron.pipeline.costmodel.parameters import Parameters

BUCKET = 40e6  # parameters whose gradients megatron-core sums at once; no pass overlaps the last sum


def replica_seconds(args: Namespace, links: Links, count: Parameters, forward: float, backward: float) -> float:
    """Seconds that an iteration waits for the sum of gradients and for new weights.

    Gradients are summed while the last microbatch's backward runs, and new weights gathered while the first forward does, where
    ``--overlap-grad-reduce`` and ``--overlap-param-gather`` say so; what these do not hide counts, and the last bucket.

    Args:
        count: parameters of the rank that has most.
        forward, backward: seconds of a microbatch's forwards, and of its backwards with W, on the rank where they take least.
    """
    copies = args.data_parallel_size * args.context_parallel_size
    if copies == 1:
        return 0.0

    def gathered(size: float) -> float:
        """Seconds until all ranks with the same parameters have ``size`` bytes of each."""
        of_experts = links.expert_data.all_gather(size * count.expert, expert_copies(args)) if count.expert else 0.0
        return links.data.all_gather(size * count.dense, copies) + of_experts

    once = gathered(gradient_bytes(args))
    if not args.use_distributed_optimizer:
        once *= 2
    bucket = once * min(1.0, BUCKET / count.total)
    reduce = max(bucket, once - links.hides(once, backward)) if args.overlap_grad_reduce else once
    if not args.use_distributed_optimizer:
        return reduce
    gather = gathered(gathered_bytes(args, count))
    return reduce + (gather - links.hides(gather, forward) if args.overlap_param_gather else gather)
