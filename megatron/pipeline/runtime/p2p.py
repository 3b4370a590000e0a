"""This rank's end of the messages between stages: posted without blocking, over groups that separate the directions.

NCCL runs what two ranks exchange over one communicator one after another, so two opposing messages may wait for each other. A
pipeline therefore has two groups, one for messages to higher ranks and one for messages to lower ones; the order within each
is that of the programs, which both ends share. gloo needs no such care and gets the same treatment.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.distributed.groups import connect, like, memory_noted, new_group, warn_of_eager_groups
from megatron.pipeline.planner import kinds, ops

Tensors = list[torch.Tensor | None]
Shape = Sequence[int]

_MOST_DIMENSIONS = 7  # of a tensor whose shape is sent before it


@dataclass(frozen=True)
class Channels:
    """The process groups that one pipeline's messages travel over.

    Attributes:
        ranks: global ranks of the pipeline, in its order.
        rank: this one's place among them.
        up, down: for messages to higher and to lower ranks of the pipeline.
        shapes: for the shapes of tensors of variable length, in host memory; None where all are known.
    """

    ranks: tuple[int, ...]
    rank: int
    up: Any
    down: Any
    shapes: Any = None
    _connected: set[tuple[int, int]] = field(default_factory=set, init=False, compare=False)

    @classmethod
    def open(cls, pipeline: torch.distributed.ProcessGroup, variable_lengths: bool, max_ctas: int | None = None) -> Channels:
        """Make the groups of a pipeline; collective over the world, every rank with the pipeline that it is in.

        Args:
            variable_lengths: shapes travel before tensors.
            max_ctas: the most thread blocks of an NCCL kernel; None as ``groups.few_ctas``.
        """
        ranks = tuple(torch.distributed.get_process_group_ranks(pipeline))
        members = ranks if len(ranks) > 1 else ()
        # Messages are short and others wait for them: they go before the passes' kernels.
        warn_of_eager_groups()
        options = like(pipeline, high_priority=True, max_ctas=max_ctas)
        shapes = new_group(members, backend="gloo") if variable_lengths else None
        return cls(ranks, pipeline.rank(), new_group(members, **options), new_group(members, **options), shapes)

    def connect(self, pairs: Set[tuple[int, int]], posting: ops.Posting) -> None:
        """Make the communicators of messages between these ranks before the first pass, once; see ``groups.connect``.

        NCCL has one of its own for every pair of ranks, and one of the whole group for what is posted in batches, of which all
        ranks of the group must take part in the first use. Collective over the pipeline.

        Args:
            pairs: sender and receiver, ranks of the pipeline; the same on all ranks.
        """
        new = pairs - self._connected
        if not new or torch.distributed.get_backend(self.up) != "nccl":
            return
        self._connected.update(new)
        with memory_noted("communicators for messages"):
            if posting is ops.Posting.BATCHED:
                connect(self.up)
                connect(self.down)
            for sender, receiver in sorted(new):  # in one order on all ranks: each host waits here for its peer
                group = self.group(sender, receiver)
                if posting is ops.Posting.SINGLE and self.rank in (sender, receiver):
                    number = torch.zeros(1, device=this_device())
                    peer = torch.distributed.get_group_rank(group, self.ranks[receiver if self.rank == sender else sender])
                    (group.send if self.rank == sender else group.recv)([number], peer, 0).wait()

    def group(self, sender: int, receiver: int) -> Any:
        """For messages from one rank of the pipeline to another."""
        return self.up if sender < receiver else self.down


@dataclass
class _Sending:
    """A send that may not be over: its tensors stay alive until it is."""

    message: ops.Message
    peer: int
    requests: list[Any]
    tensors: Tensors
    when_sent: Callable[[], None]


@dataclass
class _Receiving:
    """A message whose buffers, or while their shapes are unknown those of the shapes, have been posted."""

    tensors: Tensors
    requests: list[Any]
    headers: list[torch.Tensor]


class Transport:
    """Posts sends and receives without blocking, and keeps their tensors until they are done. One iteration owns it.

    Where posting is batched nothing moves before ``start``, which must come before anything is waited for.

    Args:
        channels: the groups of this pipeline.
        shapes: of the tensors that one received message of each flow carries; with variable lengths, how many there are.
        dtype, device: of the tensors.
        posting: how what is started together is started.
    """

    def __init__(
        self,
        channels: Channels,
        shapes: Mapping[kinds.Flow, Sequence[Shape]],
        dtype: torch.dtype,
        device: torch.device,
        posting: ops.Posting = ops.Posting.SINGLE,
    ) -> None:
        self._channels = channels
        self._shapes = shapes
        self._dtype = dtype
        self._device = device
        self._batched = posting is ops.Posting.BATCHED
        self._polls = len(channels.ranks) > 1 and torch.distributed.get_backend(channels.up) == "nccl"
        # Of the pipeline's ranks in the groups.
        self._places = [torch.distributed.get_group_rank(channels.up, rank) for rank in channels.ranks] if channels.up else []
        self._posted: dict[ops.Message, _Receiving] = {}
        self._unshaped: deque[tuple[_Receiving, int]] = deque()  # and their peers, in the order of the program
        self._sends: dict[tuple[int, kinds.Flow], deque[_Sending]] = defaultdict(deque)
        self._unsent: dict[tuple[ops.Message, int], deque[_Sending]] = {}  # by message and receiver
        self._together: list[tuple[torch.distributed.P2POp, list[Any]]] = []  # operations to start, and where requests go

    def blank(self, flow: kinds.Flow) -> Tensors:
        """Tensors as a message of a flow carries them; of one element where shapes are not known before."""
        return [self._buffer(shape) for shape in self._shapes[flow]]

    def receive(self, message: ops.Message, peer: int) -> None:
        receiving = _Receiving([], [], [])
        self._posted[message] = receiving
        if self._channels.shapes is None:
            self._post_buffers(receiving, peer, self._shapes[message.flow])
            return
        for _ in self._shapes[message.flow]:
            header = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64)
            receiving.headers.append(header)
            receiving.requests.append(torch.distributed.irecv(header, self._channels.ranks[peer], group=self._channels.shapes))
        if receiving.headers:
            self._unshaped.append((receiving, peer))

    def wait(self, message: ops.Message) -> Tensors:
        """The tensors of a posted message, once they are here."""
        receiving = self._posted.pop(message)
        if receiving.headers:
            self._post_up_to(receiving)
            self.start()
        for request in receiving.requests:
            request.wait()
        return receiving.tensors

    def send(self, message: ops.Message, peer: int, tensors: Tensors, when_sent: Callable[[], None]) -> None:
        """Start sending; ``when_sent`` is called once the tensors may be freed."""
        self.keep_order()
        requests: list[Any] = []
        group = self._channels.group(self._channels.rank, peer)
        present = [tensor.contiguous() for tensor in tensors if tensor is not None]
        if self._channels.shapes is not None:
            for tensor in present:
                requests.append(torch.distributed.isend(_header(tensor), self._channels.ranks[peer], group=self._channels.shapes))
        for tensor in present:
            self._start(torch.distributed.isend, tensor, peer, group, requests)
        queue = self._sends[peer, message.flow]
        queue.append(_Sending(message, peer, requests, [*tensors, *present], when_sent))
        self._unsent[message, peer] = queue
        if len(queue) > ops.UNFINISHED_SENDS and not self._polls:
            self.start()
            self._finish_first(queue)

    def keep_order(self) -> None:
        """Before a message or a collective, which may wait for other ranks: on a GPU, post the buffers of what precedes it, also
        where that needs shapes that are on their way.

        Posted later, as its shape allows, a receive could stand behind what waits for its sender: on one hardware queue
        (CUDA_DEVICE_MAX_CONNECTIONS=1) for ever. The host waits here for the hosts of the senders, not for devices.
        """
        if self._polls and self._unshaped:
            self._post_up_to(self._unshaped[-1][0])

    def start(self) -> None:
        """Start what was posted since the last time, where posting is batched: where ``starts_posted`` says so."""
        if not self._together:
            return
        for group in {id(operation.group): operation.group for operation, _ in self._together}.values():
            mine = [(operation, requests) for operation, requests in self._together if operation.group is group]
            started = torch.distributed.batch_isend_irecv([operation for operation, _ in mine])
            for index, (_, requests) in enumerate(mine):
                # NCCL has one request for all of them, gloo one for each.
                requests.append(started[index if len(started) == len(mine) else 0])
        self._together.clear()

    def sweep(self) -> None:
        """Let go of what has been sent. Called between passes; never blocks."""
        if not self._polls:
            return
        for queue in self._sends.values():
            while queue and queue[0].requests and all(request.is_completed() for request in queue[0].requests):
                self._finish_first(queue)

    def finish(self, message: ops.Message, peer: int) -> None:
        """Wait until a message has been sent to a rank, if it is still on its way."""
        queue = self._unsent.get((message, peer))
        while queue and (message, peer) in self._unsent:
            self._finish_first(queue)

    def unsent(self) -> list[ops.Send]:
        """Every send that may not be over, in the order to ``finish`` them at the end of the iteration."""
        return [ops.Send(sending.message, peer) for (peer, _), queue in self._sends.items() for sending in queue]

    def _finish_first(self, queue: deque[_Sending]) -> None:
        first = queue.popleft()
        for request in first.requests:
            request.wait()
        first.when_sent()
        del self._unsent[first.message, first.peer]

    def _post_buffers(self, receiving: _Receiving, peer: int, shapes: Sequence[Shape]) -> None:
        group = self._channels.group(peer, self._channels.rank)
        for shape in shapes:
            buffer = self._buffer(shape)
            receiving.tensors.append(buffer)
            self._start(torch.distributed.irecv, buffer, peer, group, receiving.requests)

    def _buffer(self, shape: Shape) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=self._dtype, device=self._device, requires_grad=True)

    def _post_up_to(self, last: _Receiving) -> None:
        """Post the buffers of a message once its shapes are here, and before it those that the program receives before it."""
        while last.headers:
            receiving, peer = self._unshaped.popleft()
            for request in receiving.requests:
                request.wait()
            receiving.requests.clear()
            shapes = [header[1 : 1 + int(header[0])].tolist() for header in receiving.headers]
            receiving.headers.clear()
            self._post_buffers(receiving, peer, shapes)

    def _start(self, operation: Any, tensor: torch.Tensor, peer: int, group: Any, requests: list[Any]) -> None:
        """Start an operation, or keep it for ``start``; either way its request ends up in the list."""
        if self._batched:
            posted = torch.distributed.P2POp(operation, tensor.detach(), self._channels.ranks[peer], group)
            self._together.append((posted, requests))
        else:
            # What isend and irecv come to after checks that would take a fifth of the time that the host spends on a message.
            post = group.send if operation is torch.distributed.isend else group.recv
            requests.append(post([tensor.detach()], self._places[peer], 0))


def _header(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's shape, as it is sent before it: the number of dimensions, and these."""
    header = torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64)
    header[: 1 + tensor.dim()] = torch.tensor([tensor.dim(), *tensor.shape])
    return header
