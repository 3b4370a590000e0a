"""The specification of lowered programs, as code: nothing is lost on the way from one rank to another, and nothing deadlocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.lower.lower import gatherings, messages
from megatron.pipeline.planner.schedule.lower.program import (
    Collective,
    Compute,
    Copy,
    Join,
    Message,
    Operation,
    Posting,
    Program,
    Receive,
    Send,
    Validate,
    Wait,
    describe,
    pass_of,
)
from megatron.pipeline.planner.schedule.lower.traffic import of_programs, with_waits_of_batches
from megatron.pipeline.planner.schedule.rules.deadlock import nothing_deadlocks
from megatron.pipeline.planner.schedule.rules.transports import TRANSPORTS

# For every rank, where in its program it does what with which pass, message or collective.
_Places: TypeAlias = list[dict[tuple[type[Operation], Pass | Message | Collective], int]]


def verify_programs(schedule: Schedule, programs: Sequence[Program], posting: Posting = Posting.SINGLE) -> None:
    """Check what a schedule was lowered to against every rule below.

    Args:
        posting: how the sends and receives will be started. Programs that are right for batches are right one by one.

    Raises:
        ScheduleError: a rule is broken; the message names the rank and the first operation that breaks it.
    """
    programs_follow_the_schedule(schedule, programs)
    places = nothing_is_done_twice(programs)
    every_pass_on_a_lane_stands_where_it_may(schedule, programs, places)
    every_message_is_delivered(schedule, programs, places)
    every_collective_is_joined(schedule, programs, places)
    ranks_agree_on_the_order_of_collectives(programs)
    traffic = of_programs(schedule, programs)
    nothing_deadlocks(traffic, TRANSPORTS["rendezvous"])
    if posting is Posting.BATCHED:
        nothing_deadlocks(with_waits_of_batches(traffic), TRANSPORTS["batched-direction"])
    nothing_crosses_the_validation(schedule, programs)


def programs_follow_the_schedule(schedule: Schedule, programs: Sequence[Program]) -> None:
    """Every rank computes exactly its passes, in the schedule's order, and has its copies where that has them."""
    if len(programs) != schedule.ranks:
        raise ScheduleError(f"{len(programs)} programs for {schedule.ranks} ranks; give one program per rank")
    for rank, (passes, program) in enumerate(zip(schedule.passes, programs, strict=True)):
        computed = [work for operation in program if (work := pass_of(operation)) is not None]
        for slot, (planned, found) in enumerate(itertools.zip_longest(passes, computed)):
            if planned != found:
                raise ScheduleError(f"rank {rank}: pass {slot} of the program is {found}, of the schedule {planned}")


def nothing_is_done_twice(programs: Sequence[Program]) -> _Places:
    """No rank runs, starts, sends, receives, joins or awaits anything twice. Returns where it does so."""
    places: _Places = [{} for _ in programs]
    for rank, (program, here) in enumerate(zip(programs, places, strict=True)):
        for place, operation in enumerate(program):
            kind = type(operation)
            if kind is not Validate:
                key = kind, operation[0]  # type: ignore[misc]  # isinstance is too slow here
                if key in here:
                    raise ScheduleError(f"rank {rank}: {_named(operation)} comes twice; remove one")
                here[key] = place
    return places


def every_pass_on_a_lane_stands_where_it_may(schedule: Schedule, programs: Sequence[Program], places: _Places) -> None:
    """A pass on a lane starts after what it needs and ends before what needs it; no others are there, and those of one lane start
    in its order.

    A copy to host memory starts after its F and before it is waited for; a copy back starts after that, and is waited for before
    the pass that needs it.
    """
    for rank, (row, program) in enumerate(zip(schedule.rows, programs, strict=True)):
        needed_by = {other: work for work, other in row.awaited.items()}
        planned = {work for work in row.passes if work.kind.is_copy}
        for operation in program:
            if isinstance(operation, (Copy, Wait)) and isinstance(operation[0], Pass) and operation[0] not in planned:
                raise ScheduleError(f"rank {rank}: {describe(operation)}, which the schedule does not have; remove it")
        for work in row.passes:
            if work not in planned:
                continue
            need = row.before(work)
            assert need is not None, "a copy moves what another pass has left"
            chain: list[tuple[type[Operation], Pass]] = [(Wait if need in planned else Compute, need), (Copy, work), (Wait, work)]
            if work in needed_by:
                chain.append((Compute, needed_by[work]))
            at = [places[rank].get(each, -1) for each in chain]
            if -1 in at or at != sorted(at):
                order = ", ".join(f"{kind.__name__} {each}" for kind, each in chain)
                raise ScheduleError(f"rank {rank}: {work} needs, in this order: {order}")
        started = [each.work for each in program if isinstance(each, Copy)]
        for lane, passes in row.lanes.items():
            here = [work for work in started if work.kind.row.lane is lane]
            for first, found in zip(passes, here, strict=True):
                if first != found:
                    raise ScheduleError(
                        f"rank {rank}: Copy {found} starts where its lane has {first}; they start in the order of F"
                    )


