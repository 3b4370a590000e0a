"""The pipeline that the flags ask for, planned and proved before any process group exists."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

from megatron.pipeline.runtime.p2p import Posting
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.replan import Steps, replan
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.choose import AUTO, Request, candidates, choose, variants
from megatron.pipeline.schedule.costs import Costs, StageCosts, uniform
from megatron.pipeline.schedule.placement import Placement
from megatron.pipeline.schedule.simulate import activation_peaks
from megatron.pipeline.training.atomic import write_text
from megatron.pipeline.training.config import microbatch_counts

logger = logging.getLogger(__name__)

PROFILE = "profile"  # where a user names costs: measured in this run
_UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


def plan_pipeline(args: Namespace, measure: bool | None = None) -> Pipeline:
    """Plan every iteration that this training will have (several, if the batch size ramps up).

    Args:
        args: flags that have gone through ``validate``.
        measure: see ``Pipeline``; by default where the flags ask for what is measured.

    Raises:
        ValueError: the schedule is unknown, is not one that training can run, or does not fit the ranks, chunks,
            microbatches, costs or the memory limit.
    """
    profiles = args.pipeline_costs == PROFILE
    costs = None if args.pipeline_costs is None or profiles else _read_costs(args.pipeline_costs)
    ranks, counts = args.pipeline_model_parallel_size, microbatch_counts(args)
    text = args.pipeline_memory_limit
    limit = _memory_limit(text, ranks, max(counts), costs)
    if limit is None and text and not profiles:
        raise ValueError(f"--pipeline-memory-limit {text} needs --pipeline-costs with activations in bytes: a file, or {PROFILE}")
    if limit is None and text:
        logger.info("memory limit of %s: until activations have been measured the schedule is planned without it", text)
    name, chunks = args.pipeline_schedule, args.chunks
    if name == AUTO:
        # What is not yet known in bytes is taken to be 1F1B's peak.
        unknown = _peak_of_1f1b(ranks, max(counts), None) if text else None
        name, chunks = _best(ranks, max(counts), chunks, costs, unknown if limit is None else limit)
    elif name in _PLANNED_ONLY:
        raise ValueError(
            f"--pipeline-schedule {name} holds every layer on two ranks and is planned and simulated only: take dualpipe-v, "
            f"which is as fast with every layer once, or another of {', '.join(_TRAINED)}"
        )
    pipeline = Pipeline(
        name,
        ranks,
        chunks,
        memory_limit=limit,
        costs=costs,
        posting=Posting(args.pipeline_p2p),
        measure=profiles or (bool(args.metrics or args.tensorboard_dir or args.pipeline_trace) if measure is None else measure),
    )
    if pipeline.placement.chunks > 1 and ranks == 1:
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} with {pipeline.placement.chunks} chunks per rank needs at least 2 pipeline "
            "ranks (megatron-core has no virtual pipeline on one): raise --pipeline-model-parallel-size, or take 1f1b or zb-h1"
        )
    for microbatches in counts:
        pipeline.check(microbatches)
    return pipeline


def replanning(args: Namespace, pipeline: Pipeline) -> Steps | None:
    """The steps that profile and plan again, if ``--pipeline-costs profile`` asks for them."""
    if args.pipeline_costs != PROFILE:
        return None
    ranks, most = args.pipeline_model_parallel_size, max(microbatch_counts(args))
    steps = replan(pipeline, partial(_memory_limit, args.pipeline_memory_limit, ranks, most), partial(_write_costs, args))
    next(steps)
    return steps


def _write_costs(args: Namespace, text: str) -> Path | None:
    """Write measured costs where ``--pipeline-costs FILE`` and ``mpipe --costs FILE`` can read them."""
    path = args.pipeline_costs_cache
    if path is None:
        directory = args.save or args.pipeline_trace
        if directory is None:
            return None
        path = Path(directory) / "pipeline_costs.json"
    write_text(Path(path), text)
    return Path(path)


_PLANNED_ONLY = [name for name, family in families.FAMILIES.items() if family.placement(4, family.chunks).replicas > 1]
_TRAINED = [name for name in families.FAMILIES if name not in _PLANNED_ONLY]


def _best(ranks: int, microbatches: int, chunks: int | None, costs: Costs | None, limit: float | None) -> tuple[str, int | None]:
    """The family and its number of chunks that ``mpipe plan --schedule auto`` would choose among those that train."""

    def costs_of(placement: Placement) -> Costs:
        if costs is None:
            return uniform(placement)
        if len(costs.stages) != placement.ranks * placement.chunks:
            raise ValueError(f"the costs are for {len(costs.stages)} stages")
        return costs

    names = _TRAINED if ranks > 1 else [name for name in _TRAINED if families.FAMILIES[name].chunks == 1]
    wanted = [
        variant
        for variant in variants(ranks, names, None if chunks is None else [chunks])
        if variant.group is None and families.FAMILIES[variant.name].splits == 1  # slices change sums: they are asked for by name
    ]
    if chunks is not None:
        wanted = [variant for variant in wanted if (variant.chunks or families.FAMILIES[variant.name].chunks) == chunks]
    planned, refused = candidates(Request(ranks, microbatches, costs_of, limit), wanted)
    if not planned:
        reasons = "; ".join(f"{refusal.variant}: {refusal.reason}" for refusal in refused)
        raise ValueError(
            f"--pipeline-schedule auto found no schedule for {ranks} ranks and {microbatches} microbatches ({reasons})"
        )
    best = choose(planned).best
    logger.info("schedule auto: %s, the shortest of %d (span %.6g)", best.variant, len(planned), best.value)
    return best.variant.name, best.variant.chunks


def _read_costs(path: str) -> Costs:
    """Costs from a file that ``Costs.from_json`` reads."""
    try:
        return Costs.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--pipeline-costs {path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"--pipeline-costs {path}: not costs: the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"--pipeline-costs {path}: {error}") from None


def _memory_limit(text: str | None, ranks: int, microbatches: int, costs: Costs | None) -> float | None:
    """The limit in the costs' unit of memory; without costs that is a microbatch of a rank's activations, and bytes are None."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Za-z]*)", text)
    if match is None or (match[2] and match[2] not in _UNITS):
        raise ValueError(f"--pipeline-memory-limit {text}: expected a share of 1F1B's peak such as 0.5, or bytes such as 12GiB")
    if match[2]:
        return None if costs is None else float(match[1]) * _UNITS[match[2]]
    return float(match[1]) * _peak_of_1f1b(ranks, microbatches, costs)


def _peak_of_1f1b(ranks: int, microbatches: int, costs: Costs | None) -> float:
    """The most that a rank of 1F1B holds when the model is cut into one stage per rank."""
    schedule = families.plan("1f1b", ranks, microbatches)
    if costs is None:
        return max(activation_peaks(schedule, uniform(schedule.placement)))
    chunks = max(1, len(costs.stages) // ranks)
    held = [sum(stage.activation for stage in costs.stages[rank * chunks : (rank + 1) * chunks]) for rank in range(ranks)]
    return max(activation_peaks(schedule, Costs(tuple(StageCosts(0, 0, 0, one, one) for one in held))))
