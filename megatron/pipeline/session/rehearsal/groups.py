"""Process groups of ranks that share a GPU.

NCCL refuses two ranks on one GPU, so messages and collectives go over gloo, and tensors of a GPU through host memory.
"""

# mypy: disable-error-code="override"
# What torch calls has fewer ways to be called than what it declares, and returns less than its Work.

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d

BACKEND = "rehearsal"

Tensors = Sequence[torch.Tensor]


def open_world(rank: int, ranks: int, timeout: timedelta) -> None:
    """Initialise torch.distributed; the environment is torchrun's."""
    distributed: Any = torch.distributed
    if BACKEND.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    distributed.init_process_group(BACKEND, rank=rank, world_size=ranks, timeout=timeout)


def _make(options: Any, _: Any) -> Any:
    """A group for torch."""
    gloo = distributed_c10d.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    return HostGroup(gloo, options.timeout)


class _GroupWork:
    """A collective under way.

    Args:
        works: gloo's.
        finish: brings what came to where it belongs; called once.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], None]) -> None:
        self._works, self._finish = works, finish

    def wait(self, *_: Any) -> bool:
        for work in self._works:
            work.wait()
        self._end()
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        self._end()
        return True

    def _end(self) -> None:
        self._finish()
        self._works, self._finish = (), lambda: None


class HostGroup(torch.distributed.ProcessGroup):  # type: ignore[misc]
    """A group over gloo for tensors of any device."""

    def __init__(self, gloo: Any, timeout: timedelta) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]  # it has another constructor
        self._gloo = gloo
        self.options = SimpleNamespace(_timeout=timeout)

    def getBackendName(self) -> str:  # torch's name
        return BACKEND

    def _get_backend(self, _: Any) -> HostGroup:
        return self

    def _set_sequence_number_for_group(self) -> None:
        pass

    # -- all to all ranks

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _GroupWork:
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> _GroupWork:
        """The sum, or what the options say."""
        held = list(map(_on_host, tensors))
        works = [self._gloo.allreduce([host], _reduction(opts)) for host in held]
        return _GroupWork(works, lambda: _back(held, tensors))

    def broadcast(self, tensors: Tensors, opts: Any) -> _GroupWork:
        held = list(map(_on_host, tensors))
        return _GroupWork([self._gloo.broadcast(held, opts)], lambda: _back(held, tensors))

    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> _GroupWork:
        [parts], [tensor] = outputs, tensors
        return self._gather([(parts, tensor)])

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _GroupWork:
        return self.all_gather_single_coalesced([output], [tensor])

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> _GroupWork:
        return self._gather(
            [(output.view(-1).chunk(self.size()), tensor.reshape(-1)) for output, tensor in zip(outputs, tensors, strict=True)]
        )

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> _GroupWork:
        return self._scatter([(output, torch.stack(list(parts))) for output, parts in zip(outputs, inputs, strict=True)], opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> _GroupWork:
        return self._scatter([(output, tensor)], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> _GroupWork:
        return self._scatter(list(zip(outputs, tensors, strict=True)), opts)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> _GroupWork:
        """Rows of the first dimension, cut evenly where no numbers are given."""
        sizes = [list(rows) or [len(whole) // self.size()] * self.size() for rows, whole in ((received, output), (sent, tensor))]
        return self.alltoall(output.split(sizes[0]), tensor.split(sizes[1]))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _GroupWork:
        host = torch.cat([_on_host(one).reshape(-1) for one in inputs])
        came = torch.cat([_blank(one).view(-1) for one in outputs])
        counts = [[one.numel() for one in whole] for whole in (outputs, inputs)]
        return _GroupWork([self._gloo.alltoall_base(came, host, *counts)], lambda: _fill(outputs, came.split(counts[0])))

    # as torch before 2.13 calls them
    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

    # -- messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> _GroupWork:
        held = [_on_host(tensor).contiguous() for tensor in tensors]
        return _GroupWork([self._gloo.send(held, peer, tag)], held.clear)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> _GroupWork:
        held = [tensor if tensor.device.type == "cpu" else _blank(tensor) for tensor in tensors]
        return _GroupWork([self._gloo.recv(held, peer, tag)], lambda: _back(held, tensors))

    def barrier(self, opts: Any = None) -> _GroupWork:
        return _GroupWork([self._gloo.barrier()], lambda: None)

    # -- how

    def _gather(self, gathered: Sequence[tuple[Tensors, torch.Tensor]]) -> _GroupWork:
        """Parts of all ranks from this rank's own."""
        held = [[_blank(own) for _ in parts] for parts, own in gathered]
        works = [
            self._gloo.allgather([came], [_on_host(own).contiguous()]) for came, (_, own) in zip(held, gathered, strict=True)
        ]
        targets = [part for parts, _ in gathered for part in parts]
        return _GroupWork(works, lambda: _fill(targets, [host for came in held for host in came]))

    def _scatter(self, scattered: Sequence[tuple[torch.Tensor, torch.Tensor]], opts: Any) -> _GroupWork:
        """This rank's part of the sum of all: output and input, which is as long as the outputs of all ranks."""
        held = [_on_host(whole.clone() if whole.device.type == "cpu" else whole) for _, whole in scattered]
        works = [self._gloo.allreduce([host], _reduction(opts)) for host in held]
        outputs = [output for output, _ in scattered]
        return _GroupWork(works, lambda: _fill(outputs, [host.reshape(-1).chunk(self.size())[self.rank()] for host in held]))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy in host memory, for which the host waits until the current stream has computed it."""
    return tensor.detach().to("cpu")


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _fill(targets: Tensors, parts: Tensors) -> None:
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view_as(target))


def _back(held: Tensors, tensors: Tensors) -> None:
    for host, tensor in zip(held, tensors, strict=True):
        if tensor.device.type != "cpu":
            tensor.detach().copy_(host)


def _reduction(opts: Any) -> Any:
    """Options with the operation alone: torch has a class for each collective."""
    options = distributed_c10d.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options
