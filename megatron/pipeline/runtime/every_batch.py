"""Every batch planned: an order of passes for the lengths of its microbatches, made while the batch before it trains.

    install("zb-auto", every_batch=EveryBatch(attention=0.1))

At its start an iteration knows the lengths of the next one's microbatches: its iterator is read two batches ahead, or the loop
has announced them. One small collective gives them to all ranks that run one order of passes, and tells these whether all have
the plan of the batch that begins. If not, they run the order for equal microbatches: nothing waits for a plan.
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

from megatron.pipeline.dist.groups import new_group
from megatron.pipeline.planning.aside import PlannedBatch, PlanningProcess
from megatron.pipeline.planning.plan_cache import PlanCache
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.loads import Size, loads_of
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
    """

    attention: float = 0.0
    tokens: float | None = None
    order: Literal["given", "any"] = "given"
    lengths_of: Callable[[Any], Sequence[int]] = lengths_of
    interval: int = 100
    say: Callable[[str], object] = _LOG.info


class ReadAhead:
    """An iterator that knows the sizes of items that have yet to be read; who reads one has one more read ahead."""

    def __init__(self, items: Iterator[Any], size: Callable[[Any], Size]) -> None:
        self._items, self._size = items, size
        self._read: deque[tuple[Any, Size]] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._read:
            return next(self._items)
        item, _ = self._read.popleft()
        self._fill(len(self._read) + 1)
        return item

    def sizes(self, count: int) -> tuple[Size, ...]:
        """Sizes of the next items; fewer where the iterator ends."""
        self._fill(count)
        return tuple(size for _, size in islice(self._read, count))

    @property
    def holds(self) -> bool:
        """Tell whether it has read what nobody has got yet."""
        return bool(self._read)

    def _fill(self, count: int) -> None:
        with suppress(StopIteration):  # upstream's have no __iter__
            while len(self._read) < count:
                item = next(self._items)
                self._read.append((item, self._size(item)))


class _Pending(NamedTuple):
    """A batch that is being planned.

    Attributes:
        own: sizes of its microbatches as this rank has read them; None where it reads none.
    """

    microbatches: int
    own: tuple[Size, ...] | None
    plan: Future[PlannedBatch]


