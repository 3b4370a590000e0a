"""Write the results of a search as files for ``pretrain_gpt.py --config``: the flags, and the costs of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.pipeline.session.atomic import write_text
from megatron.pipeline.tune.iteration import Result
from megatron.pipeline.tune.layouts import SEARCHED

_NOTED = {"expert_tensor_parallel_size": "expert-tensor-parallel-size 1", "grad_reduce_in_bf16": "grad-reduce-in-bf16",
          "exp_avg": "moments in bf16", "fp8_param_gather": "fp8-param-gather",
          "pipeline_model_parallel_layout": "pipeline-model-parallel-layout"}  # fmt: skip


def write_config(result: Result, flags: Sequence[str], path: Path, head: str) -> None:
    """Write one training: ``path``, and in the same directory ``.costs.json`` where its schedule is planned for costs.

    Args:
        flags: the command line of ``pretrain_gpt.py`` that the search began with.
        head: what to say at the top of the file, line by line.

    Raises:
        OSError: a file cannot be written.
    """
    from megatron.pipeline.flags.arguments import parse
    from megatron.pipeline.flags.flags import actions, as_flags
    from megatron.pipeline.flags.importers.upstream import left

    changes: dict[str, Any] = SEARCHED | dict(result.candidate.changes)
    if not result.candidate.is_stock:
        costs = path.with_suffix(".costs.json")
        write_text(costs, result.costs.to_json() + "\n")
        changes["pipeline_costs"] = costs.name
        if result.memory_limit is not None:
            changes["pipeline_memory_limit"] = f"{result.memory_limit / 2**30:.4f}GiB"
    args = parse(flags, predicts=True)
    if without := left(args):
        head += f"\nWithout flags of Megatron-LM that pretrain_gpt.py does not have: {' '.join(without)}"
    if args.trained != "all":
        head += f"\nPredicted with --trained {args.trained}: the script that trains freezes the rest."
    values = vars(args) | changes | {"trained": "all"}  # a training counts what requires gradients
    config = as_flags({name: values.get(name) for name in actions()})
    config["pipeline-schedule"] = changes["pipeline_schedule"]  # even our default: mpipe launch has another
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    write_text(path, f"{comment}\n{yaml.safe_dump(config, sort_keys=False)}")


def chosen(result: Result) -> str:
    """A schedule with its number of chunks where a user may choose it, such as ``interleaved, 3 chunks``."""
    variant = result.candidate.variant
    name = f"stock {variant.name}" if result.candidate.is_stock else variant.name
    return f"{name}, {variant.chunks} chunks" if variant.chunks and variant.name == "interleaved" else name


def extras(result: Result) -> list[str]:
    """The options of a training in addition to its schedule, as flags without their dashes."""
    args = result.candidate.args
    options = {
        f"vocab-parallel {args.vocabulary.spread}": args.vocabulary.spread,
        "layer-redistribution": args.vocabulary.redistributes,
        "account-for-embedding/loss": args.account_for_loss_in_pipeline_split,
        " ".join(["recompute", str(args.recompute_granularity), *(args.recompute_modules or ())]): args.recompute_granularity,
        f"offload {args.offloading.mode}": args.offloading.mode,
        **{flag: result.candidate.changes.get(name) for name, flag in _NOTED.items()},
        "overlap-moe-expert-parallel-comm": args.overlap_moe_expert_parallel_comm,
        "post-validation": args.steps.ahead,
    }
    return [what for what, given in options.items() if given]
