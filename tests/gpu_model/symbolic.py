"""Traces of lowered programs, without a training: what the product's executor would hand to a device, pass by pass.

As ``runtime/p2p.py`` and ``runtime/executor.py`` do it; ``test_symbolic.py`` compares the messages with those of a training. What
they leave open is taken as the stricter of two: all exchanges of the vocabulary share one communicator and one side stream, and
short passes give no host a longer lead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpu_model.trace import At, Follow, HostWait, Item, Kernels, Mark, Part, Post
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.lower.posting import LEAD
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
    starts_posted,
)

KERNELS = 20  # of a pass


def traces(iterations: Sequence[Sequence[Program]], posting: Posting = Posting.SINGLE, undone: bool = False) -> list[list[Item]]:
    """Of iterations on all ranks of a pipeline, which are the world's.

    Args:
        iterations: the programs of all ranks, for each.
        undone: the optimizer's step before each does not stand, so that what was begun is abandoned, and done again.
    """
    ranks = len(iterations[0])
    hosts = [_Host(rank, ranks, posting) for rank in range(ranks)]
    for programs in iterations:
        for host, program in zip(hosts, programs, strict=True):
            if undone:
                host.run(program[: program.index(Validate())])
                host.abandon()
            host.run(program)
    return [[*host.items, HostWait(None, "the end")] for host in hosts]


class _Host:
    def __init__(self, rank: int, ranks: int, posting: Posting) -> None:
        self._rank, self._ranks, self._posting = rank, tuple(range(ranks)), posting
        self.items: list[Item] = []
        self._ends: deque[int] = deque()  # of the last passes on the device
        self._moments: dict[Message | Collective | Pass, int] = {}
        self._together: list[tuple[str, Part, Message | None]] = []

    def run(self, program: Program) -> None:
        for operation in program:
            self.items.append(At(describe(operation)))
            if starts_posted(operation):
                self._start()
            self._do(operation)
        self._start()

    def abandon(self) -> None:
        """The passes' stream waits for all that has been posted, as ``Executor.abandon`` does."""
        self.items += [Follow("compute", moment) for moment in self._moments.values()]
        self._moments.clear()

    def _do(self, operation: Operation) -> None:
        match operation:
            case Compute():
                if len(self._ends) == LEAD:
                    self.items.append(HostWait(self._ends.popleft(), "the lead"))
                self.items += [Kernels("compute", KERNELS), Mark("compute")]
                self._ends.append(len(self.items) - 1)
            case Send(_, peer):
                self._message("up" if self._rank < peer else "down", Part("send", peer), None)
            case Receive(message, peer):
                self._message("up" if peer < self._rank else "down", Part("recv", peer), message)
            case Join(collective):
                self.items += [Mark("compute"), Follow("side", len(self.items)), Kernels("side", 1)]
                self._moments[collective] = self._post("side", "vocabulary", (Part(collective.exchange.name),), alone=False)
                self.items.append(Follow("side", self._moments[collective]))
            case Copy(work):
                lane = str(work.kind)
                self.items += [Mark("compute"), Follow(lane, len(self.items)), Kernels(lane, 1)]
                self._moments[work] = len(self.items) - 1
            case Wait(awaited):
                self.items.append(Follow("compute", self._moments.pop(awaited)))

    def _message(self, group: str, part: Part, message: Message | None) -> None:
        self._together.append((group, part, message))
        if self._posting is Posting.SINGLE:
            self._start()

    def _start(self) -> None:
        for group in dict.fromkeys(group for group, _, _ in self._together):
            mine = [(part, message) for other, part, message in self._together if other == group]
            single = self._posting is Posting.SINGLE
            moment = self._post("compute", group, tuple(part for part, _ in mine), alone=single)
            self._moments |= {message: moment for _, message in mine if message}
        self._together.clear()

    def _post(self, stream: str, group: str, parts: tuple[Part, ...], alone: bool) -> int:
        self.items.append(Post(stream, True, group, self._ranks, self._rank, parts, alone, ""))
        return len(self.items) - 1
