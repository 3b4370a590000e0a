"""Results of ``--rehearse``: lines in the log, ``rehearsal.json``, ``costs.json`` and a picture."""

from __future__ import annotations

import json
import logging
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.pipeline.distributed.device import gpu_name
from megatron.pipeline.flags.packages import no_picture
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.model.layout import decoder_layers
from megatron.pipeline.planner.costmodel.activations import hidden_bytes
from megatron.pipeline.planner.costmodel.links import collective_seconds
from megatron.pipeline.planner.costmodel.origin import described
from megatron.pipeline.planner.costmodel.replicas import between_seconds, with_replicas
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.problem import Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.time.simulate import activation_profile
from megatron.pipeline.planner.view.picture import draw
from megatron.pipeline.runtime.pipeline import Pipeline
from megatron.pipeline.runtime.profiling import ITERATIONS, TIMED, Steps
from megatron.pipeline.runtime.rehearsal import Rehearsal, rehearse
from megatron.pipeline.session.atomic import write_text
from megatron.pipeline.session.memory import uncounted_sizes
from megatron.pipeline.session.trace import in_mib

logger = logging.getLogger(__name__)

RESULT, COSTS, PICTURE = "rehearsal.json", "costs.json", "rehearsal.png"


def rehearsing(args: Settings, pipeline: Pipeline) -> Steps | None:
    """The steps that measure passes alone and predict an iteration, if ``--rehearse`` asks for them."""
    if not args.rehearsal.on:
        return None
    of_a_microbatch = args.micro_batch_size * args.data_parallel_size * args.seq_length
    replicas, write = partial(_replicas, args), partial(_write, args)
    exchange, sizes = _exchange(args), uncounted_sizes(args, pipeline)
    whole = min(args.exit_interval, args.train_iters or args.exit_interval) if args.exit_interval and not args.load else 0
    times = max(TIMED, whole - (ITERATIONS - TIMED))  # of a training that says when it ends, all
    hop, tokens = args.rehearsal.seconds, of_a_microbatch.__mul__
    steps = rehearse(pipeline, hop, exchange, tokens, args.num_layers, replicas, write, sizes, times)
    next(steps)
    return steps


def _exchange(args: Settings) -> float | None:
    """Seconds of a collective of the vocabulary over the links of ``--rehearse-hop``; None where it names none."""
    links = args.rehearsal.links
    if links is None or args.vocabulary.spread is None:
        return None
    return links.hop.all_gather(hidden_bytes(shape_of(args)), args.pipeline_model_parallel_size)


def price_absent_ranks(args: Settings) -> None:
    """Have collectives within passes take what they would over the links of ``--rehearse-hop``, where no other rank of a group is
    there. megatron-core's groups must exist.

    Those of data-parallel ranks take no time here: ``_replicas`` has their seconds, less what passes hide.
    """
    links = args.rehearsal.links
    if args.rehearsal.share == 1 or links is None:
        return
    slower = min(links.tensor, links.context, key=lambda link: link.bandwidth)
    for group, link, spread in (
        (parallel_state.get_tensor_model_parallel_group(), links.tensor, None),
        (parallel_state.get_context_parallel_group(), links.context, None),
        (parallel_state.get_tensor_and_context_parallel_group(), slower, None),
        (parallel_state.get_expert_model_parallel_group(), links.experts, links.expert),
        (parallel_state.get_expert_tensor_parallel_group(), links.expert_tensor, None),
        (parallel_state.get_expert_tensor_and_model_parallel_group(), links.experts, links.expert),
    ):
        if group.size() > 1:
            group.price = partial(collective_seconds, link=link, spread=spread)


def about_absent_ranks(args: Settings) -> list[str]:
    """A line that says what a rehearsal without them does not show; none where all are there."""
    if args.rehearsal.share == 1:
        return []
    there = args.pipeline_model_parallel_size
    words = (
        f" WARNING: --rehearse-replicas fake: {there} of {there * args.rehearsal.share} ranks are here, each for "
        f"{args.rehearsal.share}: losses and gradient norms mean nothing, seconds and bytes do"
    )
    if args.rehearsal.links is None:
        words += "; collectives with other ranks take no time: --rehearse-hop with a GPU's name or a machine's file adds it"
    return [words]


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


def _collectives(args: Settings) -> str:
    """Describe how collectives within passes were timed, for ``described``."""
    if not describe(args).shares_layers:
        return "none"
    if args.rehearsal.share == 1:
        return "run"
    return "left out" if args.rehearsal.links is None else "priced"


def _write(args: Settings, found: Rehearsal) -> list[str]:
    """Write the files on rank 0 of the world; returns lines that say where they are, on every rank."""
    folder, absent = Path(args.rehearsal.directory), about_absent_ranks(args)
    layers = list(decoder_layers(args, found.report.schedule.placement))
    of_flags = {"ranks_of_a_stage": args.rehearsal.share, "layers": layers}
    if torch.distributed.get_rank() == 0:
        try:
            write_text(folder / RESULT, json.dumps(found.fields() | of_flags))
            of = described(describe(args), _collectives(args), layers, gpu_name())
            write_text(folder / COSTS, json.dumps(found.costs.fields() | {"of": of}))
            _draw(found, folder / PICTURE)
        except OSError as error:
            logger.warning("WARNING: the rehearsal could not be written to %s (%s)", args.rehearsal.directory, error.strerror)
            return absent
    files = {"numbers": RESULT, "costs": COSTS} | ({"picture": PICTURE} if find_spec("matplotlib") else {})
    return [*absent, *(f" {what}: {folder / name}" for what, name in files.items())]


def _draw(found: Rehearsal, path: Path) -> None:
    schedule, stock = found.report.schedule, found.stock
    own = f"{schedule.name}: {1e3 * found.timeline.makespan:.4g} ms"
    other = f"stock at its best, {stock.variant}: {1e3 * stock.timeline.makespan:.4g} ms"
    memory = {
        own: in_mib(activation_profile(schedule, found.timeline, found.costs)),
        other: in_mib(activation_profile(stock.schedule, stock.timeline, stock.problem.costs)),
    }
    try:
        draw({own: found.timeline, other: stock.timeline}, path, memory, "s", {own: schedule.splits}, "MiB")
    except ModuleNotFoundError as error:
        logger.warning(no_picture(path, error))
