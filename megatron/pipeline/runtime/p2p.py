"""This rank's end of the messages between stages, over megatron-core's own p2p communicator and groups."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.pipeline.schedule.program import Flow, Message, Send

Tensors = list[torch.Tensor | None]
Shape = Sequence[int]

# gloo cannot say whether a send has completed, only wait for it. Waiting for the last but one holds few tensors and,
# since programs cannot deadlock even if every send blocked, is always safe.
_UNFINISHED_SENDS = 2


@dataclass
class _Sending:
    """A send that may not be over: its tensors stay alive until it is."""

    message: Message
    requests: list[Any]
    tensors: Tensors
    when_sent: Callable[[], None]

    def finish(self) -> None:
        for request in self.requests:
            request.wait()
        self.when_sent()


class Links:
    """Posts sends and receives without blocking, and keeps their tensors until they are done. One iteration owns it.

    Args:
        communicator: upstream's, for the pipeline group; its settings are left as they are, batching is switched off in a
            copy because only unbatched operations can be waited for one by one.
        shapes: of the tensors that one received message of each flow carries.
    """

    def __init__(self, communicator: P2PCommunicator, shapes: Mapping[Flow, Sequence[Shape]]) -> None:
        self._communicator = copy.copy(communicator)
        self._communicator.config = copy.copy(communicator.config)
        self._communicator.config.batch_p2p_comm = False
        self._communicator.config.use_ring_exchange_p2p = False
        self._shapes = shapes
        self._rank = communicator.pp_group.rank()
        self._ranks = communicator.pp_group.size()
        self._polls = torch.distributed.get_backend(communicator.pp_group) != "gloo"
        self._posted: dict[Message, tuple[Tensors, list[Any]]] = {}
        self._sends: dict[tuple[int, Flow], deque[_Sending]] = defaultdict(deque)

    def receive(self, message: Message, peer: int) -> None:
        """Post the buffers of a message."""
        to_next = self._is_next(peer)
        tensors: Tensors = []
        requests: list[Any] = []
        for shape in self._shapes[message.flow]:
            from_previous, from_next, pending = self._communicate(shape, receive_next=to_next, receive_previous=not to_next)
            tensors.append(from_next if to_next else from_previous)
            requests += pending.values()
        self._posted[message] = tensors, requests

    def wait(self, message: Message) -> Tensors:
        """The tensors of a posted message, once they are here."""
        tensors, requests = self._posted.pop(message)
        for request in requests:
            request.wait()
        return tensors

    def send(self, message: Message, peer: int, tensors: Tensors, when_sent: Callable[[], None]) -> None:
        """Start sending; ``when_sent`` is called once the tensors may be freed."""
        to_next = self._is_next(peer)
        requests: list[Any] = []
        for tensor in tensors:
            if tensor is not None:
                _, _, pending = self._communicate(
                    tensor.shape, send_next=tensor if to_next else None, send_previous=None if to_next else tensor
                )
                requests += pending.values()
        queue = self._sends[peer, message.flow]
        queue.append(_Sending(message, requests, tensors, when_sent))
        while len(queue) > _UNFINISHED_SENDS and not self._polls:
            queue.popleft().finish()

    def sweep(self) -> None:
        """Let go of what has been sent. Called between passes; never blocks."""
        if not self._polls:
            return
        for queue in self._sends.values():
            while queue and all(request.is_completed() for request in queue[0].requests):
                queue.popleft().finish()

    def finish(self, message: Message) -> None:
        """Wait until a message has been sent, if it is still on its way."""
        for queue in self._sends.values():
            if any(sending.message == message for sending in queue):
                while queue[0].message != message:
                    queue.popleft().finish()
                queue.popleft().finish()

    def unsent(self) -> list[Send]:
        """Every send that may not be over, in the order to ``finish`` them at the end of the iteration."""
        return [Send(sending.message, peer) for (peer, _), queue in self._sends.items() for sending in queue]

    def _is_next(self, peer: int) -> bool:
        """megatron-core's communicator knows the neighbours of a ring only."""
        if peer == (self._rank + 1) % self._ranks:
            return True
        if peer == (self._rank - 1) % self._ranks:
            return False
        raise ValueError(
            f"pipeline rank {self._rank} would exchange tensors with rank {peer}, but megatron-core's p2p reaches neighbours "
            f"only ({(self._rank - 1) % self._ranks} and {(self._rank + 1) % self._ranks}): choose a placement whose "
            "consecutive stages are on the same or on neighbouring ranks"
        )

    def _communicate(
        self,
        shape: Shape,
        send_next: torch.Tensor | None = None,
        send_previous: torch.Tensor | None = None,
        receive_next: bool = False,
        receive_previous: bool = False,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Any]]:
        return self._communicator._communicate(
            tensor_send_next=send_next,
            tensor_send_prev=send_previous,
            recv_prev=receive_previous,
            recv_next=receive_next,
            tensor_shape=shape,
            wait_on_reqs=False,
        )
