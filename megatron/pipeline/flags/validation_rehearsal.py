"""Flags of a rehearsal."""

from __future__ import annotations

from argparse import Namespace

from megatron.pipeline.flags.flags import PROFILE, given

MEASURED = 5  # iterations: what ``runtime/profiling.py`` takes


def check_rehearsal(args: Namespace) -> None:
    """Refuse flags that do not go with ``--rehearse``.

    Raises:
        ValueError: says which, and what to do.
    """
    if not args.rehearse:
        if wrong := given(args, "rehearse_hop", "rehearse_dir"):
            raise ValueError(f"{wrong[0]} is for a rehearsal: add --rehearse, or leave it out")
        return
    if args.pipeline_costs == PROFILE:
        raise ValueError(
            f"--rehearse measures what passes cost, and writes it to {args.rehearse_dir}/costs.json: leave --pipeline-costs "
            f"{PROFILE} and --offload-profile out, and give --pipeline-costs with that file in a second run"
        )
    if args.save:
        raise ValueError(
            f"--rehearse trains a few iterations, and --save {args.save} would keep them: leave --save out, or --rehearse"
        )
    if args.train_iters is not None and args.train_iters < MEASURED:
        raise ValueError(f"--rehearse measures {MEASURED} iterations, and --train-iters is {args.train_iters}: raise it")
