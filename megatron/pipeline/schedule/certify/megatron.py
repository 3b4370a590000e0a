"""Traffic of Megatron's interleaved 1F1B: ``forward_backward_pipelining_with_interleaving`` of megatron-core 0.16, with the
posts of ``P2PCommunicator._communicate`` in their order and its waits.

With ``--overlap-p2p-communication`` (the default), each tensor is posted by itself, on even ranks sends before receives and on
odd ranks receives before sends (``_p2p_ops``). Between the first and the last backward of the steady state a rank waits for a
tensor where it needs it, and for a send after the next one; in warm-up and cool-down it waits for all at once. Without overlap
the tensors of a step are one group (``_batched_p2p_ops``), and the host waits for the device after it. With
``--variable-seq-lengths`` a group of shapes goes first, and the host waits for it (``_communicate_shapes``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from megatron.pipeline.schedule.core.kinds import Flow
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.placement import interleaved
from megatron.pipeline.schedule.families.interleaved import chunk_by_chunk
from megatron.pipeline.schedule.lower.program import Compute, Message, Receive, Send, Wait
from megatron.pipeline.schedule.lower.traffic import Start, Step, Sync, Traffic, shape_of

NAME = "megatron-interleaved"


def megatron_interleaved(
    ranks: int, microbatches: int, chunks: int, group: int | None = None, overlap: bool = True, shapes: bool = False
) -> Traffic:
    """Traffic of the ranks.

    Args:
        group: the microbatches that run through a chunk before the next one does (``--microbatch-group-size-per-virtual-pipeline-
            stage``); by default one per rank.
        overlap: ``--overlap-p2p-communication``.
        shapes: ``--variable-seq-lengths``.

    Raises:
        ValueError: megatron-core refuses these sizes.
    """
    group = ranks if group is None else group
    if ranks < 2 or chunks < 2:
        raise ValueError(f"{NAME} needs at least 2 ranks and 2 chunks, got {ranks} and {chunks}")
    if not ranks <= group <= microbatches:
        raise ValueError(
            f"megatron-core needs a group between {ranks}, the ranks, and {microbatches}, the microbatches; got {group}"
        )
    if 0 < microbatches % group < ranks:
        raise ValueError(
            f"megatron-core needs at least {ranks} microbatches, one per rank, in the last group of {group}; "
            f"{microbatches} leave {microbatches % group}"
        )
    order = list(chunk_by_chunk(microbatches, group, chunks))
    warm_up = [min((ranks - rank - 1) * 2 + (chunks - 1) * group, len(order)) for rank in range(ranks)]
    rows = (_MegatronRank(rank, ranks, chunks, order, overlap, shapes).steps(warm_up[rank]) for rank in range(ranks))
    return Traffic(NAME, interleaved(ranks, chunks), microbatches, tuple(map(tuple, rows)))


class _MegatronRank:
    """One rank's row while it grows.

    ``order`` has (microbatch, chunk) of every forward; backwards run in the same order, with chunks counted from the last.
    """

    def __init__(self, rank: int, ranks: int, chunks: int, order: list[tuple[int, int]], overlap: bool, shapes: bool) -> None:
        self._rank, self._ranks, self._chunks, self._order = rank, ranks, chunks, order
        self._overlap, self._shapes = overlap, shapes
        self._steps: list[Step] = []
        self._received: Counter[tuple[Flow, int]] = Counter()  # by flow and chunk
        self._to_wait: dict[Flow, deque[Message]] = {flow: deque() for flow in Flow}  # receives that nothing has waited for
        self._unwaited: dict[Flow, Message | None] = dict.fromkeys(Flow)  # the last send

    def steps(self, warm_up: int) -> list[Step]:
        total = len(self._order)
        steady, all_warm = total - warm_up, warm_up == total
        if self._rank:
            self._exchange(receive={Flow.ACTIVATION: 0})
        for number in range(warm_up):
            sent = self._compute(Flow.ACTIVATION, number)
            receive = self._next(Flow.ACTIVATION, number, last=number == total - 1)
            ends = number == warm_up - 1 and not all_warm
            first_backward = {Flow.GRADIENT: self._chunks - 1} if ends and not self._is_last else {}
            if self._overlap:
                self._exchange(sent, receive)
                if ends:
                    self._exchange(receive=first_backward, wait=False)
            else:
                self._exchange(sent, receive | first_backward)
        for number in range(steady):
            forward = warm_up + number
            if self._overlap:
                self._wait_for_input(Flow.ACTIVATION, forward)
                sent = self._compute(Flow.ACTIVATION, forward)
                self._exchange(sent, self._next(Flow.ACTIVATION, forward, last=number == steady - 1), wait=False)
                self._wait_for_send(Flow.ACTIVATION, sent)
                self._wait_for_input(Flow.GRADIENT, number)
                sent = self._compute(Flow.GRADIENT, number)
                self._exchange(sent, self._next(Flow.GRADIENT, number), wait=False)
                self._wait_for_send(Flow.GRADIENT, sent)
            else:
                sent = self._compute(Flow.ACTIVATION, forward) | self._compute(Flow.GRADIENT, number)
                receive = self._next(Flow.ACTIVATION, forward, last=number == steady - 1) | self._next(Flow.GRADIENT, number)
                self._exchange(sent, receive)
        if all_warm and not self._is_last:
            self._exchange(receive={Flow.GRADIENT: self._chunks - 1})
        for number in range(steady, total):
            if number:
                self._wait_for_input(Flow.GRADIENT, number)
            sent = self._compute(Flow.GRADIENT, number)
            self._exchange(sent, self._next(Flow.GRADIENT, number, last=number == total - 1))
        self._wait_for_send(Flow.GRADIENT, {})
        return self._steps

    @property
    def _is_last(self) -> bool:
        return self._rank == self._ranks - 1

    def _chunk(self, flow: Flow, number: int) -> int:
        """The chunk of a forward or a backward, by its number; the numbers of backwards past the last one start again."""
        chunk = self._order[number % len(self._order)][1]
        return chunk if flow is Flow.ACTIVATION else self._chunks - 1 - chunk

    def _compute(self, flow: Flow, number: int) -> dict[Flow, Message]:
        microbatch, chunk = self._order[number][0], self._chunk(flow, number)
        self._steps.append(Compute(Pass(Kind.F if flow is Flow.ACTIVATION else Kind.BW, microbatch, chunk)))
        stage = chunk * self._ranks + self._rank
        ends = stage == (self._ranks * self._chunks - 1 if flow is Flow.ACTIVATION else 0)
        return {} if ends else {flow: Message(flow, microbatch, stage)}

    def _next(self, flow: Flow, number: int, last: bool = False) -> dict[Flow, int]:
        """The chunk that the next tensor is for, if one is to be received: on the rank where a flow begins it comes from the
        last rank of that flow, which is as many passes behind as there are ranks between."""
        forward = flow is Flow.ACTIVATION
        if self._rank != (0 if forward else self._ranks - 1):
            return {} if last else {flow: self._chunk(flow, number + 1)}
        behind = number - (self._ranks - 1)
        if last or behind < 0:
            return {}
        chunk = self._chunk(flow, behind)
        if chunk == (self._chunks - 1 if forward else 0):
            return {}
        return {flow: chunk + 1 if forward else chunk - 1}

    def _exchange(
        self, send: dict[Flow, Message] | None = None, receive: dict[Flow, int] | None = None, wait: bool = True
    ) -> None:
        """Send tensors and receive others, as one call of ``_communicate``."""
        below, above = (self._rank - 1) % self._ranks, (self._rank + 1) % self._ranks
        posts: dict[str, Send | Receive] = {}
        for flow, item in (send or {}).items():
            name, peer = ("send next", above) if flow is Flow.ACTIVATION else ("send prev", below)
            posts[name] = Send(item, peer)
        for flow, chunk in (receive or {}).items():
            name, peer, shift = ("recv prev", below, -1) if flow is Flow.ACTIVATION else ("recv next", above, 1)
            stage = chunk * self._ranks + self._rank + shift
            posts[name] = Receive(Message(flow, self._received[flow, chunk], stage), peer)
            self._received[flow, chunk] += 1
        together = [posts[name] for name in ("send prev", "recv prev", "send next", "recv next") if name in posts]
        if self._shapes:
            self._group([post._replace(message=shape_of(post.message)) for post in together])
        if not self._overlap:
            self._group(together)
            return
        even = ("send next", "recv prev", "send prev", "recv next")
        odd = ("recv prev", "send next", "recv next", "send prev")
        apart = [posts[name] for name in (odd if self._rank % 2 else even) if name in posts]
        for post in apart:
            self._steps += [post, Start()]
        if wait:
            self._steps += [Wait(post.message) for post in apart]
            return
        for post in apart:
            if isinstance(post, Receive):
                self._to_wait[post.message.flow].append(post.message)

    def _group(self, posts: Sequence[Send | Receive]) -> None:
        """One group, if there is anything to exchange; the host waits for the device in any case."""
        self._steps += [*posts, *(Wait(post.message) for post in posts), Sync()]

    def _wait_for_input(self, flow: Flow, number: int) -> None:
        """Wait for the oldest tensor that nothing has waited for, if a pass needs one."""
        stage = self._chunk(flow, number) * self._ranks + self._rank
        begins = stage == (0 if flow is Flow.ACTIVATION else self._ranks * self._chunks - 1)
        if not begins and self._to_wait[flow]:
            self._steps.append(Wait(self._to_wait[flow].popleft()))

    def _wait_for_send(self, flow: Flow, sent: dict[Flow, Message]) -> None:
        """Wait for the send before the last one."""
        before, self._unwaited[flow] = self._unwaited[flow], sent.get(flow)
        if before:
            self._steps.append(Wait(before))
