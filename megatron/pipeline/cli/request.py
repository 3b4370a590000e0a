"""Requests from the flags of ``mpipe``: a ``Request`` of a family or of all, or ``Changes`` of a schedule from a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

from megatron.pipeline.cli.arguments import REPLICA_LINK, StageList
from megatron.pipeline.planning.costs import COPIES, CostFlags, Numbers, costs_of, with_shards
from megatron.pipeline.planning.document import Changes
from megatron.pipeline.planning.refusals import check_limit, unit_of
from megatron.pipeline.planning.request import Request
from megatron.pipeline.schedule.core.costs import Costs, VocabularyCosts
from megatron.pipeline.schedule.core.loads import Load, loads_of
from megatron.pipeline.schedule.core.names import OFF
from megatron.pipeline.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.families import AUTO

_FILE = "file:"


def requested(options: Namespace) -> Request:
    """Request of ``mpipe plan`` or ``mpipe compare``.

    Args:
        options: of ``size_flags``, ``goal_flags``, ``cost_flags``, ``pass_flags`` and ``offload_flags``, and the schedule's name
            and sizes for ``mpipe plan``.

    Raises:
        ValueError: flags do not go together.
    """
    given = vars(options)
    name = given.get("schedule", AUTO)
    if name.startswith(_FILE):
        path = name.removeprefix(_FILE)
        raise ValueError(f"mpipe plan makes the schedules of families; for a file: mpipe simulate {path}, mpipe verify {path}")
    costs, vocabulary, offload = cost_flags_of(options), _vocabulary(options), _offload(options)
    loads = _loads(given)
    if offload is None:
        _check_no_copies(options)
    _check_boundary(options, costs)
    if options.balance and options.costs and len(options.costs.stages) < 3:
        raise ValueError(
            f"--balance needs --costs of 3 stages or more, to know what the ends of the model take; these are of "
            f"{len(options.costs.stages)}"
        )
    unit = unit_of(options.costs)
    check_limit(options.memory_limit, unit)
    check_limit(options.host_memory_limit, unit, "--host-memory-limit")

    def of_stages(placement: Placement) -> Costs:
        found = with_shards(costs_of(costs, placement, copies=offload is not None), vocabulary, placement.ranks)
        return replace(found, loads=loads) if loads else found

    return Request(
        name,
        options.pp,
        options.microbatches,
        of_stages,
        given.get("chunks") if name == given.get("schedule") else None,
        options.memory_limit,
        objective=options.objective,
        recompute=_stages(options, "recompute"),
        fused=_stages(options, "fuse"),
        splits=given.get("splits"),
        group=given.get("group"),
        vocabulary=vocabulary,
        offload=offload,
        host_limit=options.host_memory_limit,
        overlap=options.overlap_experts == "on",
        layers=options.balance,
        bounded=True,
        unit=unit,
    )


def _loads(given: dict[str, Any]) -> tuple[Load, ...]:
    """The loads of unequal microbatches."""
    count, lengths = given["microbatches"], given.get("lengths")
    if not lengths:
        if flags := [flag for flag in ("attention", "order") if given.get(flag)]:
            raise ValueError(f"--{flags[0]} is of microbatches of unequal lengths: give --lengths, or leave it out")
        return ()
    if count != len(lengths):
        raise ValueError(f"--lengths has {len(lengths)} microbatches: give --microbatches {len(lengths)}, not {count}")
    return loads_of(lengths, attention=given["attention"] or 0.0)


def changes(options: Namespace) -> Changes:
    """Changes that the flags of a command ask for in a schedule from a file; a command need not have all of these flags.

    Raises:
        ValueError: flags do not go together.
    """
    given = vars(options)
    _offload(options)
    return Changes(
        cost_flags_of(options),
        options.memory_limit,
        given.get("objective"),
        given.get("offload"),
        given.get("host_memory_limit"),
    )


def cost_flags_of(options: Namespace) -> CostFlags:
    given = {field.name: getattr(options, field.name) for field in fields(CostFlags) if field.name != "boundary"}
    return CostFlags(**given, boundary=_boundary(options))


def _boundary(options: Namespace) -> Numbers | None:
    """Seconds of a rank's reductions and gathers, each in a ring of all replicas.

    Raises:
        ValueError: flags do not go together, or the link has no speed.
    """
    given = vars(options)
    replicas, gradients, speed = (given.get(name) for name in ("replicas", "grad_bytes", "replica_link"))
    if replicas is None:
        for flag in ("grad_bytes", "param_bytes", "replica_link"):
            if given.get(flag) is not None:
                raise ValueError(f"--{flag.replace('_', '-')} is of data-parallel replicas: give --replicas, or leave it out")
        return None
    for name in ("RS", "AG"):
        if name in (given["cost"] or {}):
            raise ValueError(f"--cost {name}=.. and --replicas {replicas} say the same: leave out one of them")
    if gradients is None:
        raise ValueError(f"--replicas {replicas} needs the bytes of a rank's gradients: give --grad-bytes, such as 4GiB")
    if speed is not None and not 0 < speed < float("inf"):
        raise ValueError(f"--replica-link {speed:g}: give 1e9 bytes a second above 0, such as {REPLICA_LINK:g}")
    parameters = given["param_bytes"] if given.get("param_bytes") is not None else gradients / 2
    seconds = (replicas - 1) / replicas / (1e9 * (speed or REPLICA_LINK))
    return {"RS": gradients * seconds, "AG": parameters * seconds}


def _offload(options: Namespace) -> Offload | None:
    """The mode of ``--offload``."""
    given = vars(options)
    if given.get("offload") not in (None, OFF):
        return Offload(given["offload"])
    if given.get("host_memory_limit") is not None:
        raise ValueError("--host-memory-limit is for what --offload moves: give --offload selective or full, or leave it out")
    return None


def _check_no_copies(options: Namespace) -> None:
    """Refuse costs of copies that no pass needs."""
    named = [name for name in COPIES if name in (options.cost or {})]
    if named or options.copy:
        flag = f"--cost {named[0]}=.." if named else "--copy"
        raise ValueError(f"{flag} is of copies to host memory: give --offload selective or full, or leave it out")


def _check_boundary(options: Namespace, costs: CostFlags) -> None:
    """Refuse costs between iterations where nothing is reduced, stepped or gathered there."""
    given = {**(options.cost or {}), **(costs.boundary or {})}
    named = [name for name in ("latency", "norm") if name in given]
    if named and options.costs is None and not given.keys() & {"RS", "OPT", "AG"}:
        raise ValueError(f"--cost {named[0]}=.. is of what ranks do between iterations: give RS, OPT or AG too, or leave it out")


def _vocabulary(options: Namespace) -> Vocabulary | None:
    """The variant of ``--vocab-parallel``."""
    if options.vocab_parallel in (None, OFF):
        if options.vocab_cost:
            raise ValueError("--vocab-cost is of a spread vocabulary: give --vocab-parallel 1, 2 or interlaced, or leave it out")
        return None
    if options.costs and options.costs.vocabulary == VocabularyCosts() and not options.vocab_cost:
        raise ValueError('--costs has no "vocabulary": give what its passes take with --vocab-cost S=..,T=..')
    return Vocabulary(options.vocab_parallel)


def _stages(options: Namespace, flag: str) -> Callable[[Placement], Iterable[int]]:
    """The stages that a flag names, from a placement."""
    chosen: StageList | None = getattr(options, flag)

    def of(placement: Placement) -> Iterable[int]:
        try:
            return chosen.of(placement.last_stage + 1) if chosen else ()
        except ValueError as error:
            raise ValueError(f"--{flag} {error}") from None

    return of
