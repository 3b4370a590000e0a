"""Requests from the flags of ``mpipe``: a ``Request`` of a family or of all, or ``Changes`` of a schedule from a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from megatron.pipeline.cli.arguments import REPLICA_LINK, StageList
from megatron.pipeline.planner import (
    OFF,
    Costs,
    Facts,
    Offload,
    Placement,
    Request,
    Vocabulary,
    VocabularyCosts,
    balance,
    cutting,
    document,
    every_batch,
    families,
    hybrid,
    reading,
    refusals,
    topics,
    written_costs,
)

_COSTS = {
    "bucket_costs": {"RS", "AG"},
    "step_costs": {"OPT"},
    "copy_costs": {*written_costs.COPIES},
    "norm_costs": {"latency", "norm"},
}


def requested(options: Namespace) -> Request:
    """Request of ``mpipe plan`` or ``mpipe compare``.

    Args:
        options: of ``size_flags``, ``goal_flags``, ``cost_flags``, ``pass_flags`` and ``offload_flags``, and the schedule's name
            and sizes for ``mpipe plan``.

    Raises:
        ValueError: flags do not go together.
    """
    given = vars(options)
    if missing := [f"--{flag}" for flag in ("schedule", "pp", "microbatches") if given.get(flag, "") is None]:
        raise ValueError(f"required: {', '.join(missing)}; or the FILE of a schedule (see mpipe plan --help)")
    name = given.get("schedule", families.AUTO)
    if name.startswith(families.FILE):
        path = name.removeprefix(families.FILE)
        raise ValueError(f"--schedule takes the name of a family; for a file: mpipe plan {path}")
    costs, vocabulary, offload = cost_flags_of(options), _vocabulary(options), _offload(options)
    _facts(options).refuse(topics.PLANNED)
    loads = _loads(given)
    if options.balance and options.costs and len(options.costs.stages) < 3:
        raise ValueError(
            f"--balance needs --costs of 3 stages or more, to know what the ends of the model take; these are of "
            f"{len(options.costs.stages)}"
        )
    unit = refusals.unit_of(options.costs)
    refusals.check_limit(options.memory_limit, unit)
    refusals.check_limit(options.host_memory_limit, unit, "--host-memory-limit")

    slow = (options.balance and costs.slow) or {}  # of a model that is split no stage is slow before it has its layers
    costs = replace(costs, slow=None) if slow else costs

    def of_stages(placement: Placement) -> Costs:
        found = cutting.with_shards(
            written_costs.costs_of(costs, placement, copies=offload is not None), vocabulary, placement.ranks
        )
        return replace(found, loads=loads) if loads else found

    layers = options.balance
    if isinstance(layers, hybrid.Pattern):
        if not options.costs:
            raise ValueError(f"--balance {layers} needs what each letter takes: give --costs of mpipe costs --by-layer")
        with reading.NamedErrors("--balance"):
            letters = written_costs.with_links(options.costs, costs.cost or {}, options.pp)
            layers = balance.Model.by_layer(cutting.with_shards(letters, vocabulary, options.pp), layers)
        costs = replace(costs, costs=replace(options.costs, pattern=""))
    return Request(
        name,
        options.pp,
        options.microbatches,
        of_stages,
        given.get("chunks") if name == given.get("schedule") else None,
        options.memory_limit,
        **({"objective": options.objective} if options.objective else {}),
        recompute=_stages(options, "recompute"),
        fused=_stages(options, "fuse"),
        splits=given.get("splits"),
        group=given.get("group"),
        vocabulary=vocabulary,
        offload=offload,
        host_limit=options.host_memory_limit,
        overlap=options.overlap_experts == "on",
        layers=layers,
        slow=slow,
        bounded=True,
        unit=unit,
    )


def _loads(given: dict[str, Any]) -> tuple[every_batch.Load, ...]:
    """The loads of unequal microbatches."""
    count, lengths = given["microbatches"], given.get("lengths")
    if not lengths:
        return ()
    if count != len(lengths):
        raise ValueError(f"--lengths has {len(lengths)} microbatches: give --microbatches {len(lengths)}, not {count}")
    return every_batch.loads_of(lengths, attention=given["attention"] or 0.0)


def changes(options: Namespace) -> document.Changes:
    """Changes that the flags of a command ask for in a schedule from a file; a command need not have all of these flags.

    Raises:
        ValueError: flags do not go together.
    """
    given = vars(options)
    return document.Changes(
        cost_flags_of(options), options.memory_limit, given.get("objective"), given.get("offload"), given.get("host_memory_limit")
    )


def cost_flags_of(options: Namespace) -> written_costs.CostFlags:
    """Cost flags of options, once they go together; else a ValueError."""
    _facts(options).refuse(topics.OPTIONS)
    given = {one.name: vars(options).get(one.name) for one in fields(written_costs.CostFlags) if one.name != "boundary"}
    return written_costs.CostFlags(**given, boundary=_boundary(options))


def _boundary(options: Namespace) -> written_costs.Numbers | None:
    """Seconds of a rank's reductions and gathers, each in a ring of all replicas.

    Raises:
        ValueError: flags do not go together, or the link has no speed.
    """
    given = vars(options)
    replicas, gradients, speed = (given.get(name) for name in ("replicas", "grad_bytes", "replica_link"))
    if replicas is None or gradients is None:
        return None
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"--replica-link {speed:g}: give 1e9 bytes a second above 0, such as {REPLICA_LINK:g}")
    parameters = given["param_bytes"] if given.get("param_bytes") is not None else gradients / 2
    seconds = (replicas - 1) / replicas / (1e9 * (speed or REPLICA_LINK))
    return {"RS": gradients * seconds, "AG": parameters * seconds}


def _facts(options: Namespace) -> Facts:
    """Facts of a command's options, of which it need not have all; costs are named by what they are of."""
    given = Facts(vars(options))
    names = (given.cost or {}).keys()
    for fact, group in _COSTS.items():
        given[fact] = " ".join(f"--cost {name}=.." for name in sorted(names & group))
    given["copy_costs"] = given.copy_costs or ("--copy" if given["copy"] else None)
    return given


def _offload(options: Namespace) -> Offload | None:
    """The mode of ``--offload``."""
    given = vars(options).get("offload")
    return None if given in (None, OFF) else Offload(given)


def _vocabulary(options: Namespace) -> Vocabulary | None:
    """The variant of ``--vocab-parallel``."""
    if options.vocab_parallel in (None, OFF):
        return None
    if options.costs and options.costs.vocabulary == VocabularyCosts() and not options.vocab_cost:
        raise ValueError('--costs has no "vocabulary": give what its passes take with --vocab-cost S=..,T=..')
    return Vocabulary(options.vocab_parallel)


def _stages(options: Namespace, flag: str) -> Callable[[Placement], Iterable[int]]:
    """The stages that a flag names, from a placement."""
    chosen: StageList | None = getattr(options, flag)

    def of(placement: Placement) -> Iterable[int]:
        with reading.NamedErrors(f"--{flag}"):
            return chosen.of(placement.last_stage + 1) if chosen else ()

    return of