def every_message_is_delivered(schedule: Schedule, programs: Sequence[Program], places: _Places) -> None:
    """Every tensor that another rank needs is sent once, after the pass that makes it, and received and waited for once,
    in this order, before the pass that needs it, by the right peers; and no other tensor is."""
    needed = {transfer.message: transfer for transfer in messages(schedule)}
    operation: Any  # isinstance is too slow here
    for rank, program in enumerate(programs):
        for operation in program:
            kind = type(operation)
            if kind in (Send, Receive, Wait) and type(message := operation[0]) is Message:
                if message not in needed:
                    raise ScheduleError(f"rank {rank}: {_named(operation)}, which no other rank needs; remove it")
                _, sender, _, receiver, _ = needed[message]
                ends = (sender, receiver) if kind is Send else (receiver, sender)
                peer = ends[1] if kind is Wait else operation.peer
                if (rank, peer) != ends:
                    what = f"rank {ends[0]}: {kind.__name__} of the {message}"
                    raise ScheduleError(f"{what} is on rank {rank} with peer {peer} instead of {ends[1]}")
    for message, sender, producer, receiver, consumer in needed.values():
        makes, needs = schedule.passes[sender][producer], schedule.passes[receiver][consumer]
        there, here = places[sender], places[receiver]
        sent, posted, waited = there.get((Send, message)), here.get((Receive, message)), here.get((Wait, message))
        if sent is None or posted is None or waited is None:
            missing = ("Send", sender) if sent is None else ("Receive" if posted is None else "Wait", receiver)
            raise ScheduleError(
                f"rank {missing[1]}: {missing[0]} of the {message} is missing; {needs} of rank {receiver} needs it from {makes} "
                f"of rank {sender}"
            )
        if sent < there[Compute, makes]:
            raise ScheduleError(f"rank {sender}: Send of the {message} comes before {makes}, which makes it")
        if not posted < waited < here[Compute, needs]:
            raise ScheduleError(
                f"rank {receiver}: {needs} needs the {message}; its Receive, its Wait and the pass must come in this order"
            )


def every_collective_is_joined(schedule: Schedule, programs: Sequence[Program], places: _Places) -> None:
    """Every rank joins every collective of a spread vocabulary once, after the pass that makes its part (and after all joined
    the one that its part is made from), and waits for it once, after that and before the pass that needs it."""
    known = {one.collective: (one.after, dict(one.producers), dict(one.consumers)) for one in gatherings(schedule)}
    for rank, (program, here) in enumerate(zip(programs, places, strict=True)):
        for operation in program:
            if isinstance(operation, (Join, Wait)) and isinstance(operation[0], Collective) and operation[0] not in known:
                raise ScheduleError(f"rank {rank}: {operation} of the {operation[0]}, which nothing needs; remove it")
        for collective, (after, producers, consumers) in known.items():
            for kind in (Join, Wait):
                if (kind, collective) not in here:
                    raise ScheduleError(f"rank {rank}: {kind.__name__} of the {collective} is missing")
            joined, waited = here[Join, collective], here[Wait, collective]
            makes, needs = producers.get(rank), consumers.get(rank)
            early = makes is not None and joined < here[Compute, makes]
            if after is not None:
                early = early or joined < here[Join, after]
                # What it is made of, T uses up.
                if here[Compute, Pass(Kind.T, collective.microbatch)] < joined:
                    raise ScheduleError(f"rank {rank}: Join of the {collective} comes after T, which ends what it is made of")
            if early or waited < joined or (needs is not None and here[Compute, needs] < waited):
                parts = [str(part) for part in (makes, after) if part is not None]
                raise ScheduleError(
                    f"rank {rank}: the {collective} must come in this order: {', '.join([*parts, 'Join', 'Wait'])}"
                    + (f", {needs}" if needs else "")
                )


def ranks_agree_on_the_order_of_collectives(programs: Sequence[Program]) -> None:
    """All ranks join the collectives in one order."""
    orders = [[one.collective for one in program if isinstance(one, Join)] for program in programs]
    for rank, order in enumerate(orders):
        for first, here in zip(orders[0], order, strict=False):
            if first != here:
                raise ScheduleError(
                    f"rank {rank} joins the {here} where rank 0 joins the {first}; all ranks must join collectives in one order"
                )


def nothing_crosses_the_validation(schedule: Schedule, programs: Sequence[Program]) -> None:
    """A program that trains validates once, after forwards and copies alone; a message is sent before its sender validates just
    if it is received before its receiver does, so that what an undone step voids is the same on both sides."""
    trains = any(not (kind.is_forward or kind.is_copy) for row in schedule.rows for kind in row.kinds)
    before: dict[Message | Collective, bool] = {}
    for rank, program in enumerate(programs):
        places = [place for place, operation in enumerate(program) if isinstance(operation, Validate)]
        if len(places) != trains:
            raise ScheduleError(f"rank {rank}: Validate comes {len(places)} times instead of {int(trains)}")
        if not trains:
            continue
        for operation in program[: places[0]]:
            if isinstance(operation, Compute) and not operation.work.kind.is_forward:
                raise ScheduleError(f"rank {rank}: {operation.work} comes before Validate; only forwards may")
        for place, operation in enumerate(program):
            early = place < places[0]
            if isinstance(operation, (Send, Receive)) and before.setdefault(operation.message, early) != early:
                raise ScheduleError(
                    f"the {operation.message} crosses the validation between ranks {rank} and {operation.peer}: both must send "
                    "and receive it before their Validate, or both after it"
                )
            if isinstance(operation, Join) and before.setdefault(operation.collective, early) != early:
                raise ScheduleError(
                    f"the {operation.collective} crosses the validation: rank {rank} must join it "
                    f"{'after' if early else 'before'} its Validate, as others do"
                )


def _named(operation: Operation) -> str:
    """``Send of the activation of ..``, ``Copy D2H0.0``."""
    about = next(iter(operation))
    return f"{type(operation).__name__} {'' if isinstance(about, Pass) else 'of the '}{about}"
