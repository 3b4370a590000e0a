"""A process group that keeps the rules of torch's ProcessGroupNCCL, and moves its data over gloo.

The rules, from torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp as of torch 2.8 to 2.13 and the documentation of
torch.distributed; each has a test in ``test_nccl.py``, or a mutation in ``mutations.py`` that is reported by it alone:

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

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gpu_model.cuda import Stream, device
from gpu_model.memory import _frames, _place
from gpu_model.order import Clock, join
from gpu_model.trace import Create, Part, Post
from gpu_model.work import Line, Over, Work

dist: Any = torch.distributed  # whose groups have several signatures for most methods
BACKEND = "posed"
DEFAULT_TIMEOUT = timedelta(minutes=10)

Tensors = Sequence[torch.Tensor]


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
        self.options = _Options()
        self.communicators: dict[tuple[Any, ...], Stream] = {}
        self._lines: defaultdict[Stream, Line] = defaultdict(Line)  # of each communicator's work
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
        self.options._timeout = self.timeout
        return SimpleNamespace(options=self.options, supports_coalescing=True)

    # messages

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        return self._message(tensors, peer, sends=True)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Work:
        return self._message(tensors, peer, sends=False)

    def _message(self, tensors: Tensors, peer: int, sends: bool, batch: int | None = None) -> Work:
        """One of a batch, whose kernel was posted at a moment of the trace, or one by itself."""
        [tensor] = tensors
        alone = batch is None and not eager()
        what = "send" if sends else "recv"
        stream, made = self._stream((self._mine, peer) if alone else None)
        done = self._run(stream, [tensor] if sends else [], [] if sends else [tensor], what)
        moment = self.note(stream, made, [(what, peer)], alone=alone) if batch is None else batch
        device().memory.record(tensor, stream.name)
        with _disable_current_modes(), torch.no_grad():
            staged = tensor.detach().clone()
            # What is batched or not are other messages, although gloo has one queue for each pair.
            request = (self._gloo.send if sends else self._gloo.recv)([staged], peer, 1 if batch is None else 0)

        def move() -> None:
            if not sends:
                tensor.detach().copy_(staged)

        work = Work([], done, moment, move, self._lines[stream].put([request]))
        if not sends:
            device().waits.append(work.land_before)
            device().arriving.append((_storages([tensor]), work.land))
        return work

    def note(
        self, stream: Stream, made: bool, parts: Sequence[tuple[str, int | None]], alone: bool = False, asynchronous: bool = True
    ) -> int:
        """Put a kernel into the trace.

        Args:
            stream: that it runs on.
            made: its communicator is new.
            parts: what it does, with ranks of the group.
        """
        ranks = tuple(dist.get_process_group_ranks(self))
        named = tuple(Part(what, peer if peer is None else ranks[peer]) for what, peer in parts)
        post = Post(device().current.name, asynchronous, self.pg_name, ranks, ranks[self._mine], named, alone, _place())
        if made:
            device().trace.add(Create(*post.communicator(eager()), post.place))
        return device().trace.post(post, stream.name)

    # collectives

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce_coalesced(tensors, opts)

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
        moment = self.note(*self._stream(None), [("barrier", None)])
        with _disable_current_modes():
            over = Over([self._gloo.barrier()])
            over.run()
        work = Work([], {}, moment, lambda: None, over)
        work.wait()
        device().current.synchronize()
        return work

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
        whole, made = self._stream(None)
        stream = whole if asynchronous else one.current
        extra = [] if temporary is None else [temporary]
        done = self._run(stream, reads, [*extra, *writes], what)
        moment = self.note(stream, made, [(what, None)], asynchronous=asynchronous)
        tensors = list(reads if staged is None else staged)
        with _disable_current_modes(), torch.no_grad():
            copies = [tensor.detach().clone() for tensor in tensors]
            requests = start(self._gloo, copies)

        def move() -> None:
            for tensor, copy in zip(tensors, copies, strict=True):
                if any(tensor is each for each in writes):
                    tensor.detach().copy_(copy)

        kept = [*reads, *writes, *extra]
        del extra, temporary
        over = self._lines[whole].put(requests if isinstance(requests, list) else [requests])
        work = Work(kept if asynchronous else [], done, moment, move, over)
        device().arriving.append((_storages(writes), work.land))
        if not asynchronous:
            work.wait()
        if not tensors[0].is_cuda:  # of an object's bytes, which torch sends from the device, and reads there
            one.trace.host_waits(moment, _place())
        return work

    def _stream(self, pair: tuple[int, int] | None) -> tuple[Stream, bool]:
        """Of a communicator: a pair's, or the whole group's; and whether it is made now."""
        key: tuple[Any, ...] = tuple(sorted(pair)) if pair else ("all", *range(self._ranks))
        made = key not in self.communicators
        if made:
            name = f"nccl {_groups.index(self)}:{'-'.join(map(str, key))}"
            self.communicators[key] = Stream(priority=-self.high_priority, name=name)
        return self.communicators[key], made and not eager()

    def close(self) -> None:
        """End the threads."""
        for line in self._lines.values():
            line.close()

    def _run(self, stream: Stream, reads: Tensors, writes: Tensors, what: str) -> Clock:
        """The kernel, behind what the current stream has; returns an event behind it."""
        one = device()
        one.memory.sweep()
        self.posted_from.add(one.current.name)
        if stream != one.current:
            one.order.wait(stream.name, one.order.record(one.current.name))
        at = one.order.launch(stream.name)
        for tensor in reads:
            one.memory.use(tensor, at, what, write=False)
        for tensor in writes:
            one.memory.use(tensor, at, what, write=True)
        return one.order.record(stream.name)


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
            group.options = pg_options or group.options
        return group

    def destroy_process_group(group: Any = None) -> None:
        destroy(group)
        if group is None:
            for each in _groups:
                each.close()
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
    group: Group = operations[0].group or dist.group.WORLD
    moment = group.note(
        *group._stream(None), [("send" if one.op is dist.isend else "recv", one.group_peer) for one in operations]
    )
    works = [group._message([one.tensor], one.group_peer, one.op is dist.isend, moment) for one in operations]
    done: Clock = {}
    for work in works:
        join(done, work.done)

    def move() -> None:
        for work in works:
            work.land()

    last = works[-1]  # over once all before it are, which are on one communicator
    return [Work([], done, moment, move, last.over)]


class _Options:
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=0, min_ctas=0, cga_cluster_size=0, net_name=None)
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
