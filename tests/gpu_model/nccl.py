"""A process group that keeps the rules of torch's ProcessGroupNCCL, and moves its data over gloo.

The rules, from torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp as of torch 2.8 to 2.13 and the documentation of
torch.distributed; each has a test in ``test_nccl.py``:

- A single send or receive runs on a communicator of its pair (``pointToPoint``: key of the two ranks), what is batched and every
  collective on that of the whole group. Each communicator has one stream, whose work runs in the order of posting.
- Work waits for what the current stream has been given before it was posted; the host waits for nothing.
- A collective that is not asynchronous runs on the current stream (since 2.8).
- An asynchronous one keeps its tensors, with those that it made itself, until the first ``wait()`` by whichever stream
  (``stashed_for_allocator_safety_``). Sends and receives record theirs on the stream instead (``recordStream``).
- ``wait()`` has the current stream wait, not the host. ``is_completed()`` asks the device.
- ``all_gather`` into a list, and ``reduce_scatter`` from one, go through a flat tensor of the current stream (``newLikeFlat``).
- A communicator is made when it is first used, and every rank's host waits there for all of its members; with ``device_id`` given
  to ``init_process_group`` (eager mode) also single messages use the whole group's.
- ``barrier()`` without a device takes the one that it knows, or guesses: rank modulo visible GPUs.
- A group has 10 minutes if no timeout is given, whatever the world has.

``device().synchronize`` waits for all that was posted, so a receive whose send comes later in program order is a deadlock: it
ends here, after a moment, with an error that says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpu_model.cuda import Stream, device
from gpu_model.memory import _frames, _place
from gpu_model.order import HOST, Clock

dist: Any = torch.distributed  # whose groups have several signatures for most methods
BACKEND = "posed"
DEFAULT_TIMEOUT = timedelta(minutes=10)
_STUCK = 8.0  # seconds after which a synchronize that waits for a message counts as a deadlock

Tensors = Sequence[torch.Tensor]


class Work:
    """One operation under way.

    Args:
        kept: tensors that stay alive until the first wait.
        done: an event behind it.
        move: waits for gloo, and puts what arrived where it belongs.
        arrived: asks gloo.
    """

    def __init__(self, kept: list[Any], done: Clock, move: Callable[[], None], arrived: Callable[[], bool]) -> None:
        self._kept, self._done, self._move, self._arrived = kept, done, move, arrived
        self._moved = False
        self.posted = _place()

    def wait(self, timeout: Any = None) -> bool:
        self.land()
        device().memory.sweep()
        device().order.wait(device().current.name, self._done)
        self._kept.clear()
        device().memory.sweep()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        if not self._moved and self._arrived():
            self.land()
        if self._moved:
            device().order.wait(HOST, self._done)
        return self._moved

    is_success = is_completed

    def land(self) -> None:
        """Have the data where they belong, as they are for whoever waits by a stream."""
        if not self._moved:
            self._moved = True
            device().arriving[:] = [one for one in device().arriving if one[1] != self.land]
            with _disable_current_modes(), torch.no_grad():
                self._move()
            if self.land_before in device().waits:
                device().waits.remove(self.land_before)

    def land_before(self) -> None:
        """For ``torch.cuda.synchronize``, which waits for all that was posted."""
        deadline = time.monotonic() + _STUCK
        while not self._arrived():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"DEADLOCK: torch.cuda.synchronize() ({_place()}) waits for a message posted at {self.posted}, whose sender "
                    "waits for what comes after the synchronize"
                )
            time.sleep(0.001)
        self.land()


class Group(dist.ProcessGroup):  # type: ignore[misc]
    """NCCL's rules for one group of ranks.

    Attributes:
        timeout: of its operations.
        communicators: their streams, by the ranks in them, in the order in which they were made.
        places: files of the product from which the group was made.
        posted_from: streams that were current when work was posted.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._mine, self._ranks = rank, size
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        self.timeout = timeout
        self.high_priority = False
        self.max_ctas = 0
        self.communicators: dict[tuple[Any, ...], Stream] = {}
        self.places = _places()
        self.posted_from: set[str] = set()
        _groups.append(self)

    def getBackendName(self) -> str:  # torch's name
        return BACKEND

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    group_name = pg_name

    def _get_backend(self, _: Any) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=self.timeout), supports_coalescing=True)

    # messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        return self._message(tensors, peer, sends=True, together=False)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        return self._message(tensors, peer, sends=False, together=False)

    def _message(self, tensors: Tensors, peer: int, sends: bool, together: bool) -> Work:
        [tensor] = tensors
        stream = self._stream(None if together or eager() else (self._mine, peer))
        done = self._run(stream, [tensor] if sends else [], [] if sends else [tensor], "send" if sends else "recv")
        device().memory.record(tensor, stream.name)
        with _disable_current_modes(), torch.no_grad():
            staged = tensor.detach().clone()
            request = (self._gloo.send if sends else self._gloo.recv)([staged], peer, 0)
        polled = _Polled(request)

        def move() -> None:
            polled.wait()
            if not sends:
                tensor.detach().copy_(staged)

        work = Work([], done, move, polled.over)
        if not sends:
            device().waits.append(work.land_before)
            device().arriving.append((_storages([tensor]), work.land))
        return work

    # collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._collective("all_reduce", tensors, tensors, opts, lambda g, staged: g.allreduce(staged, _reduction(opts)))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        def start(gloo: Any, staged: list[torch.Tensor]) -> Any:
            return [gloo.allreduce([one], _reduction(opts)) for one in staged]

        return self._collective("all_reduce", tensors, tensors, opts, start)

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        ours = dist.BroadcastOptions()
        ours.rootRank, ours.rootTensor = opts.rootRank, 0
        reads, writes = (tensors, []) if opts.rootRank == self._mine else ([], tensors)
        return self._collective("broadcast", reads, writes, opts, lambda g, staged: g.broadcast(staged, ours), staged=tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        ours = dist.ReduceOptions()
        ours.reduceOp, ours.rootRank, ours.rootTensor = opts.reduceOp, opts.rootRank, 0
        writes = tensors if opts.rootRank == self._mine else []
        return self._collective("reduce", tensors, writes, opts, lambda g, staged: g.reduce(staged, ours))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        def start(gloo: Any, staged: list[torch.Tensor]) -> Any:
            half = len(staged) // 2
            return [
                gloo.allgather([list(whole.view(self._ranks, -1).unbind())], [part.reshape(-1)])
                for part, whole in zip(staged[:half], staged[half:], strict=True)
            ]

        return self._collective("all_gather", tensors, outputs, opts, start, staged=[*tensors, *outputs])

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Sequence[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        [parts], [tensor] = outputs, tensors
        flat = torch.empty((len(parts), *tensor.shape), dtype=tensor.dtype, device=tensor.device)

        def start(gloo: Any, staged: list[torch.Tensor]) -> Any:
            return gloo.allgather([staged[1:]], [staged[0]])

        return self._collective("all_gather", [tensor], parts, opts, start, staged=[tensor, *parts], temporary=flat)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        def start(gloo: Any, staged: list[torch.Tensor]) -> Any:
            half = len(staged) // 2
            base = getattr(gloo, "_reduce_scatter_base", None) or gloo.reduce_scatter_single
            ours = dist.ReduceScatterOptions()
            ours.reduceOp = opts.reduceOp
            return [base(part, whole, ours) for whole, part in zip(staged[:half], staged[half:], strict=True)]

        return self._collective("reduce_scatter", tensors, outputs, opts, start, staged=[*tensors, *outputs])

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> Work:
        def start(gloo: Any, staged: list[torch.Tensor]) -> Any:
            base = getattr(gloo, "alltoall_base", None) or gloo.all_to_all_single
            return base(staged[1], staged[0], out_sizes, in_sizes)

        return self._collective("all_to_all", [tensor], [output], opts, start, staged=[tensor, output])

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> Work:
        guessed = opts is None or (not opts.device_ids and opts.device in (None, torch.device("cpu")))
        barriers.append((_place(), not guessed))
        with _disable_current_modes():
            self._gloo.barrier().wait()
        device().synchronize()
        return Work([], {}, lambda: None, lambda: True)

    def _collective(
        self,
        what: str,
        reads: Tensors,
        writes: Tensors,
        opts: Any,
        start: Callable[[Any, list[torch.Tensor]], Any],
        staged: Tensors | None = None,
        temporary: torch.Tensor | None = None,
    ) -> Work:
        """Post a collective: gloo works on copies, which are written back when somebody waits."""
        one, asynchronous = device(), getattr(opts, "asyncOp", True)
        whole = self._stream(None)
        stream = whole if asynchronous else one.current
        extra = [] if temporary is None else [temporary]
        done = self._run(stream, reads, [*extra, *writes], what)
        tensors = list(reads if staged is None else staged)
        with _disable_current_modes(), torch.no_grad():
            copies = [tensor.detach().clone() for tensor in tensors]
            requests = start(self._gloo, copies)
        polled = _Polled(*(requests if isinstance(requests, list) else [requests]))

        def move() -> None:
            polled.wait()
            for tensor, copy in zip(tensors, copies, strict=True):
                if any(tensor is each for each in writes):
                    tensor.detach().copy_(copy)

        kept = [*reads, *writes, *extra]
        del extra, temporary
        work = Work(kept if asynchronous else [], done, move, polled.over)
        device().arriving.append((_storages(writes), work.land))
        if not asynchronous:
            work.wait()
        return work

    def _stream(self, pair: tuple[int, int] | None) -> Stream:
        """Of a communicator: a pair's, or the whole group's."""
        key: tuple[Any, ...] = tuple(sorted(pair)) if pair else ("all", *range(self._ranks))
        if key not in self.communicators:
            name = f"nccl {_groups.index(self)}:{'-'.join(map(str, key))}"
            self.communicators[key] = Stream(priority=-self.high_priority, name=name)
        return self.communicators[key]

    def _run(self, stream: Stream, reads: Tensors, writes: Tensors, what: str) -> Clock:
        """The kernel, behind what the current stream has; returns an event behind it."""
        one = device()
        one.memory.sweep()
        self.posted_from.add(one.current.name)
        if stream != one.current:
            one.order.wait(stream.name, one.order.record(one.current.name))
        at = one.launch(stream)
        for tensor in reads:
            one.memory.use(tensor, at, what, write=False)
        for tensor in writes:
            one.memory.use(tensor, at, what, write=True)
        return one.order.record(stream.name)


class _Polled:
    """Requests of gloo, which are waited for once."""

    def __init__(self, *requests: Any) -> None:
        self._requests = [request for request in requests if request is not None]

    def over(self) -> bool:
        return all(request.is_completed() for request in self._requests)

    def wait(self) -> None:
        for request in self._requests:
            request.wait()


_groups: list[Group] = []
barriers: list[tuple[str, bool]] = []  # place of every barrier, and whether it said which device it means
_bound: list[bool] = [False]


def eager() -> bool:
    """Whether ``init_process_group`` was given a device."""
    return _bound[0]


def groups() -> list[Group]:
    """All that were made in this process."""
    return _groups


def install() -> None:
    """Have ``torch.distributed`` make these groups where it is asked for NCCL's."""
    dist.Backend.register_backend(BACKEND, Group, devices=["cpu", "cuda"])
    new_group, initialize, backend = dist.new_group, dist.init_process_group, dist.get_backend
    destroy = dist.destroy_process_group
    dist.ProcessGroupNCCL = SimpleNamespace(Options=_Options)  # type: ignore[assignment, misc]

    def init_process_group(name: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        _groups.clear()
        _bound[0] = device_id is not None
        name = kwargs.pop("backend", name)
        initialize(BACKEND if name in (None, "nccl") else name, *args, **kwargs)

    def make_group(*args: Any, backend: str | None = None, pg_options: Any = None, timeout: Any = None, **kwargs: Any) -> Any:
        if backend not in (None, "nccl"):
            return new_group(*args, backend=backend, timeout=timeout, **kwargs)
        group = new_group(*args, backend=BACKEND, timeout=timeout or DEFAULT_TIMEOUT, **kwargs)
        if isinstance(group, Group):
            group.high_priority = bool(pg_options and pg_options.is_high_priority_stream)
            group.max_ctas = pg_options.config.max_ctas if pg_options else 0
        return group

    def destroy_process_group(group: Any = None) -> None:
        destroy(group)
        if group is None:
            _groups.clear()  # gloo's threads wake up a hundred times a second for as long as a group lives
            device().waits.clear()
            device().arriving.clear()

    def get_backend(group: Any = None) -> str:
        found = backend(group)
        return "nccl" if found == BACKEND else found

    for place in (dist, dist.distributed_c10d):
        place.new_group, place.init_process_group, place.get_backend = make_group, init_process_group, get_backend
        place.destroy_process_group, place.batch_isend_irecv = destroy_process_group, batch_isend_irecv
    dist.distributed_c10d._get_object_coll_device = lambda group=None: "cpu"


def batch_isend_irecv(operations: list[Any]) -> list[Work]:
    """On the communicator of the whole group; one work for all."""
    if not isinstance(operations[0].group or dist.group.WORLD, Group):
        return [one.op(one.tensor, one.peer, one.group, one.tag) for one in operations]
    works = [
        (one.group or dist.group.WORLD)._message([one.tensor], one.group_peer, one.op is dist.isend, together=True)
        for one in operations
    ]
    done: Clock = {}
    for work in works:
        for timeline, count in work._done.items():
            done[timeline] = max(count, done.get(timeline, 0))

    def move() -> None:
        for work in works:
            work.land()

    return [Work([], done, move, lambda: all(work.is_completed() for work in works))]


class _Options:
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=0, min_ctas=0, cga_cluster_size=0)
        self._timeout = DEFAULT_TIMEOUT


def _places() -> set[str]:
    """Files of the product that are on the stack."""
    return {name.rpartition("/megatron/pipeline/")[2] for name, _ in _frames() if "/megatron/pipeline/" in name}


def _storages(tensors: Tensors) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _reduction(opts: Any) -> Any:
    ours = dist.AllreduceOptions()
    if opts is not None:
        ours.reduceOp = opts.reduceOp
    return ours
