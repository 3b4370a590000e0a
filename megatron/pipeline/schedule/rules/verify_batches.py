"""The proof that nothing deadlocks where messages start in batches: see ``posting.py``."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import ScheduleError
from megatron.pipeline.schedule.lower.posting import UNFINISHED_SENDS, starts_posted
from megatron.pipeline.schedule.lower.program import (
    Collective,
    Compute,
    Flow,
    Join,
    Message,
    Operation,
    Program,
    Receive,
    Send,
    Wait,
    describe,
)


def batches_do_not_deadlock(
    programs: Sequence[Program], placement: Placement, starts: Callable[[Operation], bool] = starts_posted
) -> None:
    """All programs end where what a rank posts in one direction starts as a batch.

    Of a rank's batches in one direction each begins when the one before has ended, as those of one NCCL communicator do. A
    message is transferred once both its ends have begun, and a batch ends as a whole: a rank that waits for one of its messages
    waits for all of them. A Join blocks until all ranks reach theirs. A backward waits until its microbatch's activation has
    been sent, and a Send for earlier ones (``UNFINISHED_SENDS``).

    Args:
        placement: of the schedule that was lowered to these programs.
        starts: before which operations a rank starts what it has posted.

    Raises:
        ScheduleError: ranks wait for each other; the message names them and what each waits in.
    """
    replay = _BatchReplay(programs, placement, starts)
    replay.run()
    circle = replay.circle()
    if circle:
        places = "; ".join(f"rank {rank} in {place}, which waits for rank {whom}" for rank, place, whom in circle)
        raise ScheduleError(f"deadlock when messages start in batches: {places}")


class _PostedBatch:
    """Messages that a rank starts together in one direction.

    Attributes:
        line: that rank's batches in that direction which have not ended; the first has begun.
        left: the messages that have not been transferred, with their peers.
    """

    __slots__ = ("left", "line", "rank")

    def __init__(self, rank: int, line: deque[_PostedBatch]) -> None:
        self.rank, self.line = rank, line
        self.left: dict[Message, int] = {}


class _BatchReplay:
    def __init__(self, programs: Sequence[Program], placement: Placement, starts: Callable[[Operation], bool]) -> None:
        self._programs, self._placement, self._starts = programs, placement, starts
        ranks = range(len(programs))
        self._places = [0 for _ in ranks]
        self._runnable = list(ranks)
        self._lines: list[tuple[deque[_PostedBatch], deque[_PostedBatch]]] = [(deque(), deque()) for _ in ranks]  # down and up
        self._posted: list[dict[bool, _PostedBatch]] = [{} for _ in ranks]  # and not started, by whether it goes up
        self._receiving: list[dict[Message, _PostedBatch]] = [{} for _ in ranks]
        self._sending: list[dict[Message, _PostedBatch]] = [{} for _ in ranks]
        self._unfinished: dict[tuple[int, int, Flow], deque[_PostedBatch]] = defaultdict(deque)
        self._begun: dict[Message, _PostedBatch] = {}  # of messages that have begun at one end only
        self._joined: dict[Collective, set[int]] = defaultdict(set)

    def run(self) -> None:
        """Go on with all ranks until they have ended, or are stuck."""
        starts = self._starts
        while self._runnable:
            rank = self._runnable.pop()
            program, place, posted = self._programs[rank], self._places[rank], self._posted[rank]
            while place < len(program):
                operation = program[place]
                if posted and starts(operation):
                    self._start(rank)
                if self._awaited(rank, operation) is not None:
                    break
                place += 1
            else:
                self._start(rank)
            self._places[rank] = place

    def circle(self) -> list[tuple[int, str, int]]:
        """Ranks that wait for each other, each with what it is in and for whom it waits; empty if all have ended."""
        waits: dict[int, tuple[str, int]] = {}
        for one, (program, place) in enumerate(zip(self._programs, self._places, strict=True)):
            if place < len(program):
                whom = self._awaited(one, program[place])
                waits[one] = describe(program[place]), one if whom is None else whom
            elif lines := [line for line in self._lines[one] if line]:
                waits[one] = "the end of its program", next(iter(lines[0][0].left.values()))
        chain: list[int] = []
        rank: int | None = min(waits, default=None)
        while rank is not None and rank not in chain:
            chain.append(rank)
            rank = waits[rank][1]
        return [(one, *waits[one]) for one in chain[chain.index(rank) :]] if rank is not None else []

    def _awaited(self, rank: int, operation: Any) -> int | None:  # an Operation; isinstance is too slow here
        """Post what is to be posted; then the rank that must go on before this one can, or None if it can now."""
        batch: _PostedBatch | None = None
        kind = type(operation)
        if kind is Receive:
            message, peer = operation
            self._receiving[rank][message] = self._post(rank, message, peer, rank > peer)
        elif kind is Send:
            message, peer = operation
            unfinished = self._unfinished[rank, peer, message.flow]
            if message not in self._sending[rank]:
                self._sending[rank][message] = sent = self._post(rank, message, peer, rank < peer)
                unfinished.append(sent)
            if len(unfinished) > UNFINISHED_SENDS:
                self._start(rank)
                batch = unfinished[0] if unfinished[0].left else unfinished.popleft()
        elif kind is Compute:
            work = operation.work
            if work.kind.sends_gradient:
                stage = self._placement.stage(rank, work.chunk)
                batch = self._sending[rank].get(Message(Flow.ACTIVATION, work.microbatch, stage))
        elif kind is Wait:
            batch = self._receiving[rank].get(operation.message)
        elif kind is Join:
            return self._missing(rank, operation.collective)
        if batch is None or not batch.left:
            return None
        return next(iter(batch.line[0].left.values())) if batch.line else rank

    def _missing(self, rank: int, collective: Collective) -> int | None:
        """Join a collective; then a rank that has not joined it."""
        joined = self._joined[collective]
        if rank not in joined:
            joined.add(rank)
            if len(joined) == len(self._programs):
                self._runnable.extend(joined)
        return next((other for other in range(len(self._programs)) if other not in joined), None)

    def _post(self, rank: int, message: Message, peer: int, up: bool) -> _PostedBatch:
        posted = self._posted[rank]
        if up not in posted:
            posted[up] = _PostedBatch(rank, self._lines[rank][up])
        posted[up].left[message] = peer
        return posted[up]

    def _start(self, rank: int) -> None:
        """Start what a rank has posted, behind what it started before."""
        for batch in self._posted[rank].values():
            batch.line.append(batch)
            if len(batch.line) == 1:
                self._begin(batch)
        self._posted[rank].clear()

    def _begin(self, first: _PostedBatch) -> None:
        """Transfer those messages of a batch whose other end has begun; what follows a batch that thereby ends begins, too."""
        beginning, begun = [first], self._begun
        while beginning:
            batch = beginning.pop()
            for message in list(batch.left):
                other = begun.pop(message, None)
                if other is None:
                    begun[message] = batch
                    continue
                for end in (batch, other):
                    del end.left[message]
                    if not end.left:
                        self._runnable.append(end.rank)
                        end.line.popleft()
                        if end.line:
                            beginning.append(end.line[0])
