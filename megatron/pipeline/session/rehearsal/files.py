"""Results of ``--rehearse``: lines in the log, ``rehearsal.json``, ``costs.json`` and a picture."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from megatron.pipeline.distributed.device import gpu_name
from megatron.pipeline.flags.packages import no_picture
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.model.layout import decoder_layers
from megatron.pipeline.planner import (
    Costs,
    Objective,
    Problem,
    Schedule,
    activation_peaks,
    activation_profile,
    between_seconds,
    choose,
    origin,
    simulate,
    view,
    with_replicas,
)
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.profiling import ITERATIONS, TIMED, Steps, profiled
from megatron.pipeline.session.atomic import write_text
from megatron.pipeline.session.memory import uncounted_sizes
from megatron.pipeline.session.rehearsal.measure import Rehearsal, of_all_ranks, passes_of, process_bytes
from megatron.pipeline.session.trace import in_mib

logger = logging.getLogger(__name__)

RESULT, COSTS, PICTURE = "rehearsal.json", "costs.json", "rehearsal.png"


def rehearsing(args: Settings, pipeline: Pipeline) -> Steps | None:
    """The steps that measure passes alone and predict an iteration, if ``--rehearse`` asks for them."""
    if not args.rehearsal.on:
        return None
    steps = _rehearse(args, pipeline)
    next(steps)
    return steps


def _rehearse(args: Settings, pipeline: Pipeline) -> Steps:
    assert pipeline.turns is not None, "ranks that rehearse take turns"
    whole = min(args.exit_interval, args.train_iters or args.exit_interval) if args.exit_interval and not args.load else 0
    times = max(TIMED, whole - (ITERATIONS - TIMED))  # of a training that says when it ends, all
    with pipeline.turns().optimizer_steps() as steps:
        costs, timed = yield from profiled(pipeline, uncounted_sizes(args, pipeline), times)
    measured = args.rehearsal.seconds is None
    if args.rehearsal.seconds is not None:
        costs = replace(costs, hop=args.rehearsal.seconds, vocabulary=replace(costs.vocabulary, exchange=_exchange(args)))
    schedule = timed[-1].schedule
    timeline = simulate(schedule, costs)
    found = Rehearsal(
        report=timed[-1],
        costs=costs,
        passes=passes_of(timed),
        timeline=timeline,
        step=max(of_all_ranks(sum(map(median, steps.values())))),
        replicas=_replicas(args, schedule, costs, timeline.makespan),
        stock=choose.stock_at_its_best(costs, schedule.ranks, schedule.microbatches, args.num_layers),
        peaks=tuple(map(max, zip(*(one.peak_activation_bytes for one in timed), strict=True))),
        planned_peaks=tuple(activation_peaks(schedule, costs)),
        processes=of_all_ranks(process_bytes()),
        tokens=args.micro_batch_size * args.data_parallel_size * args.seq_length * schedule.microbatches,
    )
    yield [*found.lines(measured), *_write(args, found)]


def _exchange(args: Settings) -> float | None:
    """Seconds of a collective of the vocabulary over the links of ``--rehearse-hop``; None where it names none."""
    links = args.rehearsal.links
    if links is None or args.vocabulary.spread is None:
        return None
    return links.hop.all_gather(shape_of(args).hidden_bytes, args.pipeline_model_parallel_size)


def _replicas(args: Settings, schedule: Schedule, costs: Costs, alone: float) -> float | None:
    """Seconds that data-parallel replicas add to an iteration over the links of ``--rehearse-hop``; None if it names none.

    Parameters are those of a GPT with the flags' sizes. Optimizers' steps are measured.

    Args:
        alone: seconds of the passes.
    """
    links, placement = args.rehearsal.links, schedule.placement
    if args.data_parallel_size * args.context_parallel_size == 1:
        return 0.0
    if links is None:
        return None
    whole = with_replicas(describe(args), costs, placement, decoder_layers(args, placement), links, None)
    problem = Problem(
        placement,
        schedule.microbatches,
        whole,
        objective=Objective.MAKESPAN,
        splits=schedule.splits,
        vocabulary=schedule.vocabulary,
    )
    return between_seconds(describe(args), links, schedule, problem, alone, plans=True)


def _write(args: Settings, found: Rehearsal) -> list[str]:
    """Write the files on rank 0 of the world; returns lines that say where they are, on every rank."""
    folder, layers = Path(args.rehearsal.directory), list(decoder_layers(args, found.report.schedule.placement))
    if torch.distributed.get_rank() == 0:
        try:
            write_text(folder / RESULT, json.dumps(found.fields() | {"layers": layers}))
            of = origin.described(describe(args), "run", layers, gpu_name())
            write_text(folder / COSTS, json.dumps(found.costs.fields() | {"of": of}))
            _draw(found, folder / PICTURE)
        except OSError as error:
            logger.warning("WARNING: the rehearsal could not be written to %s (%s)", args.rehearsal.directory, error.strerror)
            return []
    files = {"numbers": RESULT, "costs": COSTS} | ({"picture": PICTURE} if find_spec("matplotlib") else {})
    return [f" {what}: {folder / name}" for what, name in files.items()]


def _draw(found: Rehearsal, path: Path) -> None:
    schedule, stock = found.report.schedule, found.stock
    own = f"{schedule.name}: {1e3 * found.timeline.makespan:.4g} ms"
    other = f"stock at its best, {stock.variant}: {1e3 * stock.timeline.makespan:.4g} ms"
    memory = {
        own: in_mib(activation_profile(schedule, found.timeline, found.costs)),
        other: in_mib(activation_profile(stock.schedule, stock.timeline, stock.problem.costs)),
    }
    try:
        view.draw({own: found.timeline, other: stock.timeline}, path, memory, "s", {own: schedule.splits}, "MiB")
    except ModuleNotFoundError as error:
        logger.warning(no_picture(path, error))
