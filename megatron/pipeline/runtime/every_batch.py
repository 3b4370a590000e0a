"""Every batch planned: an order of passes for the lengths of its microbatches, made while the batch before it trains.

    install("zb-auto", every_batch=EveryBatch(attention=0.1))

At its start an iteration knows the lengths of the next one's microbatches: its iterator is read two batches ahead, or the loop
has announced them. One rank plans for all that run passes in the same order; replicas among them bring it their lengths. A
broadcast tells all whether the plan of the batch that begins is there: if so they get it, else they run the order for equal
microbatches. Nothing waits for a plan, but where ``wait`` says for how long.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import rerun_state_machine

from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.planner import PlanCache, Planned, PlannedBatch, every_batch
from megatron.pipeline.runtime.background import BackgroundPlanner
from megatron.pipeline.runtime.call import Call

_LOG = logging.getLogger(__name__)
_OTHER_NUMBERS = "replicas that run one order announce a batch with other numbers of microbatches: announce as many in each"


def lengths_of(item: Any) -> Sequence[int]:
    """Lengths of the sequences of a microbatch, in tokens: between ``cu_seqlens``, or ``seq_lens``, where it has them, else of
    its ``tokens`` or ``input_ids``, which may be a nested tensor.

    Where documents begin within a sequence does not count (``position_ids``): attention with a mask runs over all of it.

    Args:
        item: a dict as data sets of Megatron-LM and frameworks give it, or tokens [b, s, ..], or a tuple or list that begins
            with them.

    Raises:
        ValueError: it is something else.
    """
    tokens: Any = item[0] if isinstance(item, (tuple, list)) and item else item
    if isinstance(item, Mapping) or hasattr(item, "get"):  # a TensorDict is no Mapping
        if (bounds := item.get("cu_seqlens", None)) is not None:
            return [end - begin for begin, end in pairwise(bounds.flatten().tolist()) if end > begin]
        tokens = item.get("tokens", None)
        tokens = item.get("input_ids", None) if tokens is None else tokens
        lengths = item.get("seq_lens", None)
        # Rows that are padded have lengths, too, but attention runs over all of them.
        if lengths is not None and (tokens is None or len(lengths) != len(tokens)):
            return [int(length) for length in lengths]
    if getattr(tokens, "is_nested", False):
        return [len(row) for row in tokens.unbind()]
    shape: Sequence[int] = getattr(tokens, "shape", ())
    if len(shape) < 2:
        raise ValueError(
            f"a plan for every batch needs lengths, and a microbatch of {type(item).__name__} has neither cu_seqlens, seq_lens "
            "nor tokens [b, s]: give a function that says them, EveryBatch(lengths_of=...)"
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
        wait: seconds that an iteration waits for the plan of its batch where nothing has said its lengths before, as with an
            iterator for each call.
        interval: iterations from one line in the log to the next.
        say: writes it, on the last rank of the world.

    Raises:
        ValueError: a number is out of range, or there is no such order.
    """

    attention: float = 0.0
    tokens: float | None = None
    order: Literal["given", "any"] = "given"
    lengths_of: Callable[[Any], Sequence[int]] = lengths_of
    wait: float = 0.0
    interval: int = 100
    say: Callable[[str], object] = _LOG.info

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[Callable[[Any], bool], str]] = {
            "attention": (lambda share: 0 <= share <= 1, "a share from 0 to 1"),
            "tokens": (lambda tokens: tokens is None or 0 < tokens < float("inf"), "a number above 0, or None"),
            "order": (lambda order: order in ("given", "any"), "'given' or 'any'"),
            "lengths_of": (callable, "a function of an item"),
            "wait": (lambda seconds: 0 <= seconds <= 3600, "seconds, 0 to 3600"),
            "interval": (lambda iterations: iterations >= 1, "iterations, at least 1"),
            "say": (callable, "a function of a line"),
        }
        for name, (fits, values) in allowed.items():
            given, good = getattr(self, name), False
            with suppress(TypeError):
                good = fits(given)
            if not good:
                raise ValueError(f"EveryBatch({name}={given!r}): give {values}")


