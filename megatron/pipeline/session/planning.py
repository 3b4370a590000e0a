"""The pipeline that the flags ask for, planned and proved before any process group exists."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from textwrap import indent

from megatron.pipeline.distributed.device import gpu_name
from megatron.pipeline.flags.config import microbatch_counts
from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.flags import CHUNK_FLAGS
from megatron.pipeline.flags.settings import EVERY_BATCH, PROFILE, Settings
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.model.layout import costs_of_letters, decoder_layers, stage_layers
from megatron.pipeline.model.slices import check_slices
from megatron.pipeline.planner import (
    EQUAL_PASSES,
    Costs,
    HostLimitTooLow,
    LimitTooLow,
    Objective,
    Placement,
    PlanCache,
    Request,
    StageCosts,
    Variant,
    VocabularyCosts,
    choose,
    cutting,
    document,
    families,
    flag_of,
    interleaved,
    ops,
    origin,
    peak_of_1f1b,
    reading,
    refusals,
    topics,
    variants,
)
from megatron.pipeline.runtime.every_batch import EveryBatch
from megatron.pipeline.runtime.offload.offloading import SMALLEST, CopySettings
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.replan import Steps, replan
from megatron.pipeline.session.atomic import write_text
from megatron.pipeline.session.memory import beside, equal_stages, uncounted_sizes
from megatron.pipeline.session.rehearsal.device_lock import DeviceLock

logger = logging.getLogger(__name__)


def plan_pipeline(args: Settings, measure: bool | None = None, evaluates: bool = True) -> Pipeline:
    """Plan every iteration that this training will have (several, if the batch size ramps up).

    Args:
        args: flags that have gone through ``validate``.
        measure: see ``Pipeline``; by default where the flags ask for what is measured.
        evaluates: whether there will be evaluations, which run forwards alone.

    Raises:
        ValueError: the schedule is unknown, is not one that training can run, or does not fit the ranks, chunks,
            microbatches, costs or the memory limit.
    """
    families.check(args.pipeline.schedule)
    asked = _request(args)
    try:
        request, notes = _chosen(args, asked)
        pipeline = _pipeline(args, request, measure)
        pipeline.plans.notes += notes
        _check(args, request, pipeline)
        for microbatches in microbatch_counts(args):
            pipeline.plans.check(microbatches, evaluates)
        return pipeline
    except HostLimitTooLow as error:
        limit = refusals.MIB.amount(args.offloading.host_memory or 0)
        raise refusals.HOST_MIB.no_room(f"--offload-host-memory {limit}", error.least) from None
    except families.ChunksDoNotFit as error:
        name = next((name for name in CHUNK_FLAGS if getattr(args, name)), "hybrid_layer_pattern")
        leave = "leave that flag out" if name in CHUNK_FLAGS else "leave | out of it"
        raise ValueError(f"{error} by {flag_of(name)} {getattr(args, name)}: {leave}") from None
    except LimitTooLow as error:
        text, name = args.pipeline.memory_limit, args.pipeline.schedule
        if text is None:
            raise  # a family exceeds the memory that its own name stands for, and its message is complete
        amount = refusals.read_amount(text)
        unit = amount.unit if isinstance(amount, refusals.Bytes) else refusals.Unit("", _peak_of_1f1b(asked))
        raise unit.too_little(f"--pipeline-memory-limit {text}", name, error.least, _holding_less(args, asked)) from None


def _request(args: Settings) -> Request:
    """The request that the flags are."""
    file, own = args.pipeline.costs, args.offloading
    costs: Costs | Callable[[Placement], Costs] | None = None
    if getattr(args, "letter_costs", None):
        costs = partial(costs_of_letters, args)
    elif file not in (None, PROFILE):
        with reading.NamedErrors("--pipeline-costs"):
            costs = document.read_costs(file)
    request = Request(
        args.pipeline.schedule,
        args.pipeline_model_parallel_size,
        max(microbatch_counts(args)),
        costs,
        args.chunks,
        group=args.microbatch_group_size_per_vp_stage,
        # Without post-validation each iteration waits for all ranks to end the one before.
        objective=Objective.SPAN if args.steps.ahead else Objective.MAKESPAN,
        vocabulary=args.vocabulary.spread,
        offload=own.mode,
        overlap=args.overlap_moe_expert_parallel_comm,
        equal=partial(equal_stages, args, _equal_costs(args)),
        beside=partial(beside, args),
        keep=True,
    )
    return replace(request, memory_limit=_memory_limit(args.pipeline.memory_limit, request))


def _chosen(args: Settings, request: Request) -> tuple[Request, list[str]]:
    """The request of one family, and notes on how it came about."""
    text, notes = args.pipeline.memory_limit, []
    if request.lowest_limit is None and text:
        if args.pipeline.costs != PROFILE:
            raise ValueError(
                f"--pipeline-memory-limit {text} needs --pipeline-costs with activations in bytes: a file, or {PROFILE}"
            )
        notes.append(f" memory limit of {text}: until activations have been measured the schedule is planned without it")
    if request.schedule == families.AUTO:
        best, table = _best(args, request)
        request = replace(request, schedule=best.name, chunks=best.chunks)
        notes.append(table)
    return request, notes


def _pipeline(args: Settings, request: Request, measure: bool | None) -> Pipeline:
    """The pipeline of a request, as the flags have it run."""
    own, profiles = args.offloading, args.pipeline.costs == PROFILE
    if measure is None:
        measure = bool(args.pipeline.metrics or args.tensorboard_dir or getattr(args, "wandb_project", "") or args.pipeline.trace)
    measure = measure or args.pipeline.watch in ("report", "replan")
    measure = measure or profiles or args.rehearsal.on
    smallest, bandwidth = SMALLEST if own.min_size is None else own.min_size, own.cpu_bandwidth
    copies = CopySettings(own.host_memory, smallest, bandwidth and bandwidth * 1e9)
    turns = cache(DeviceLock.open) if args.rehearsal.on else None
    batches = _every_batch(args) if args.pipeline.plan == EVERY_BATCH else None
    pipeline = Pipeline(request, ops.Posting(args.pipeline.p2p), measure, copies, args.pipeline.max_ctas, turns, batches)
    if profiles:
        uncounted_sizes(args, pipeline)  # may be refused
    return pipeline


def _check(args: Settings, request: Request, pipeline: Pipeline) -> None:
    """Refuse what the flags say beside a schedule that has been chosen, and does not go with it; note where costs are cut."""
    plans, placement = pipeline.plans, pipeline.placement
    if placement.chunks > 1 and placement.ranks == 1:
        raise ValueError(
            f"--pipeline-schedule {pipeline.name} with {placement.chunks} chunks per rank needs at least 2 pipeline "
            "ranks (megatron-core has no virtual pipeline on one): raise --pipeline-model-parallel-size, or take 1f1b or zb-h1"
        )
    if not (plans.has_family or plans.is_stock):  # what a file has is known by now
        if plans.vocabulary is not args.vocabulary.spread:
            args |= {"vocab_parallel": plans.vocabulary}
            of_flags(args).refuse(topics.VOCABULARY)
        of_flags(args, splits=plans.splits, copies=plans.offloads and args.offloading.mode is None).refuse(topics.SCHEDULES)
    if plans.costs is None:
        return
    if isinstance(request.costs, Costs) and (count := len(request.costs.stages)) != placement.depth:
        given = f"--pipeline-costs {args.pipeline.costs} has the costs of {count} stages"
        plans.notes.append(f" {given}: for the {placement.depth} of this schedule they are cut evenly, or joined")
    _check_costs(args, plans, plans.costs)


def as_planned(args: Settings, pipeline: Pipeline) -> Settings:
    """Settings of a training under a plan: the vocabulary as a file spreads it; with slices no fused masked softmax, whose kernel
    has causal masks for as many keys as queries only.

    Raises:
        ValueError: the plan has slices, and a flag does not go with them.
    """
    splits = pipeline.plans.splits
    check_slices(args, splits)
    return args | {
        "vocab_parallel": pipeline.plans.vocabulary,
        "masked_softmax_fusion": args.masked_softmax_fusion and splits == 1,
    }


def _every_batch(args: Settings) -> EveryBatch:
    """Costs are those of one sequence that fills a microbatch, as packed ones do."""
    shape = shape_of(args)
    attention = replace(shape, seq=shape.tokens, microbatch=1).attention_share
    return EveryBatch(attention, shape.tokens, interval=args.log_interval, say=partial(print, flush=True))


def _peak_of_1f1b(request: Request) -> float:
    """In the unit of the costs that the request has, or that it has as long as nothing is measured."""
    return peak_of_1f1b(_costs(request), request.ranks, request.microbatches)


def _costs(request: Request) -> Costs:
    """The costs of a request: as they are given, or on its family's placement, which under others is as 1F1B's."""
    name, ranks, chunks = request.schedule, request.ranks, request.chunks
    if isinstance(request.costs, Costs):
        return request.costs
    own = name in families.FAMILIES and name != "1f1b"
    return request.costs_on(families.placement(name, ranks, chunks) if own else interleaved(ranks, chunks or 1))


def _equal_costs(args: Settings) -> StageCosts:
    """Costs of passes before they are measured: a backward that makes whole layers again runs their forward."""
    if args.recompute_granularity != "full" or args.recompute_method != "uniform":
        return EQUAL_PASSES
    return replace(EQUAL_PASSES, recompute=1.0, checkpoint=1.0).with_recomputation(describe(args).makes_weights_again)


def _of_any_family(args: Settings, request: Request) -> Request:
    """The same request to any family: costs that follow its placement, and a limit even before bytes are known."""
    costs, limit = request.costs, request.memory_limit

    def costs_of(placement: Placement) -> Costs:
        stage_layers(args, placement)  # a ValueError: there are too few layers
        if costs is not None:
            return cutting.of_depth(request.costs_on(placement), placement.depth)
        return cutting.with_equal_copies(replace(request.equal_costs(placement), vocabulary=VocabularyCosts()))

    if limit is None and args.pipeline.memory_limit:  # an amount of bytes is taken to be 1F1B's peak until it is known
        limit = _peak_of_1f1b(request)
    in_unit = partial(beside, args, in_bytes=costs is not None)
    return replace(request, schedule=families.AUTO, chunks=None, costs=costs_of, memory_limit=limit, beside=in_unit)


def _check_costs(args: Settings, plans: PlanCache, costs: Costs) -> None:
    """Refuse costs without those of shards or copies where there are any, or with those of shards where there are none."""
    given, spread = f"--pipeline-costs {args.pipeline.costs}", plans.vocabulary
    if (costs.vocabulary != VocabularyCosts()) != bool(spread):
        problem = "costs of a spread vocabulary, whose stages are without it, and --vocab-parallel is off"
        if spread:
            problem = f"no costs of a spread vocabulary, and --vocab-parallel is {spread}"
        raise ValueError(f"{given} has {problem}: measure them under these flags with --pipeline-costs {PROFILE}")
    if plans.offloads and not (costs.copies.to_host and costs.copies.to_device):
        raise ValueError(
            f"{given} does not say what copies to host memory take, which --offload has to know: "
            "measure it under these flags with --offload-profile, or add it, such as "
            '"copies": {"to_host": 5e-11, "to_device": 5e-11} for 20 GB/s'
        )


def replanning(args: Settings, pipeline: Pipeline) -> Steps | None:
    """The steps that profile and plan again, if ``--pipeline-costs profile`` asks for them."""
    if args.pipeline.costs != PROFILE:
        return None
    asked = _request(args)

    def limit(costs: Costs) -> float | None:
        return _memory_limit(args.pipeline.memory_limit, replace(asked, costs=costs))

    write = partial(_write_costs, args, decoder_layers(args, pipeline.placement))
    steps = replan(pipeline, limit, write, uncounted_sizes(args, pipeline))
    next(steps)
    return steps


def _write_costs(args: Settings, layers: Sequence[int], text: str) -> Path | None:
    """Write measured costs where ``--pipeline-costs FILE``, ``mpipe --costs FILE`` and ``--gpu-from FILE`` can read them."""
    own, directory = args.pipeline.costs_cache, args.save or args.pipeline.trace
    if own is None and directory is None:
        return None
    path = Path(own or f"{directory}/pipeline_costs.json")
    try:
        of = origin.described(describe(args), "run", layers, gpu_name())
        write_text(path, json.dumps(json.loads(text) | {"of": of}))
    except OSError as error:
        logger.warning("WARNING: the costs could not be written to %s (%s); training goes on", path, error.strerror)
        return None
    return path


def _best(args: Settings, request: Request) -> tuple[Variant, str]:
    """The choice of ``mpipe plan --schedule auto`` among the families that train, and the table with the reasons.

    Without costs the time of messages is unknown, which more chunks need more of: each family then has its own number of
    chunks, unless the user gives another.
    """
    chunks, equal = args.chunks, request.costs is None
    tried = []
    for variant in variants(request.ranks, chunks=None if chunks is None else [chunks]):
        family = families.named(variant.name)
        wanted = chunks or (family.chunks if equal else variant.chunks)
        # Slices change sums: seq-1f1b is asked for by name.
        if variant.group is None and family.splits == 1 and wanted in (None, variant.chunks or family.chunks):
            tried.append(variant)
    request = _of_any_family(args, request)
    best, choice = choose.best(request, tried)
    assert choice is not None
    if equal:
        at = "equal costs: a pass takes 1, memory is in microbatches"
        table = choice.table(refusals.COSTS_UNIT, request.lowest_limit)
    else:
        at, unit = f"the costs in {args.pipeline.costs}", refusals.Unit(" MiB", refusals.MIB.size)
        amounts = (lambda time: f"{1e3 * time:.4g} ms"), (lambda memory: f"{memory / unit.size:.4g} MiB")
        table = choice.table(unit, request.lowest_limit, *amounts)
    return best.variant, f" schedule auto is {best.variant}, at {at}\n{indent(table, '  ')}"


def _holding_less(args: Settings, request: Request) -> list[str]:
    """Other families that plan for limits, and can hold no more than the one that is given."""
    if request.schedule == families.AUTO:
        return []  # has tried them all
    request = _of_any_family(args, request)

    def fits(name: str) -> bool:
        try:
            return request.lowest_limit is not None and choose.least_limit(request.of(Variant(name))) <= request.lowest_limit
        except ValueError:
            return False  # memory is not all that is wrong

    names = [name for name in families.trained(request.ranks) if families.FAMILIES[name].plans_for_limits]
    return [name for name in names if name != args.pipeline.schedule and fits(name)]


def _memory_limit(text: str | None, request: Request) -> float | None:
    """The limit in the unit of the request's costs; without any that is a microbatch of a rank's activations; bytes are None."""
    if text is None:
        return None
    try:
        amount = refusals.read_amount(text)
    except ValueError:
        wanted = "a share of 1F1B's peak such as 0.5, or bytes such as 12GiB"
        raise ValueError(f"--pipeline-memory-limit {text}: expected {wanted}") from None
    if not isinstance(amount, refusals.Bytes):
        return amount * _peak_of_1f1b(request)
    if request.costs is None:
        return None
    instead = "--pipeline-costs FILE with bytes, or a share of 1F1B's peak"
    refusals.check_limit(amount, refusals.unit_of(_costs(request)), "--pipeline-memory-limit", instead)
    return float(amount)
