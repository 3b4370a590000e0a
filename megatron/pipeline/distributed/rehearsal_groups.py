"""Process groups of a rehearsal: through host memory where ranks share a GPU, and with ranks that are not there.

NCCL refuses two ranks on one GPU, so messages and collectives go over gloo, and tensors of a GPU through host memory.

A rehearsal may have one rank of every pipeline stage alone (``--rehearse-replicas fake``). The world is then that of the whole
training, with its numbers of ranks; the first rank of a stage is present, and **stands in** for the others of the stage: what an
absent rank would send is what its stand-in sends, and is not added up. A group of which one member is present computes and
sends nothing: tensors keep their shapes and their places, and numbers mean nothing. What its collectives would take can be waited
for: ``HostGroup.price``.
"""

# mypy: disable-error-code="override"
# What torch calls has fewer ways to be called than what it declares, and returns less than its Work.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import distributed_c10d

from megatron.pipeline.distributed.device import side_stream, this_device

BACKEND = "rehearsal"
_SPIN = 2e-4  # seconds before the end of a wait that are not slept, since a sleep is late by some of them

Tensors = Sequence[torch.Tensor]
Price = Callable[[str, float, int], float]  # from "all_reduce", ..., bytes, and ranks to seconds


class _World:
    """Facts that the groups need when they are made: torch tells a backend no more than its members."""

    ranks_of_stage = 1


def open_world(rank: int, ranks: int, timeout: timedelta, ranks_of_stage: int = 1) -> None:
    """Initialise torch.distributed; the environment is torchrun's.

    Args:
        rank, ranks: of the processes that are there.
        ranks_of_stage: of a training, neighbours by number, of which one is there: the world has as many times more ranks.
    """
    distributed: Any = torch.distributed
    if BACKEND.upper() not in distributed.Backend._plugins:
        distributed.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    _World.ranks_of_stage = ranks_of_stage
    store, _, _ = next(distributed.rendezvous("env://", rank, ranks, timeout=timeout))
    store.set_timeout(timeout)
    store = distributed.PrefixStore("rehearsal", store)
    distributed.init_process_group(
        BACKEND, store=store, rank=rank * ranks_of_stage, world_size=ranks * ranks_of_stage, timeout=timeout
    )


def stand_in(rank: int) -> int:
    """The global rank that is present and does what a rank does: itself where all are present."""
    rehearses = torch.distributed.is_initialized() and torch.distributed.get_backend() == BACKEND
    return rank - rank % _World.ranks_of_stage if rehearses else rank


def is_last_present(group: torch.distributed.ProcessGroup) -> bool:
    """Tell whether this rank is the last of a group, of those that are there."""
    return all(stand_in(rank) != rank for rank in torch.distributed.get_process_group_ranks(group)[group.rank() + 1 :])


def _make(options: Any, _: Any) -> Any:
    """A group for torch: gloo's own where that has all that is needed."""
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    acting = [rank - rank % _World.ranks_of_stage for rank in members]
    present = [rank for rank, stand in zip(members, acting, strict=True) if rank == stand]
    gloo = None
    if len(present) > 1:
        place = present.index(members[options.group_rank])
        gloo = distributed_c10d.ProcessGroupGloo(options.store, place, len(present), timeout=options.timeout)
    if gloo is not None and present == members and not torch.cuda.is_available():
        return gloo
    return HostGroup(options.group_rank, options.group_size, options.timeout, gloo, [present.index(rank) for rank in acting])


