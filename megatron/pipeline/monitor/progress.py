"""Position of every rank, and the ranks that block the others: the facts and the diagnosis of hang reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from megatron.pipeline.planner import ops

_FINISHED = 4  # passes that a report shows
_NAMED = 8  # ranks that a report lists
_PLACED = 16  # waiting ranks whose places a report shows


@dataclass(frozen=True)
class Situation:
    """Position of one rank. Ranks are global ranks, those of the world.

    Attributes:
        place: what the rank does, such as ``"Wait gradient of microbatch 1 from stage 3, for B1.0"``.
        progress: changes whenever the rank moves.
        in_iteration: it has begun the operations of its program and not yet ended them.
        waits_for: the rank that must send or receive a message before this one can go on; None if no message is missing.
        waits_for_all: it takes part in a collective that others may not have reached.
        finished: the last few passes of this iteration, oldest first.
        line: of Python that the main thread is in; empty where it waits for a message.
        of_device: it is where the GPU is; the host has launched more.
        process: pipeline rank, device, host and process, to find the rank by.
    """

    place: str = "the steps around the pipeline"
    progress: tuple[int, ...] = ()
    in_iteration: bool = False
    waits_for: int | None = None
    waits_for_all: bool = False
    finished: tuple[str, ...] = ()
    line: str = ""
    of_device: bool = False
    process: str = ""

    @classmethod
    def in_program(
        cls, program: ops.Program, position: ops.Operation, begun: int, progress: tuple[int, ...], to_world: Callable[[int], int]
    ) -> Situation:
        """Position of a rank that runs a program.

        Args:
            position: the operation it runs.
            begun: operations that it has begun; more than the program has once it only waits for the last sends.
            to_world: from a pipeline rank to a rank of the world.
        """
        place, peer, together = " ".join([type(position).__name__, *map(str, position[:1])]), None, False
        if isinstance(position, ops.Validate):
            place = "Validate, which waits until the last optimizer step is accepted"
        elif isinstance(position, (ops.Join, ops.Wait)) and isinstance(position[0], ops.Collective):
            together = True
        elif isinstance(position, ops.Wait) and isinstance(position.message, ops.Message):
            # Both are a few operations away, and the program may have thousands.
            before = (program[index] for index in range(begun - 1, -1, -1))
            after = (program[index] for index in range(begun, len(program)))
            peer = next(one.peer for one in before if isinstance(one, ops.Receive) and one.message == position.message)
            needed = next((one.work for one in after if isinstance(one, ops.Compute)), None)
            place = f"{place}, for {needed}" if needed else place
        elif isinstance(position, ops.Send):  # does not block, unless sends before it do
            peer = position.peer
        ended = (program[index] for index in range(min(begun - 1, len(program)) - 1, -1, -1))
        done = [str(one.work) for one in islice((one for one in ended if isinstance(one, ops.Compute)), _FINISHED)]
        waits_for = None if peer is None else to_world(peer)
        finished = tuple(reversed(done))
        return cls(place, progress, in_iteration=True, waits_for=waits_for, waits_for_all=together, finished=finished)

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Situation:
        values = json.loads(text)
        return cls(**values | {"progress": tuple(values["progress"]), "finished": tuple(values["finished"])})

    def __str__(self) -> str:
        whom = "all ranks" if self.waits_for_all else None if self.waits_for is None else f"global rank {self.waits_for}"
        waiting = f", waiting for {whom}" if whom else ""
        finished = f"; last finished: {' '.join(self.finished)}" if self.finished else ""
        return f"{self.where}{waiting}{finished}"

    @property
    def where(self) -> str:
        """The place, and the line of Python."""
        return f"{self.place} (at {self.line})" if self.line else self.place


class RanksSeen:
    """Positions that one rank has read from the others, and when.

    Its clock stops while its own process is stopped: after a machine has slept, or a whole job was suspended, no rank is
    accused.
    """

    def __init__(self, world: int, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._looked: float | None = None
        self._clock = 0.0
        self._said: list[str] = [""] * world
        self._said_at = [0.0] * world
        self._moved_at = 0.0
        self.situations: list[Situation] = []

    def look(self, heard: Sequence[str], rank: int, mine: Situation, now: float) -> None:
        """Take in what every rank wrote last.

        Args:
            heard: a count that grows, ``|``, and a situation's ``to_text``, of every rank.
            rank, mine: of this rank's own situation the latest is at hand.
            now: seconds.
        """
        if self._looked is not None:
            self._clock += min(now - self._looked, self._longest_gap)
        self._looked = now
        for other, text in enumerate(heard):
            if text != self._said[other]:
                self._said[other], self._said_at[other] = text, self._clock
        before = [situation.progress for situation in self.situations]
        self.situations = [Situation.from_text(text.partition("|")[2]) for text in heard]
        self.situations[rank] = mine
        if before != [situation.progress for situation in self.situations]:
            self._moved_at = self._clock

    def silent(self, seconds: float) -> set[int]:
        """Ranks without a sign of life for this long."""
        return {rank for rank, at in enumerate(self._said_at) if self._clock - at >= seconds}

    @property
    def still(self) -> float:
        """Seconds since any rank moved."""
        return self._clock - self._moved_at


@dataclass(frozen=True)
class Diagnosis:
    """Ranks that block the others.

    Attributes:
        culprits: the likely causes; several where the facts do not decide.
        waiting: ranks that wait for a culprit, directly or through others.
        in_iteration: whether a culprit is in an iteration, where no pass may take long. Elsewhere are the start, the
            optimizer's step and checkpoints.
        text: one sentence.
        places: where the waiting ranks were, those next to the culprit in the first place; a line for each, indented.
    """

    culprits: tuple[int, ...]
    waiting: tuple[int, ...]
    in_iteration: bool
    text: str
    places: tuple[str, ...]

    def report(self, remark: str = "") -> str:
        """The sentence, a remark that follows it, and the places."""
        return "\n".join([f"{self.text}{remark}", *self.places])


def diagnose(situations: Sequence[Situation], silent: Collection[int]) -> Diagnosis:
    """Name the ranks that others wait for, directly or through a chain, and that wait for no message themselves.

    A silent rank comes first, for what it last said may be out of date; then one in a pass; then ranks that wait for each
    other; and last one outside its iteration, as most ranks are now and then.
    """
    ranks = range(len(situations))
    chains = {rank: list(_chain(situations, silent, rank)) for rank in ranks}
    ends = {chain[-1] for chain in chains.values()}
    together = {rank for rank in ranks if rank not in silent and situations[rank].waits_for_all}
    blocked = together | {rank for rank in ranks if rank not in silent and situations[rank].waits_for is not None}
    candidates = next(
        ranks_of_kind
        for ranks_of_kind in (
            set(silent),
            {rank for rank in ends - blocked if situations[rank].in_iteration},
            ends & (blocked - together),  # where a chain ends in a rank that waits for a message, it has come back to it
            ends,
        )
        if ranks_of_kind
    )
    waiting = {
        rank: {
            other
            for other in ranks
            if other != rank and (rank in chains[other][1:] or (rank not in blocked and chains[other][-1] in together))
        }
        for rank in candidates
    }
    most = max(len(others) for others in waiting.values())
    culprits = tuple(sorted(rank for rank in candidates if len(waiting[rank]) == most))
    held_up = tuple(sorted(set().union(*(waiting[rank] for rank in culprits)) - set(culprits)))
    words = " and ".join(_accuse(situations[rank], rank, rank in silent, rank in blocked) for rank in culprits[:_NAMED])
    if len(culprits) > _NAMED:
        words += f" and {len(culprits) - _NAMED} more ranks"
    if held_up:
        verb = "waits" if len(held_up) == 1 else "wait"
        words += f"; {list_ranks(held_up)} {verb} for {'it' if len(culprits) == 1 else 'them'}"
    # A silent rank may have begun its iteration since: that others wait for its messages is the better sign.
    signs = (*culprits, *held_up) if silent else culprits

    def distance(rank: int) -> int:  # those in a collective wait for the culprit without a chain
        return next((steps for steps, other in enumerate(chains[rank]) if other in culprits), 1)

    nearest = sorted(sorted(held_up, key=distance)[:_PLACED])
    places = tuple(f"    global rank {rank} was in {situations[rank]}" for rank in nearest)
    return Diagnosis(culprits, held_up, any(situations[rank].in_iteration for rank in signs), words, places)


def _chain(situations: Sequence[Situation], silent: Collection[int], rank: int) -> Iterator[int]:
    """A rank, the one it waits for, the one that that one waits for, ... up to one that does not wait, or a repetition."""
    seen: set[int] = set()
    following: int | None = rank
    while following is not None:
        yield following
        if following in seen:
            return
        seen.add(following)
        following = None if following in silent else situations[following].waits_for


def name_rank(rank: int, situation: Situation) -> str:
    """``global rank 2 (pipeline rank 2 of 4, GPU 2 of node1, process 31210)``."""
    return f"global rank {rank} ({situation.process})" if situation.process else f"global rank {rank}"


def _accuse(situation: Situation, rank: int, silent: bool, blocked: bool) -> str:
    who = name_rank(rank, situation)
    if silent:
        return f"{who} is silent: killed, stopped or cut off. It was last in {situation.where}"
    if blocked:
        return f"{who} waits in a circle, in {situation.where}"
    return f"{who} is slow or stuck in {situation.where}"


def list_ranks(ranks: Sequence[int]) -> str:
    """``global rank 3``, ``global ranks 0, 1, 3``, or for many ``global ranks 0, 1, ..., 7 and 56 more``."""
    if len(ranks) == 1:
        return f"global rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"global ranks {', '.join(map(str, ranks[:_NAMED]))}{more}"