class BatchPlans:
    """Plans of the batches of one pipeline.

    Args:
        plans: for equal microbatches, whose order a batch has where its own is not there.

    Attributes:
        counts: of iterations: ``planned``; ``late``, where the plan came too late, or ranks had
            different ones; ``unknown``, where lengths were not known one iteration before; ``without``, for which there is none.

    Raises:
        ValueError: nothing can be planned for the batches of this schedule.
    """

    def __init__(self, settings: EveryBatch, plans: PlanCache, posting: Posting) -> None:
        if reason := _reason_against(plans):
            raise ValueError(f"plans for every batch are orders of whole microbatches, and {plans.name} {reason}")
        self._settings, self._plans, self._posting = settings, plans, posting
        self._process = PlanningProcess()
        self._pending: deque[_Pending] = deque()
        self._readers: dict[int, ReadAhead] = {}  # by the identity of the iterators that they read
        self._latest: Any = None  # iterator of the last training iteration
        self._announced = False
        self._group: tuple[Any] | None = None  # opened by all ranks together
        self.counts: Counter[str] = Counter()
        self._gains: list[float] = []

    def announce(self, lengths: Sequence[Sequence[int]]) -> None:
        """Plan for a batch, of a loop that makes an iterator for every batch. It announces each batch, in their order, on all ranks
        and before the iteration before. From then on iterators are not read ahead.

        Args:
            lengths: of the sequences of every microbatch, in tokens.

        Raises:
            ValueError: see ``loads_of``.
        """
        loads_of(lengths)
        self._announced = True
        self._start([Size.of(sequences) for sequences in lengths], None)

    def begin(self, call: Call) -> tuple[Call, Planned | None]:
        """Start planning the next batch; collective over the ranks that run one order of passes, at first over the world.

        Returns:
            The call, with iterators that may have been read ahead; and the plan of its batch, the same on all these ranks. None
            where not all have it, and for forwards alone.
        """
        reader = None if call.forward_only or self._announced else self._reader(call)
        if self._readers:
            call = replace(call, data_iterator=[self._readers.get(id(items), items) for items in call.iterators])
        if call.forward_only:
            return call, None
        if self._group is None:
            ranks = _in_one_order(call)
            self._group = (new_group(ranks if len(ranks) > 1 else (), backend="gloo"),)
        count = call.num_microbatches
        sizes = reader.sizes(2 * count) if reader else ()
        pending = self._due(count)
        batch = self._ready(pending, sizes[:count] if reader else None)
        digest = int(batch.planned.digest[:15], 16) + 1 if batch else 0
        own = sizes[count:] if len(sizes) == 2 * count else ()
        told = torch.tensor([digest, -digest, *(number for size in own or [(0, 0)] * count for number in size)])
        if self._group[0] is not None:
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=self._group[0])
        highest, lowest, *numbers = told.tolist()
        plan = batch.planned if batch and highest == digest == -lowest else None
        self._count(pending, batch if plan else None)
        if any(numbers):
            self._start([Size(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)], own or None)
        return call, plan

    def _reader(self, call: Call) -> ReadAhead | None:
        """What reads the iterator of the first stage ahead, on the rank that has it. One that comes for the first time is not
        read ahead: it may be for one batch alone, and a loop may hold others that go on with its data."""
        rank, chunk = self._plans.placement.home(0)
        if call.pipeline.rank() != rank or call.iterators[chunk] is None:
            return None
        self._readers = {key: reader for key, reader in self._readers.items() if reader.holds}
        found: list[ReadAhead] = []

        def read_ahead(items: Any) -> Any:
            reader = items if isinstance(items, ReadAhead) else self._readers.get(id(items))
            if reader is None and items is self._latest:
                reader = ReadAhead(items, lambda item: Size.of(self._settings.lengths_of(item)))
            self._latest = items
            found.extend([reader] if reader else [])
            return reader or items

        iterator = call.iterators[chunk]
        if (reader := rerun_state_machine.beneath(iterator, read_ahead)) is not iterator:
            self._readers[id(iterator)] = reader
        return found[0] if found else None

    def _due(self, count: int) -> _Pending | None:
        """What was planned for the batch that begins, of that many microbatches."""
        if self._pending and self._pending[0].microbatches == count:
            return self._pending.popleft()
        for pending in self._pending:
            pending.plan.cancel()
        self._pending.clear()
        return None

    def _ready(self, pending: _Pending | None, own: tuple[Size, ...] | None) -> PlannedBatch | None:
        """The plan, if it is there, and for the batch that begins: an evaluation may have read what was planned for."""
        if pending is None or pending.plan.cancel() or not pending.plan.done() or pending.own not in (None, own):
            return None
        return None if pending.plan.exception() else pending.plan.result()

    def _start(self, sizes: Sequence[Size], own: tuple[Size, ...] | None) -> None:
        tokens = self._settings.tokens or sum(size.tokens for size in sizes) / len(sizes)
        request = self._plans.of_batch([size.load(tokens, self._settings.attention) for size in sizes])
        plan = self._process.plan(request, self._posting, self._settings.order == "any")
        self._pending.append(_Pending(len(sizes), own, plan))

    def _count(self, pending: _Pending | None, batch: PlannedBatch | None) -> None:
        failed = pending and pending.plan.done() and not pending.plan.cancelled() and pending.plan.exception()
        if failed and not self.counts["without"]:
            _LOG.warning("a batch is not planned, and runs in the order for equal microbatches: %s", failed)
        if batch:
            self._gains.append(1 - batch.planned.value / batch.of_equal if batch.of_equal else 0.0)
        self.counts["planned" if batch else "without" if failed else "late" if pending else "unknown"] += 1
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


def in_places(call: Call, order: Sequence[int]) -> Call:
    """The call with its microbatches in other places: ``order`` says which is in every place."""
    moved: list[Any] = [items if items is None else _moved(items, order) for items in call.iterators]
    return replace(call, data_iterator=moved)


def _moved(items: Iterator[Any], order: Sequence[int]) -> Iterator[Any]:
    read = [next(items) for _ in order]  # with the first that is asked for
    yield from (read[number] for number in order)


def _reason_against(plans: PlanCache) -> str:
    """What keeps a schedule from being planned for every batch; "" for nothing."""
    planned = [name for name, family in families.FAMILIES.items() if family.searches]
    if not plans.has_family or not families.named(plans.name).searches:
        return f"has an order that no lengths change: take {', '.join(planned)}"
    if plans.splits > 1:
        return "cuts them into slices: take another schedule"
    has = {"a spread vocabulary": plans.vocabulary, "copies to host memory": plans.offloads, "overlapped passes": plans.overlaps}
    found = [name for name, given in has.items() if given]
    return f"has {found[0]} here: leave that out" if found else ""


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
