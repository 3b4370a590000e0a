"""Every batch planned: an order of passes for the lengths of its microbatches, made while the batch before it trains.

    install("zb-auto", every_batch=EveryBatch(attention=0.1))

At its start an iteration knows the lengths of the next one's microbatches: its iterator is read two batches ahead, or the loop
has announced them. One rank plans for all that run passes in the same order. A small collective brings it the lengths, and tells
all whether the plan of the batch that begins is there: if so they get it, else they run the order for equal microbatches.
Nothing waits for a plan.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import rerun_state_machine

from megatron.pipeline.combinations import table
from megatron.pipeline.combinations.needs import EVERY_BATCH
from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.planning.aside import PlannedBatch, PlanningProcess
from megatron.pipeline.planning.plan_cache import PlanCache
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.planning.request import Request
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.loads import Extent, loads_of
from megatron.pipeline.schedule.lower.posting import Posting

_LOG = logging.getLogger(__name__)


def lengths_of(item: Any) -> Sequence[int]:
    """Lengths of the sequences of a microbatch, in tokens: between ``cu_seqlens``, where it has them, else of its ``tokens``.

    Where documents begin within a sequence does not count (``position_ids``): attention with a mask runs over all of it.

    Args:
        item: a dict as Megatron-LM's data sets give it, or tokens [b, s, ..], or a tuple or list that begins with them.

    Raises:
        ValueError: it is something else.
    """
    tokens: Any = item[0] if isinstance(item, (tuple, list)) and item else item
    if isinstance(item, Mapping):
        if (bounds := item.get("cu_seqlens")) is not None:
            return [end - begin for begin, end in pairwise(bounds.flatten().tolist()) if end > begin]
        tokens = item.get("tokens")
    shape: Sequence[int] = getattr(tokens, "shape", ())
    if len(shape) < 2:
        raise ValueError(
            f"a plan for every batch needs lengths, and a microbatch of {type(item).__name__} has neither cu_seqlens nor tokens "
            "[b, s]: give a function that says them, EveryBatch(lengths_of=...)"
        )
    return [int(shape[1])] * int(shape[0])


@dataclass(frozen=True)
class EveryBatch:
    """Settings of plans for every batch.

    Attributes:
        attention, tokens: see ``planning.loads_of``.
        order: "given" keeps the microbatches in the loop's order, and so the bits of their gradients' sums; with "any" they
            change places too.
        lengths_of: from an item of the data iterator, which is a microbatch, to the lengths of its sequences.
        interval: iterations from one line in the log to the next.
        say: writes it, on the last rank of the world.

    Raises:
        ValueError: a number is out of range, or there is no such order.
    """

    attention: float = 0.0
    tokens: float | None = None
    order: Literal["given", "any"] = "given"
    lengths_of: Callable[[Any], Sequence[int]] = lengths_of
    interval: int = 100
    say: Callable[[str], object] = _LOG.info

    def __post_init__(self) -> None:
        allowed = {
            "attention": (0 <= self.attention <= 1, "a share from 0 to 1"),
            "tokens": (self.tokens is None or 0 < self.tokens < float("inf"), "a number above 0, or None"),
            "order": (self.order in ("given", "any"), "'given' or 'any'"),
            "interval": (self.interval >= 1, "iterations, at least 1"),
        }
        for name, (fits, values) in allowed.items():
            if not fits:
                raise ValueError(f"EveryBatch({name}={getattr(self, name)!r}): give {values}")


class ReadAhead:
    """An iterator that knows the sizes of items that have yet to be read; who reads one has one more read ahead."""

    def __init__(self, items: Iterator[Any], size: Callable[[Any], Extent]) -> None:
        self._items, self._size = items, size
        self._read: deque[Any] = deque()
        self._sizes: deque[Extent] = deque()  # of the first of these

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._read:
            return next(self._items)
        item = self._read.popleft()
        if self._sizes:
            self._sizes.popleft()
        self._fill(len(self._read) + 1)
        return item

    def sizes(self, count: int) -> tuple[Extent, ...]:
        """Sizes of the next items; fewer where the iterator ends. All that is wrong with a size is raised here."""
        self._fill(count)
        for item in islice(self._read, len(self._sizes), count):
            try:
                self._sizes.append(self._size(item))
            except Exception as error:
                raise ValueError(f"a batch cannot be planned for its lengths: {type(error).__name__}: {error}") from error
        return tuple(islice(self._sizes, count))

    @property
    def holds(self) -> bool:
        """Tell whether it has read what has yet to be taken."""
        return bool(self._read)

    def _fill(self, count: int) -> None:
        with suppress(StopIteration):  # upstream's have no __iter__
            while len(self._read) < count:
                self._read.append(next(self._items))


class _Pending(NamedTuple):
    """A batch that is being planned."""

    sizes: tuple[Extent, ...]
    plan: Future[bytes]


class BatchPlans:
    """Plans of the batches of one pipeline.

    Args:
        plans: for equal microbatches, whose order a batch has where its own is not there.

    Attributes:
        counts: of iterations: ``planned``; ``late``, whose plan came too late, or was for data that an evaluation has read;
            ``unknown``, whose lengths were not known one iteration before; ``without``, for which there is none.
    """

    def __init__(self, settings: EveryBatch, plans: PlanCache, posting: Posting) -> None:
        self._settings, self._plans, self._posting = settings, plans, posting
        self._process = PlanningProcess()
        self._pending: deque[_Pending] = deque()
        self._readers: dict[int, ReadAhead] = {}  # by the identity of the iterators that they read
        self._latest: Any = None  # iterator of the last training iteration
        self._announced = False
        self._ranks: list[int] = []  # that run one order of passes, the first of which plans; and their group
        self._group: Any = None
        self.counts: Counter[str] = Counter()
        self._gains: list[float] = []
        self._warned: set[type[BaseException]] = set()

    def announce(self, lengths: Sequence[Sequence[int]]) -> None:
        """Plan for a batch, of a loop that makes an iterator for every batch. It announces each batch, in their order, and before
        the iteration before, on all ranks or on the first of its pipeline. From then on iterators are not read ahead there.

        Args:
            lengths: of the sequences of every microbatch, in tokens.

        Raises:
            ValueError: see ``loads_of``.
        """
        loads_of(lengths)
        self._announced = True
        if self._plans_here:
            self._start([Extent.of(sequences) for sequences in lengths])

    def begin(self, call: Call) -> tuple[Call, Planned | None]:
        """Start planning the next batch; collective over the ranks that run one order of passes, at first over the world.

        Returns:
            The call, with iterators that may have been read ahead; and the plan of its batch, the same on all these ranks. None
            where not all have it, and for forwards alone.

        Raises:
            ValueError: on all these ranks, where one cannot read lengths.
        """
        again = rerun_state_machine.replayed(call.iterators) is not None
        reader = None if call.forward_only or self._announced or again else self._reader(call)
        if self._readers:
            call = replace(call, data_iterator=[self._readers.get(id(items), items) for items in call.iterators])
        if call.forward_only:
            return call, None
        if not self._ranks:
            self._ranks = _in_one_order(call)
            self._group = new_group(self._ranks if len(self._ranks) > 1 else (), backend="gloo")
        count = call.num_microbatches
        failed: Exception | None = None
        try:
            sizes = reader.sizes(2 * count) if reader else ()
        except Exception as error:  # the other ranks are to end with this one
            sizes, failed = (), error
        following = sizes[count:] if len(sizes) == 2 * count else ()
        pending = None if again else self._due(count)  # what is planned is for the batch behind
        why, message = ("failed", b"") if failed else _state(pending)
        # MAX also joins the lengths of replicas.
        parts = [sizes[:count], following, pending.sizes if pending else ()]
        shared = torch.tensor([_STATES.index(why), len(message), *(number for part in parts for number in _numbers(part, count))])
        if self._group is not None:
            torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=self._group)
        state, length, *numbers = shared.tolist()
        now, following, planned = (_sizes(numbers[2 * count * part :][: 2 * count]) for part in range(3))
        why = _STATES[state]
        if why == "failed":
            raise failed or ValueError("the lengths of a batch cannot be read on another rank, whose error says why")
        if why == "planned" and now and now != planned:
            why = "late"
        batch = PlannedBatch.unpacked(self._sent(message, length)) if why == "planned" else None
        self._count(why, batch)
        if following and self._plans_here:
            self._start(following)
        return call, batch.planned if batch else None

    @property
    def _plans_here(self) -> bool:
        """Tell whether this is the rank that plans, which others of the first stage may be as well before the first iteration."""
        if not self._ranks:
            return parallel_state.get_pipeline_model_parallel_rank() == 0
        return torch.distributed.get_rank() == self._ranks[0]

    def _sent(self, message: bytes, length: int) -> bytes:
        """The message of the rank that plans."""
        if self._group is None:
            return message
        buffer = torch.frombuffer(bytearray(message or length), dtype=torch.uint8)
        torch.distributed.broadcast(buffer, self._ranks[0], group=self._group)
        return buffer.numpy().tobytes()

    def _reader(self, call: Call) -> ReadAhead | None:
        """Reader of the iterator of the first stage, on the rank that has it. One that comes for the first time is not
        read ahead: it may be for one batch alone, and a loop may hold others that go on with its data."""
        rank, chunk = self._plans.placement.home(0)
        if call.pipeline.rank() != rank or call.iterators[chunk] is None:
            return None
        self._readers = {key: reader for key, reader in self._readers.items() if reader.holds}
        found: list[ReadAhead] = []

        def read_ahead(items: Any) -> Any:
            reader = items if isinstance(items, ReadAhead) else self._readers.get(id(items))
            if reader is None and items is self._latest:
                reader = ReadAhead(items, lambda item: Extent.of(self._settings.lengths_of(item)))
            self._latest = items
            found.extend([reader] if reader else [])
            return reader or items

        iterator = call.iterators[chunk]
        if (reader := rerun_state_machine.beneath(iterator, read_ahead)) is not iterator:
            self._readers[id(iterator)] = reader
        return found[0] if found else None

    def _due(self, count: int) -> _Pending | None:
        """The plan, or its making, of the batch that begins, of that many microbatches."""
        if self._pending and len(self._pending[0].sizes) == count and self._plans_here:
            return self._pending.popleft()
        for pending in self._pending:
            pending.plan.cancel()
        self._pending.clear()
        return None

    def _start(self, sizes: Sequence[Extent]) -> None:
        tokens = self._settings.tokens or sum(size.tokens for size in sizes) / len(sizes)
        request = self._plans.of_batch(len(sizes), [size.load(tokens, self._settings.attention) for size in sizes])
        plan = self._process.plan(request, self._posting, self._settings.order == "any")
        plan.add_done_callback(self._warn)
        self._pending.append(_Pending(tuple(sizes), plan))

    def _warn(self, plan: Future[bytes]) -> None:
        """Say once of every kind of error that there is no plan, which may be after its batch."""
        error = None if plan.cancelled() else plan.exception()
        if error and type(error) not in self._warned:
            self._warned.add(type(error))
            _LOG.warning("a batch is not planned, and runs in the order for equal microbatches: %s", error)

    def _count(self, why: str, batch: PlannedBatch | None) -> None:
        if batch:
            self._gains.append(1 - batch.planned.value / batch.of_equal if batch.of_equal else 0.0)
        self.counts[why] += 1
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if last and self.counts.total() % self._settings.interval == 0:
            self._settings.say(self._in_words())

    def _in_words(self) -> str:
        shorter = sum(self._gains) / max(1, len(self._gains))
        return (
            f" every batch: of {self.counts.total()} iterations {self.counts['planned']} ran in an order for their microbatches, "
            f"by plan {shorter:.1%} shorter than in the order for equal ones; {self.counts['late']} plans came late, "
            f"{self.counts['unknown']} lengths were not known ahead, {self.counts['without']} had no plan"
        )


_STATES = ("unknown", "late", "without", "planned", "failed")  # of a batch that begins


def _state(pending: _Pending | None) -> tuple[str, bytes]:
    """State of a batch, and its plan if it is there."""
    if pending is None:
        return "unknown", b""
    if pending.plan.cancel() or not pending.plan.done():
        return "late", b""
    return ("without", b"") if pending.plan.exception() else ("planned", pending.plan.result())


def _numbers(sizes: Sequence[Extent], count: int) -> list[int]:
    """Sizes of a number of microbatches, all 0 where not all are known."""
    return [number for size in sizes for number in size] if len(sizes) == count else [0] * (2 * count)


def _sizes(numbers: Sequence[int]) -> tuple[Extent, ...]:
    return tuple(Extent(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)) if any(numbers) else ()


def in_places(call: Call, order: Sequence[int]) -> Call:
    """The call with its microbatches in other places: ``order`` says which is in every place."""
    moved: list[Any] = [items if items is None else _moved(items, order) for items in call.iterators]
    return replace(call, data_iterator=moved)


def _moved(items: Iterator[Any], order: Sequence[int]) -> Iterator[Any]:
    read = [next(items) for _ in order]  # with the first that is asked for
    yield from (read[number] for number in order)


def refuse(request: Request) -> None:
    """Refuse a request of which nothing can be planned for every batch.

    Raises:
        ValueError: its order does not follow from lengths, or it has what no plan for a batch has yet.
    """
    table.refuse(_facts(request), EVERY_BATCH)


def keeps_its_order(request: Request) -> bool:
    """Tell whether a ``PlanningProcess`` finds no other order for a request."""
    return bool(table.sentences(_facts(request), EVERY_BATCH))


def _facts(request: Request) -> table.Facts:
    return table.Facts(
        families.facts(request.schedule),
        every_batch=True,
        splits=request.splits,
        vocab_parallel=request.vocabulary,
        offload=request.offload,
        overlap_moe_expert_parallel_comm=request.overlap,
    )


def _in_one_order(call: Call) -> list[int]:
    """Global ranks that run passes in the order of this one's: those which meet others within passes, and these theirs.

    They meet for messages, and for tensors, contexts and experts in parts; and replicas where gradients are reduced within
    passes and there are several chunks, the last pass of one of which comes first. Collective over the world.
    """
    groups = [call.pipeline, call.groups.tp, call.groups.cp]
    if call.config.num_moe_experts:
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group(check_initialized=False))
    overlaps = any(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False) for chunk in call.chunks)
    if overlaps and len(call.chunks) > 1:
        groups.append(call.groups.dp_cp)
    met = {rank for group in groups if group is not None for rank in torch.distributed.get_process_group_ranks(group)}
    everyone: list[set[int]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, met)
    found: set[int] = set()
    grown = {torch.distributed.get_rank()}
    while grown != found:
        found = grown
        grown = found.union(*(ranks for ranks in everyone if found & ranks))
    return sorted(found)
