"""The pipeline that the flags ask for, planned and proved before any process group exists."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path

from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.costs import Costs, StageCosts, uniform
from megatron.pipeline.schedule.passes import Kind
from megatron.pipeline.schedule.placement import linear
from megatron.pipeline.schedule.schedule import Schedule
from megatron.pipeline.schedule.simulate import activation_peaks
from megatron.pipeline.training.config import microbatch_counts

_UNITS = {"MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}


def plan_pipeline(args: Namespace) -> Pipeline:
    """Plan every iteration that this training will have (several, if the batch size ramps up).

    Raises:
        ValueError: the schedule is unknown, is not one that training can run, or does not fit the ranks, chunks,
            microbatches, costs or the memory limit.
    """
    if args.pipeline_schedule == "auto":
        raise ValueError(
            "--pipeline-schedule auto: training does not choose a schedule; give one that it runs "
            f"({_RUN}), such as the best of mpipe compare --schedules {','.join(_FAMILIES)}"
        )
    costs = _read_costs(args.pipeline_costs) if args.pipeline_costs else None
    ranks = args.pipeline_model_parallel_size
    pipeline = Pipeline(
        args.pipeline_schedule,
        ranks,
        args.virtual_pipeline_model_parallel_size,
        memory_limit=_memory_limit(args.pipeline_memory_limit, ranks, max(microbatch_counts(args)), costs),
        costs=costs,
        measure=bool(args.metrics or args.tensorboard_dir or args.pipeline_trace),
    )
    if not pipeline.is_stock and pipeline.placement != linear(ranks):
        raise _cannot_run(pipeline.name, f"has {pipeline.placement.chunks} chunk(s) per rank in a placement of its own")
    if pipeline.placement.chunks != (args.virtual_pipeline_model_parallel_size or 1):
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} has {pipeline.placement.chunks} chunks per rank: "
            f"give --num-virtual-stages-per-pipeline-rank {pipeline.placement.chunks}"
        )
    for microbatches in microbatch_counts(args):
        pipeline.check(microbatches)
        if not pipeline.is_stock:
            _check_passes(pipeline.name, pipeline.plan(microbatches).schedule)
    return pipeline


# The model is cut into one stage per rank, and a pass computes a whole microbatch: what else a schedule may ask for would
# train another model, or nothing, without a word.
_FAMILIES = [name for name, family in families.FAMILIES.items() if family.chunks == 1 and family.splits == 1]
_RUN = f"{', '.join(_FAMILIES)} with one chunk per rank, file:PATH of such a schedule, or stock"


def _cannot_run(name: str, reason: str) -> ValueError:
    return ValueError(f"--pipeline-schedule {name} {reason}, which training cannot run: take {_RUN}")


def _check_passes(name: str, schedule: Schedule) -> None:
    """Refuse passes that the runtime does not compute.

    Raises:
        ValueError: microbatches are cut into slices, or a pass is R.
    """
    if schedule.splits > 1:
        raise _cannot_run(name, f"cuts every microbatch into {schedule.splits} slices")
    again = next((work for row in schedule.passes for work in row if work.kind is Kind.R), None)
    if again is not None:
        raise _cannot_run(name, f"runs a forward again, as {again},")


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
    """The limit in the costs' unit of memory; without costs that is a microbatch of a rank's activations."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Za-z]*)", text)
    if match is None or (match[2] and match[2] not in _UNITS):
        raise ValueError(f"--pipeline-memory-limit {text}: expected a share of 1F1B's peak such as 0.5, or bytes such as 12GiB")
    if match[2]:
        if costs is None:
            raise ValueError(f"--pipeline-memory-limit {text} needs --pipeline-costs with activations in bytes")
        return float(match[1]) * _UNITS[match[2]]
    return float(match[1]) * _peak_of_1f1b(ranks, microbatches, costs)


def _peak_of_1f1b(ranks: int, microbatches: int, costs: Costs | None) -> float:
    """The most that a rank of 1F1B holds when the model is cut into one stage per rank."""
    schedule = families.plan("1f1b", ranks, microbatches)
    if costs is None:
        return max(activation_peaks(schedule, uniform(schedule.placement)))
    chunks = max(1, len(costs.stages) // ranks)
    held = [sum(stage.activation for stage in costs.stages[rank * chunks : (rank + 1) * chunks]) for rank in range(ranks)]
    return max(activation_peaks(schedule, Costs(tuple(StageCosts(0, 0, 0, one, one) for one in held))))
