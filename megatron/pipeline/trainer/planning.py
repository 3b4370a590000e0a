"""The pipeline that the flags ask for, planned and proved before any process group exists."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from functools import partial
from pathlib import Path
from textwrap import indent

from megatron.pipeline.flags.config import microbatch_counts
from megatron.pipeline.flags.flag_types import MEMORY_UNITS
from megatron.pipeline.flags.flags import CHUNK_FLAGS, PROFILE
from megatron.pipeline.flags.validation_vocabulary import check_vocabulary
from megatron.pipeline.model.layout import stage_layers
from megatron.pipeline.planning.choose import (
    AUTO,
    Refusal,
    Request,
    Variant,
    candidates,
    choose,
    least_memory,
    peak_of_1f1b,
    variants,
)
from megatron.pipeline.runtime.offload.offloading import SMALLEST, Settings
from megatron.pipeline.runtime.pipeline import ROUNDED_UP, Pipeline
from megatron.pipeline.runtime.replan import Steps, replan
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, VocabularyCosts, uniform, with_equal_copies
from megatron.pipeline.schedule.core.names import OFF, STOCK
from megatron.pipeline.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import ChunksDoNotFit, HostLimitTooLow, LimitTooLow, Objective
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.rules.verify import rounded_up
from megatron.pipeline.trainer.atomic import write_text
from megatron.pipeline.view.table import Amount, choice_table

logger = logging.getLogger(__name__)


def plan_pipeline(args: Namespace, measure: bool | None = None, evaluates: bool = True) -> Pipeline:
    """Plan every iteration that this training will have (several, if the batch size ramps up).

    Args:
        args: flags that have gone through ``validate``.
        measure: see ``Pipeline``; by default where the flags ask for what is measured.
        evaluates: whether there will be evaluations, which run forwards alone.

    Raises:
        ValueError: the schedule is unknown, is not one that training can run, or does not fit the ranks, chunks,
            microbatches, costs or the memory limit.
    """
    ranks, most = args.pipeline_model_parallel_size, max(microbatch_counts(args))
    costs = None if args.pipeline_costs in (None, PROFILE) else _read_costs(args.pipeline_costs)
    try:
        pipeline = _plan(args, costs, measure)
        for microbatches in microbatch_counts(args):
            pipeline.check(microbatches, evaluates)
        return pipeline
    except HostLimitTooLow as error:
        mib = MEMORY_UNITS["MiB"]
        raise ValueError(
            f"--offload-host-memory {args.offload_host_memory / mib:g}MiB is too little: one microbatch of a chunk takes "
            f"{rounded_up(ROUNDED_UP * error.least / mib)}MiB or more, as sizes are rounded up: raise it, or leave --offload out"
        ) from None
    except ChunksDoNotFit as error:
        flag = next(name for name in CHUNK_FLAGS if getattr(args, name))
        raise ValueError(f"{error} by --{flag.replace('_', '-')} {getattr(args, flag)}: leave that flag out") from None
    except LimitTooLow as error:
        text = args.pipeline_memory_limit
        if text is None:
            raise  # a family exceeds what its own name stands for: its message says so
        needs = _as_limit(error.least, text, peak_of_1f1b(ranks, most, costs))
        others = " or ".join(_holding_less(args, most, costs))
        raise ValueError(
            f"--pipeline-memory-limit {text} is too little for {args.pipeline_schedule}, which needs {needs}: raise it"
            + (f", or take {others}, which can hold less" if others else "")
        ) from None


def _plan(args: Namespace, costs: Costs | None, measure: bool | None) -> Pipeline:
    profiles = args.pipeline_costs == PROFILE
    ranks, counts = args.pipeline_model_parallel_size, microbatch_counts(args)
    text = args.pipeline_memory_limit
    limit = _memory_limit(text, ranks, max(counts), costs)
    if limit is None and text and not profiles:
        raise ValueError(f"--pipeline-memory-limit {text} needs --pipeline-costs with activations in bytes: a file, or {PROFILE}")
    notes = []
    if limit is None and text:
        notes.append(f" memory limit of {text}: until activations have been measured the schedule is planned without it")
    name, chunks = args.pipeline_schedule, args.chunks
    _check_name(name)
    if name == STOCK and text:
        raise ValueError(
            f"--pipeline-memory-limit {text}: {STOCK} is megatron-core's own schedule, which takes no limit: take another, such "
            "as v-auto, or leave --pipeline-memory-limit out"
        )
    vocabulary = _vocabulary(args)
    if name == AUTO:
        best, table = _best(args, max(counts), costs)
        name, chunks = best.name, best.chunks
        notes.append(table)
    pipeline = Pipeline(
        name,
        ranks,
        chunks,
        memory_limit=limit,
        costs=costs,
        posting=Posting(args.pipeline_p2p),
        objective=_objective(args),
        vocabulary=vocabulary,
        offload=_offload(args),
        settings=_offload_settings(args),
        measure=profiles or (bool(args.metrics or args.tensorboard_dir or args.pipeline_trace) if measure is None else measure),
    )
    pipeline.notes += notes
    placement = pipeline.placement
    if pipeline.vocabulary is not vocabulary:  # a file says so itself
        args.vocab_parallel = str(pipeline.vocabulary)
        check_vocabulary(args)
    if placement.chunks > 1 and ranks == 1:
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} with {placement.chunks} chunks per rank needs at least 2 pipeline "
            "ranks (megatron-core has no virtual pipeline on one): raise --pipeline-model-parallel-size, or take 1f1b or zb-h1"
        )
    if costs is not None and len(costs.stages) != placement.last_stage + 1:
        raise ValueError(
            f"--pipeline-costs {args.pipeline_costs} has the costs of {len(costs.stages)} stages, but {pipeline.name} cuts the "
            f"model into {placement.last_stage + 1} ({ranks} ranks with {placement.chunks} chunk(s)): measure them under this "
            f"schedule with --pipeline-costs {PROFILE}"
        )
    _check_spread(args, pipeline)
    _check_offload(args, pipeline)
    return pipeline


def _check_spread(args: Namespace, pipeline: Pipeline) -> None:
    """Refuse schedules and costs that do not go with the vocabulary where it is."""
    spread = pipeline.vocabulary
    if spread and pipeline.splits > 1:
        raise ValueError(
            f"--vocab-parallel {spread} needs the losses of whole sequences, and --pipeline-schedule {pipeline.name} cuts them "
            f"into {pipeline.splits} slices: take another schedule, or leave --vocab-parallel out"
        )
    if pipeline.costs is None or (pipeline.costs.vocabulary != VocabularyCosts()) == bool(spread):
        return
    if spread:
        problem = f"no costs of a spread vocabulary, and --vocab-parallel is {spread}"
    else:
        problem = "costs of a spread vocabulary, whose stages are without it, and --vocab-parallel is off"
    raise ValueError(
        f"--pipeline-costs {args.pipeline_costs} has {problem}: measure them under these flags with --pipeline-costs {PROFILE}"
    )


def _vocabulary(args: Namespace) -> Vocabulary | None:
    return None if args.vocab_parallel == OFF else Vocabulary(args.vocab_parallel)


def _offload(args: Namespace) -> Offload | None:
    return None if args.offload == OFF else Offload(args.offload)


def _offload_settings(args: Namespace) -> Settings:
    bandwidth = args.offload_cpu_bandwidth
    smallest = SMALLEST if args.offload_min_size is None else args.offload_min_size
    return Settings(args.offload_host_memory, smallest, bandwidth and bandwidth * 1e9)


def _check_offload(args: Namespace, pipeline: Pipeline) -> None:
    """Refuse schedules and costs that say nothing about copies to host memory."""
    if not pipeline.offloads:
        return
    if pipeline.splits > 1:
        raise ValueError(
            f"--offload {args.offload} moves whole microbatches, and --pipeline-schedule {pipeline.name} cuts them into "
            f"{pipeline.splits} slices, which share their memory: take another schedule, or leave --offload out"
        )
    if pipeline.costs and not (pipeline.costs.copies.to_host and pipeline.costs.copies.to_device):
        raise ValueError(
            f"--pipeline-costs {args.pipeline_costs} does not say what copies to host memory take, which --offload has to know: "
            f"measure it under these flags with --offload-profile, or add it, such as {_EXAMPLE}"
        )


_EXAMPLE = '"copies": {"to_host": 5e-11, "to_device": 5e-11} for 20 GB/s'


def _objective(args: Namespace) -> Objective:
    """What an iteration takes. Without post-validation each waits for all ranks to end the one before."""
    return Objective.SPAN if args.post_validation else Objective.MAKESPAN


def _check_name(name: str) -> None:
    if name in _PLANNED_ONLY:
        better = "; dualpipe-v is as fast as dualpipe with every layer once" if name == "dualpipe" else ""
        raise ValueError(
            f"--pipeline-schedule {name} holds every layer on two ranks and is planned and simulated only{better}; those that "
            f"train are {', '.join(_TRAINED)}"
        )
    if name not in (*_TRAINED, AUTO, STOCK) and not name.startswith("file:"):
        near = families.meant(name, [*_TRAINED, AUTO, STOCK])
        raise ValueError(f"unknown schedule {name!r}; known are {', '.join(_TRAINED)}, {AUTO}, {STOCK} and file:PATH{near}")


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
    try:
        write_text(Path(path), text)
    except OSError as error:
        logger.warning("WARNING: the costs could not be written to %s (%s); training goes on", path, error.strerror)
        return None
    return Path(path)


_PLANNED_ONLY = [name for name, family in families.FAMILIES.items() if family.placement(4, family.chunks).replicas > 1]
_TRAINED = [name for name in families.FAMILIES if name not in _PLANNED_ONLY]


def _best(args: Namespace, microbatches: int, costs: Costs | None) -> tuple[Variant, str]:
    """What ``mpipe plan --schedule auto`` would choose among those that train, and the table that says why not the others.

    Without costs nobody knows what the messages of more chunks take: every family then has its own number of chunks, unless the
    user gives another.
    """
    request, chunks = _request(args, microbatches, costs), args.chunks
    wanted = [
        variant
        for variant in variants(request.ranks, _trained(args), None if chunks is None else [chunks])
        if variant.group is None and families.FAMILIES[variant.name].splits == 1  # slices change sums: they are asked for by name
    ]
    numbers = {variant: variant.chunks or families.FAMILIES[variant.name].chunks for variant in wanted}
    if chunks is not None:
        wanted = [variant for variant in wanted if numbers[variant] == chunks]
    elif costs is None:
        wanted = [variant for variant in wanted if numbers[variant] == families.FAMILIES[variant.name].chunks]
    planned, refused = candidates(request, wanted)
    needs = [refusal.needs for refusal in refused if refusal.needs is not None]
    if not planned and needs:
        raise LimitTooLow("no schedule fits into the limit", min(needs))
    if not planned:
        reasons = "; ".join(f"{refusal.variant}: {refusal.reason}" for refusal in refused)
        raise ValueError(
            f"--pipeline-schedule auto found no schedule for {request.ranks} ranks and {microbatches} microbatches ({reasons})"
        )
    choice = choose(planned)
    seconds: Amount = "{:g}".format if costs is None else lambda amount: f"{1e3 * amount:.4g} ms"
    memory: Amount = "{:g}".format if costs is None else lambda amount: f"{amount / MEMORY_UNITS['MiB']:.4g} MiB"

    def why(refusal: Refusal) -> str:
        if refusal.needs is None or request.memory_limit is None:
            return refusal.reason.removeprefix(f"{refusal.variant.name} ")
        return f"needs {memory(refusal.needs)}, limit {memory(request.memory_limit)}"  # as in the column of memory

    table = choice_table(choice, planned, refused, why, seconds, memory)
    at = "equal costs: a pass takes 1, memory is in microbatches" if costs is None else f"the costs in {args.pipeline_costs}"
    return choice.best.variant, f" schedule auto is {choice.best.variant}, at {at}\n{indent(table, '  ')}"


def _trained(args: Namespace) -> list[str]:
    """The families that train on these ranks."""
    several = args.pipeline_model_parallel_size > 1
    return [name for name in _TRAINED if several or families.FAMILIES[name].chunks == 1]


def _request(args: Namespace, microbatches: int, costs: Costs | None) -> Request:
    """What the flags ask of any schedule."""
    ranks, text = args.pipeline_model_parallel_size, args.pipeline_memory_limit

    def costs_of(placement: Placement) -> Costs:
        stage_layers(args, placement)  # a ValueError says that there are too few
        if costs is None:
            return with_equal_copies(uniform(placement))
        if len(costs.stages) != placement.ranks * placement.chunks:
            raise ValueError(
                f"needs costs of {placement.ranks * placement.chunks} stages, --pipeline-costs has {len(costs.stages)}"
            )
        return costs

    limit = _memory_limit(text, ranks, microbatches, costs)
    if limit is None and text:  # what is not yet known in bytes is taken to be 1F1B's peak
        limit = peak_of_1f1b(ranks, microbatches, None)
    return Request(
        ranks, microbatches, costs_of, limit, objective=_objective(args), vocabulary=_vocabulary(args), offload=_offload(args)
    )


def _holding_less(args: Namespace, microbatches: int, costs: Costs | None) -> list[str]:
    """Other families that plan for limits, and can hold no more than the one that is given."""
    if args.pipeline_schedule == AUTO:
        return []  # has tried them all
    request = _request(args, microbatches, costs)

    def fits(name: str) -> bool:
        try:
            return request.memory_limit is not None and least_memory(request, Variant(name)) <= request.memory_limit
        except ValueError:
            return False  # memory is not all that is wrong

    names = [name for name in _trained(args) if families.FAMILIES[name].plans_for_limits]
    return [name for name in names if name != args.pipeline_schedule and fits(name)]


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
    if match is None or (match[2] and match[2] not in MEMORY_UNITS):
        raise ValueError(f"--pipeline-memory-limit {text}: expected a share of 1F1B's peak such as 0.5, or bytes such as 12GiB")
    if match[2]:
        return None if costs is None else float(match[1]) * MEMORY_UNITS[match[2]]
    return float(match[1]) * peak_of_1f1b(ranks, microbatches, costs)


def _as_limit(amount: float, text: str, peak: float) -> str:
    """An amount of memory as the limit ``text`` is written, in bytes or in peaks of 1F1B; never less than it is."""
    unit = text.lstrip("0123456789.")
    return rounded_up(amount / (MEMORY_UNITS[unit] if unit else peak)) + unit
