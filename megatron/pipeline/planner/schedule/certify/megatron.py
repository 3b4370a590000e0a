"""Traffic of megatron-core's 1F1B, ``forward_backward_pipelining_with_interleaving`` or ``without_interleaving``: the planned
order, with messages where ``P2PCommunicator._communicate`` of 0.16 posts them, and its waits.

With overlap each message is posted by itself, on odd ranks receives before sends. In the steady state a rank waits for a message
where it needs it, and for a send after the next one; otherwise at once. Without overlap the messages of a step are one group, and
the host waits for the device after it; so it is without interleaving, where a step has a message each way at most. With variable
sequence lengths a group of their shapes goes before messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import TypeAlias

from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Receive, Send, Wait
from megatron.pipeline.planner.schedule.lower.traffic import Start, Step, Sync, Traffic

_Passes: TypeAlias = tuple[Pass, ...]
_Exchange: TypeAlias = tuple[_Passes, _Passes, bool]  # passes, those whose inputs are received next, and whether waits come later
_GROUP = ((Flow.GRADIENT, True), (Flow.ACTIVATION, False), (Flow.ACTIVATION, True), (Flow.GRADIENT, False))  # and whether sent


def megatron_interleaved(schedule: Schedule, overlap: bool = True, shapes: bool = False) -> Traffic:
    """Traffic of an interleaved schedule, whose groups have a microbatch for each rank.

    Args:
        overlap: ``--overlap-p2p-communication``.
        shapes: ``--variable-seq-lengths``.

    Raises:
        ValueError: megatron-core refuses this number of microbatches.
    """
    ranks, microbatches = schedule.ranks, schedule.microbatches
    if microbatches % ranks:
        raise ValueError(f"megatron-core's interleaved needs a multiple of {ranks} microbatches, the ranks; got {microbatches}")
    return _traffic(schedule, [_exchanges(schedule, rank, overlap) for rank in range(ranks)], overlap, shapes)


def megatron_1f1b(schedule: Schedule, shapes: bool = False) -> Traffic:
    """Traffic of a 1F1B schedule with one chunk per rank."""
    return _traffic(schedule, [list(_steps(schedule, rank)) for rank in range(schedule.ranks)], False, shapes)


def _traffic(schedule: Schedule, exchanges: list[list[_Exchange]], overlap: bool, shapes: bool) -> Traffic:
    rows = (tuple(_row(schedule, rank, each, overlap, shapes)) for rank, each in enumerate(exchanges))
    return Traffic(schedule.name, schedule.placement, schedule.microbatches, tuple(rows))


def _row(schedule: Schedule, rank: int, exchanges: list[_Exchange], overlap: bool, shapes: bool) -> Iterator[Step]:
    sent: dict[Kind | _Passes, list[Message]] = {}  # by the pass, what the rank has not waited for
    for done, following, waits_later in exchanges:
        for work in done:  # what it has waited for before holds up nothing
            yield from (Wait(post.message) for post in _posts(schedule, rank, (), (work,)))
            yield Compute(work)
        posts = [*_posts(schedule, rank, done, following)]
        for group in (*[[*map(_shape, posts)]] * shapes, *[posts] * (not overlap)):
            yield from (*group, *(Wait(post.message) for post in group), Sync())
        if overlap:
            posts.sort(key=lambda post: isinstance(post, Receive) != rank % 2)
            yield from chain.from_iterable((post, Start()) for post in posts)
            waits = [post.message for post in posts]
            if waits_later:
                kind = done and done[0].kind
                waits, sent[kind] = sent.get(kind, []), [post.message for post in posts if isinstance(post, Send)]
            yield from map(Wait, waits)
    yield from map(Wait, sent.get(Kind.BW, ()))


def _exchanges(schedule: Schedule, rank: int, overlap: bool) -> list[_Exchange]:
    forwards, back = ([(work,) for work in schedule.passes[rank] if work.kind is kind] for kind in (Kind.F, Kind.BW))
    warm_up = min(2 * (schedule.ranks - rank - 1) + (schedule.placement.chunks - 1) * schedule.ranks, len(forwards))
    steady = len(forwards) - warm_up
    if not overlap:  # where all forwards are warm-up, the first gradient comes in a group of its own
        pairs = [(*both[0], *both[1]) for both in zip(forwards[warm_up:], back, strict=False)]
        steps = [*[()][:rank], *forwards[:warm_up], *pairs, *[()] * (not steady), *back[steady:], ()]
        return [(*step, False) for step in pairwise(steps)]
    first, last = ([*pairwise([(), *flow, ()])] for flow in (forwards, back))
    alternating = chain.from_iterable(zip(first[warm_up + 1 :], last[1:], strict=False))
    phases = (first[rank == 0 : warm_up + 1], [last[0], *alternating], last[steady + 1 :])
    return [(*step, number == 1 and steady > 0) for number, phase in enumerate(phases) for step in phase]


def _steps(schedule: Schedule, rank: int) -> Iterator[_Exchange]:
    """Exchanges of 1F1B: a send goes with a receive of the other direction, and by itself in warm-up and at the end."""
    row: list[_Passes] = [(work,) for work in schedule.passes[rank]]
    for done, following in pairwise([(), *row, ()]):
        if done and following and done[0].kind is not following[0].kind:
            yield done, following, False
        else:
            yield from ((*step, False) for step in ((done, ()), ((), following)) if step != ((), ()))


def _posts(schedule: Schedule, rank: int, done: _Passes, following: _Passes) -> Iterator[Send | Receive]:
    """Messages that passes send, and that following ones need from other ranks."""
    for flow, sends in _GROUP:
        for work in done if sends else following:
            forward, stage = work.kind is Kind.F, schedule.placement.stage(rank, work.chunk)
            other = stage + (1 if sends is forward else -1)
            if forward is (flow is Flow.ACTIVATION) and 0 <= other <= schedule.placement.last_stage:
                message, peer = Message(flow, work.microbatch, stage if sends else other), other % schedule.ranks
                yield Send(message, peer) if sends else Receive(message, peer)


def _shape(post: Send | Receive) -> Send | Receive:
    return post._replace(message=post.message._replace(flow=f"shape of the {post.message.flow}"))  # type: ignore[arg-type]