class ReadAhead:
    """An iterator that knows sizes of items that have yet to be read; if it goes on, who reads one has one more read ahead."""

    def __init__(self, items: Iterator[Any], size: Callable[[Any], every_batch.Extent], goes_on: bool = True) -> None:
        self._items, self._size, self.goes_on = items, size, goes_on
        self._read: deque[list[Any]] = deque()  # items and their sizes, where these have been asked for

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._read:
            return next(self._items)
        item, _ = self._read.popleft()
        self._fill(len(self._read) + self.goes_on)
        return item

    def sizes(self, count: int) -> tuple[every_batch.Extent, ...]:
        """Sizes of the next items; fewer where the iterator ends. All that is wrong with a size is raised here."""
        self._fill(count)
        for entry in islice(self._read, count):
            try:
                entry[1] = entry[1] or self._size(entry[0])
            except Exception as error:
                raise ValueError(f"a batch cannot be planned for its lengths: {type(error).__name__}: {error}") from error
        return tuple(size for _, size in islice(self._read, count))

    @property
    def holds(self) -> bool:
        """Tell whether it has read what has yet to be taken."""
        return bool(self._read)

    def _fill(self, count: int) -> None:
        with suppress(StopIteration):  # upstream's have no __iter__
            while len(self._read) < count:
                self._read.append([next(self._items), None])


Meets = tuple[set[int], bool]  # of a rank: those that it meets within passes, and whether it knows lengths
Sizes = tuple[every_batch.Extent, ...]  # of the microbatches of a batch; empty where they are not known


class _Known(NamedTuple):
    """Lengths of batches that a replica knows when an iteration begins, or why it does not."""

    announced: list[Sizes]
    now: Sizes
    following: Sizes
    error: str = ""