class _GroupWork:
    """A collective under way.

    Args:
        works: gloo's; none if no other rank takes part: then it ends at once.
        finish: brings what came to where it belongs; called once.
        delay: has passed when the collective would be over.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], None], delay: _GroupDelay) -> None:
        self._works, self._finish, self._delay = works, finish, delay
        if not works:
            self._end()

    def wait(self, *_: Any) -> bool:
        for work in self._works:
            work.wait()
        self._end()
        self._delay.wait()
        return True

    def is_completed(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        self._end()
        return self._delay.is_over()

    def _end(self) -> None:
        self._finish()
        self._works, self._finish = (), lambda: None


class HostGroup(torch.distributed.ProcessGroup):  # type: ignore[misc]
    """A group over gloo for tensors of any device, of which some ranks may be absent.

    Args:
        rank, size: of the group, absent ranks included.
        gloo: between the present ranks; None for one alone.
        acting: for every member the place of its stand-in among the present.

    Attributes:
        price: of a collective, which then takes that long; None for no time but its own.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta, gloo: Any, acting: Sequence[int]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # it has another constructor
        self._gloo, self._acting = gloo, acting
        self._here = acting[rank]
        self.options = SimpleNamespace(_timeout=timeout)
        self.price: Price | None = None
        self._free_at = 0.0

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
        """The sum (or what the options say) over the present ranks."""
        held = [_on_host(tensor) for tensor in tensors]
        works = [self._gloo.allreduce([host], _reduction(opts)) for host in held] if self._gloo else []
        return self._work(works, lambda: _back(held, tensors), "all_reduce", sum(map(_bytes, tensors)))

    def broadcast(self, tensors: Tensors, opts: Any) -> _GroupWork:
        held = [_on_host(tensor) for tensor in tensors]
        works = []
        if self._gloo:
            options = distributed_c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = self._acting[opts.rootRank], opts.rootTensor
            works = [self._gloo.broadcast(held, options)]
        return self._work(works, lambda: _back(held, tensors), "broadcast", sum(map(_bytes, tensors)))

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
        """Rows of the first dimension, cut evenly where no numbers are given; an absent rank sends what this one keeps."""
        sizes = [list(rows) or [len(whole) // self.size()] * self.size() for rows, whole in ((received, output), (sent, tensor))]
        return self.alltoall(output.split(sizes[0]), tensor.split(sizes[1]))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _GroupWork:
        size = sum(map(_bytes, inputs))
        if not self._gloo:
            own = inputs[self.rank()]
            for output in outputs:
                if output is not own:
                    rows = min(len(output), len(own))
                    output[:rows].copy_(own[:rows])
                    output[rows:].zero_()  # or what was in memory becomes gradients, which may be infinite
            return self._work([], lambda: None, "all_to_all", size)
        assert len(set(self._acting)) == self.size(), "ranks of several stages, some of them absent, exchange no tokens"
        host = torch.cat([_on_host(one).reshape(-1) for one in inputs])
        came = torch.cat([_blank(one).view(-1) for one in outputs])
        counts = [[one.numel() for one in whole] for whole in (outputs, inputs)]
        work = self._gloo.alltoall_base(came, host, *counts)

        def finish() -> None:
            for output, part in zip(outputs, came.split(counts[0]), strict=True):
                output.copy_(part.view_as(output))

        return self._work([work], finish, "all_to_all", size)

    # as torch before 2.13 calls them
    _allgather_base: Any = all_gather_single
    allgather_into_tensor_coalesced: Any = all_gather_single_coalesced
    _reduce_scatter_base: Any = reduce_scatter_single
    reduce_scatter_tensor_coalesced: Any = reduce_scatter_single_coalesced
    alltoall_base: Any = all_to_all_single

    # -- messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> _GroupWork:
        held = [_on_host(tensor).contiguous() for tensor in tensors]
        works = [self._gloo.send(held, self._acting[peer], tag)] if self._answers(peer) else []
        return self._work(works, held.clear, "message", sum(map(_bytes, tensors)))

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> _GroupWork:
        if not self._answers(peer):
            for tensor in tensors:
                tensor.detach().zero_()
            return self._work([], lambda: None, "message", sum(map(_bytes, tensors)))
        held = [tensor if tensor.device.type == "cpu" else _blank(tensor) for tensor in tensors]
        return self._work([self._gloo.recv(held, self._acting[peer], tag)], lambda: _back(held, tensors), "message", 0)

    def barrier(self, opts: Any = None) -> _GroupWork:
        return self._work([self._gloo.barrier()] if self._gloo else [], lambda: None, "barrier", 0)

    # -- how

    def _answers(self, peer: int) -> bool:
        """Tell whether a member is another rank that is there."""
        return self._gloo is not None and self._acting[peer] != self._here and self._acting.index(self._acting[peer]) == peer

    def _gather(self, gathered: Sequence[tuple[Tensors, torch.Tensor]]) -> _GroupWork:
        """Parts of all ranks from this rank's own; those of absent ranks stay as they were where they are gathered in place."""
        size = float(sum(_bytes(part) for parts, _ in gathered for part in parts))
        if not self._gloo:
            for parts, own in gathered:
                if own.untyped_storage().data_ptr() != parts[self.rank()].untyped_storage().data_ptr():
                    for part in parts:
                        part.copy_(own.view_as(part))
            return self._work([], lambda: None, "all_gather", size)
        held = [([_blank(own) for _ in range(self._gloo.size())], own) for _, own in gathered]
        works = [self._gloo.allgather([came], [_on_host(own).contiguous()]) for came, own in held]

        def finish() -> None:
            for (parts, _), (came, _) in zip(gathered, held, strict=True):
                for part, place in zip(parts, self._acting, strict=True):
                    part.copy_(came[place].view_as(part))

        return self._work(works, finish, "all_gather", size)

    def _scatter(self, scattered: Sequence[tuple[torch.Tensor, torch.Tensor]], opts: Any) -> _GroupWork:
        """This rank's part of the sum of all: output and input, which is as long as the outputs of all ranks."""
        held = [_on_host(whole.clone() if whole.device.type == "cpu" and self._gloo else whole) for _, whole in scattered]
        works = [self._gloo.allreduce([host], _reduction(opts)) for host in held] if self._gloo else []

        def finish() -> None:
            for (output, _), host in zip(scattered, held, strict=True):
                output.copy_(host.reshape(-1).chunk(self.size())[self.rank()].view_as(output))

        return self._work(works, finish, "reduce_scatter", sum(_bytes(whole) for _, whole in scattered))

    def _work(self, works: Sequence[Any], finish: Callable[[], None], what: str, size: float) -> _GroupWork:
        seconds = self.price(what, size, self.size()) if self.price else 0.0
        return _GroupWork(works, finish, self._delay(seconds))

    def _delay(self, seconds: float) -> _GroupDelay:
        """Collectives of a group run one after another."""
        if not seconds:
            return _GroupDelay(0.0)
        if torch.cuda.is_available():
            return _DeviceDelay(seconds, f"absent ranks of {id(self)}")
        self._free_at = max(self._free_at, time.perf_counter()) + seconds
        return _GroupDelay(self._free_at)


class _GroupDelay:
    """Until a moment of ``time.perf_counter``."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def wait(self) -> None:
        while (left := self._moment - time.perf_counter()) > 0:
            if left > _SPIN:
                time.sleep(left - _SPIN)

    def is_over(self) -> bool:
        return time.perf_counter() >= self._moment


class _DeviceDelay(_GroupDelay):
    """Seconds in which a stream of the GPU, which the current one waits for, does nothing: from when that comes here."""

    def __init__(self, seconds: float, stream: str) -> None:
        device = this_device()
        before = torch.cuda.current_stream()
        with side_stream(device, stream):
            torch.cuda.current_stream().wait_stream(before)
            torch.cuda._sleep(int(seconds * _cycles_per_second(device)))
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)

    def is_over(self) -> bool:
        return bool(self._event.query())


@cache
def _cycles_per_second(device: torch.device) -> float:
    """Measured frequency of the clock that ``torch.cuda._sleep`` counts."""
    cycles = 20_000_000
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(cycles)
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return 1e3 * cycles / float(start.elapsed_time(end))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy in host memory, for which the host waits until the current stream has computed it."""
    return tensor.detach().to("cpu")


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _back(held: Tensors, tensors: Tensors) -> None:
    for host, tensor in zip(held, tensors, strict=True):
        if tensor.device.type != "cpu":
            tensor.detach().copy_(host)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _reduction(opts: Any) -> Any:
    """Options with the operation alone: torch has a class for each collective."""
    options = distributed_c10d.AllreduceOptions()
    if opts is not None:
        options.reduceOp = opts.reduceOp
    return options