class BatchPlans:
    """Plans of the batches of one pipeline.

    Args:
        plans: for equal microbatches, whose order a batch has where its own is not there.
        planner: of this rank.

    Attributes:
        counts: of iterations: ``planned``; ``late``, whose plan came too late, or was for data that an evaluation has read;
            ``unknown``, whose lengths were not known one iteration before; ``without``, for which there is none.
    """

    def __init__(self, settings: EveryBatch, plans: PlanCache, planner: BackgroundPlanner) -> None:
        self._settings, self._plans, self._planner = settings, plans, planner
        self._pending: deque[tuple[Sizes, Future[bytes]]] = deque()  # that are being planned
        self._readers: dict[int, ReadAhead] = {}  # by the identity of the iterators that they read
        self._latest: Any = None  # iterator of the last training iteration
        self._announces = False
        self._announced: list[Sizes] = []  # that are not being planned
        self._met: WeakSet[torch.nn.Module] = WeakSet()  # the first chunks of models for which ranks have met
        self._everyone: list[Meets] = []  # of all ranks, for all these models
        self._sources: list[int] = []  # ranks that know lengths, one of each replica that runs one order; the first plans
        self._replicas: Any = None  # their group, and that of all ranks that run this order; None of one rank
        self._group: Any = None
        self.counts: Counter[str] = Counter()
        self._gains: list[float] = []
        self._warned: set[type[BaseException]] = set()

    def announce(self, lengths: Sequence[Sequence[int]]) -> None:
        """Announce a batch of this replica, of a loop that makes an iterator for every batch. It announces each batch, in their
        order, and before the iteration before, on all ranks or on the first of each pipeline. From then on iterators are not
        read ahead there.

        Args:
            lengths: of the sequences of every microbatch, in tokens.

        Raises:
            ValueError: see ``loads_of``.
        """
        every_batch.loads_of(lengths)
        self._announces = True
        self._announced.append(tuple(map(every_batch.Extent.of, lengths)))

    def begin(self, call: Call) -> tuple[Call, Planned | None]:
        """Start planning the next batch; collective over the ranks that run one order of passes, with a model's first over the
        world.

        Returns:
            The call, with iterators that may have been read ahead; and the plan of its batch, the same on all these ranks. None
            where it is not there, and for forwards alone.

        Raises:
            ValueError: on all these ranks, where one cannot read lengths.
        """
        if not (call.forward_only or call.chunks[0] in self._met):
            self._meet(call)
        again = rerun_state_machine.replayed(call.iterators) is not None
        reader = None if call.forward_only or self._announces or again else self._reader(call)
        if self._readers:
            call = replace(call, data_iterator=[self._readers.get(id(items), items) for items in call.iterators])
        if call.forward_only:
            return call, None
        known = [own := self._known(reader, call.num_microbatches)]
        if self._replicas is not None:
            known *= len(self._sources)
            torch.distributed.all_gather_object(known, own, group=self._replicas)
        announced = [_largest(replicas) for replicas in zip(*(one.announced for one in known), strict=False)]
        del self._announced[: len(announced)]
        errors = [one.error for one in known if one.error] + [_OTHER_NUMBERS] * announced.count(())
        shared: list[Any] = ["failed", errors]
        if not errors and torch.distributed.get_rank() == self._sources[0]:
            for sizes in announced:
                self._start(sizes)
            shared = self._due(call.num_microbatches, _largest([one.now for one in known])) if not again else ["unknown", b""]
            self._start(_largest([one.following for one in known]))
        if self._group is not None:
            torch.distributed.broadcast_object_list(shared, self._sources[0], group=self._group)
        why, message = shared
        if why == "failed":
            raise ValueError(message[0])
        batch = PlannedBatch.unpacked(message) if why == "planned" else None
        self._count(why, batch)
        return call, batch.planned if batch else None

    def _meet(self, call: Call) -> None:
        """Find the ranks that run passes in the order of this one's, of this model or of one before, and make their groups;
        collective over the world."""
        self._met.add(call.chunks[0])
        rank, before = torch.distributed.get_rank(), self._everyone
        first = call.pipeline.rank() == self._plans.placement.home(0)[0] and call.groups.tp.rank() == call.groups.cp.rank() == 0
        self._everyone = [(set(), False)] * torch.distributed.get_world_size()
        met = _met(call).union(before[rank][0] if before else ())
        torch.distributed.all_gather_object(self._everyone, (met, first))
        if self._everyone == before:
            return
        ranks, self._sources = _in_one_order(rank, self._everyone)
        if rank != self._sources[0]:  # another plans what comes
            self._pending.clear()
        here = rank in self._sources and len(self._sources) > 1
        self._replicas = new_group(self._sources if here else (), backend="gloo")
        self._group = new_group(ranks if len(ranks) > 1 else (), backend="gloo")

    def _known(self, reader: ReadAhead | None, count: int) -> _Known:
        """Lengths of batches that are known here."""
        try:
            sizes = reader.sizes(count * (1 + reader.goes_on)) if reader else ()
        except ValueError as error:  # the other ranks are to end with this one
            _LOG.exception("lengths cannot be read")
            return _Known([], (), (), str(error))
        whole = len(sizes) == 2 * count
        return _Known(self._announced, sizes[:count], sizes[count:] if whole else ())

    def _reader(self, call: Call) -> ReadAhead | None:
        """Reader of the iterator of the first stage, on the rank that knows lengths. One that comes for the first time is not
        read beyond this call: it may be for one batch alone, and a loop may hold others that go on with its data."""
        iterator = call.iterators[self._plans.placement.home(0)[1]]
        if torch.distributed.get_rank() not in self._sources or iterator is None:
            return None
        self._readers = {key: reader for key, reader in self._readers.items() if reader.holds}
        found: list[ReadAhead] = []

        def read_ahead(items: Any) -> Any:
            reader = items if isinstance(items, ReadAhead) else self._readers.get(id(items))
            if reader is None and ((again := items is self._latest) or self._settings.wait):
                reader = ReadAhead(items, lambda item: every_batch.Extent.of(self._settings.lengths_of(item)), again)
            self._latest = items
            found.extend([reader] if reader else [])
            return reader or items

        if (reader := rerun_state_machine.beneath(iterator, read_ahead)) is not iterator:
            self._readers[id(iterator)] = reader
        return found[0] if found else None

    def _start(self, sizes: Sizes) -> None:
        """Start planning for a batch, where its sizes are known."""
        if sizes:
            tokens = self._settings.tokens or sum(size.tokens for size in sizes) / len(sizes)
            request = self._plans.of_batch(len(sizes), [size.load(tokens, self._settings.attention) for size in sizes])
            plan = self._planner.start(request, self._settings.order == "any")
            plan.add_done_callback(self._warn)
            self._pending.append((sizes, plan))

    def _due(self, count: int, now: Sizes) -> list[Any]:
        """State of the batch that begins, of that many microbatches, and its plan if it is there.

        Args:
            now: its sizes, where they are known: not where they were announced, one batch after the other.
        """
        sizes, plan = self._pending.popleft() if self._pending else ((), Future())
        done = not plan.cancel() and plan.done()
        if len(sizes) != count:
            if self._announces or len(now) != count or not self._settings.wait:
                return ["unknown", b""]
            self._start(now)
            sizes, plan = self._pending.pop()
            done = bool(wait([plan], self._settings.wait).done) or (not plan.cancel() and plan.done())
        if not done or now != (() if self._announces else sizes):
            return ["late", b""]
        return ["without", b""] if plan.exception() else ["planned", plan.result()]

    def _warn(self, plan: Future[bytes]) -> None:
        """Say once of every kind of error that there is no plan, which may be after its batch."""
        error = None if plan.cancelled() else plan.exception()
        if error and type(error) not in self._warned:
            self._warned.add(type(error))
            _LOG.warning("a batch is not planned, and runs in the order for equal microbatches: %s", error)

    def _count(self, why: str, batch: PlannedBatch | None) -> None:
        if batch:
            self._gains.append(batch.gain)
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


def _largest(replicas: Sequence[Sizes]) -> Sizes:
    """The largest microbatch in every place, over replicas that run one order: each waits for the others' messages or sums.
    Nothing is known where one knows nothing, or of another number of microbatches."""
    if len(set(map(len, replicas))) > 1:
        return ()
    return tuple(every_batch.Extent(*map(max, zip(*sizes, strict=True))) for sizes in zip(*replicas, strict=True))


def in_places(call: Call, order: Sequence[int]) -> Call:
    """The call with its microbatches in other places: ``order`` says which is in every place."""
    moved: list[Any] = [items if items is None else _moved(items, order) for items in call.iterators]
    return replace(call, data_iterator=moved)


def _moved(items: Iterator[Any], order: Sequence[int]) -> Iterator[Any]:
    read = [next(items) for _ in order]  # with the first that is asked for
    yield from (read[number] for number in order)


def _met(call: Call) -> set[int]:
    """Global ranks that this one meets within the passes of a model, and so must run in its order: for messages, and for tensors,
    contexts and experts in parts; and replicas where forwards balance experts over all of them, or where gradients are reduced
    within passes and there are several chunks, the last pass of one of which comes first."""
    groups = [call.pipeline, call.groups.tp, call.groups.cp]
    if call.config.num_moe_experts:
        groups.append(parallel_state.get_expert_tensor_and_model_parallel_group(check_initialized=False))
    overlaps = any(getattr(getattr(chunk, "ddp_config", None), "overlap_grad_reduce", False) for chunk in call.chunks)
    balances = "global_aux_loss" in (call.config.moe_router_load_balancing_type or ())
    if balances or (overlaps and len(call.chunks) > 1):
        groups.append(call.groups.dp_cp)
    return {rank for group in groups if group is not None for rank in torch.distributed.get_process_group_ranks(group)}


def _in_one_order(rank: int, everyone: Sequence[Meets]) -> tuple[list[int], list[int]]:
    """Ranks that run passes in the order of one's, as each meets another of them, and those of them that know lengths."""
    found: set[int] = set()
    grown = {rank}
    while grown != found:
        found = grown
        grown = found.union(*(ranks for ranks, _ in everyone if found & ranks))
    return sorted(found), [rank for rank in sorted(found) if everyone[rank][1]]
