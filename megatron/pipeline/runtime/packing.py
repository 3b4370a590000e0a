"""Sequences of a global batch packed anew, over all data-parallel replicas, in place of how the data set has packed them.

    packing = Packing(tokens=8192, ranks=8, attention=0.1)
    reports = get_forward_backward_func()(**packing.packed(keywords))

Every replica reads the items that it would read anyway, takes their sequences apart, and learns how long those of the others are.
All find the same packing, and send each sequence to the replica that trains it. That is done in a thread, two batches ahead, so
that no pass waits for it and ``EveryBatch`` knows the lengths of the next one.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.pipeline.patches import rerun_state_machine

from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.planner import every_batch
from megatron.pipeline.runtime.call import Call
from megatron.pipeline.runtime.every_batch import lengths_of

_AHEAD = 2  # batches: the next one is announced, and the one behind it is made meanwhile
Sequence_ = Mapping[str, torch.Tensor]  # tokens of one sequence, [s], and what else there is of each
_MADE = ("cu_seqlens", "max_seqlen")
_pack = lru_cache(maxsize=2)(every_batch.pack)  # the iterators of a rank's chunks have the same data


class Packing:
    """Packing of the batches of one loop.

    Items are dicts as Megatron-LM's ``--sft`` gives them: ``tokens`` [1, s] and other tensors of that shape, ``cu_seqlens`` and
    ``max_seqlen``. Behind the last token of a sequence with a loss all are left out. A microbatch has ``tokens`` tokens, the last
    of which are a sequence of padding without loss; with ``variable_seq_lengths`` it has as many as its sequences.

    Args:
        tokens: that a microbatch holds.
        ranks: of the pipeline.
        attention: see ``planning.loads_of``.
        announce: is called with the lengths of the next batch's microbatches, such as ``BatchPlans.announce``.
    """

    def __init__(
        self, tokens: int, ranks: int, attention: float = 0.0, announce: Callable[[Sequence[Sequence[int]]], None] | None = None
    ) -> None:
        self._tokens, self._ranks, self._attention, self._announce = tokens, ranks, attention, announce
        self._replicas: torch.distributed.ProcessGroup | None = None
        self._model: torch.distributed.ProcessGroup | None = None
        self._readers: dict[int, _Packed] = {}  # by the place of the chunk
        self._aside = ThreadPoolExecutor(1, "packing")  # one thread: replicas exchange batches in one order

    def packed(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of an iteration with the packed microbatches, and how many there are; collective over the world at first,
        then over replicas and the ranks of a model.

        Forwards alone, and an iteration that is run again, stay as they are.

        Raises:
            ValueError: items are no packed sequences.
        """
        call = Call(**keywords)
        if call.forward_only:
            return dict(keywords)
        if self._model is None:
            replicas = torch.distributed.get_process_group_ranks(call.groups.dp)
            self._replicas = new_group(replicas if len(replicas) > 1 else (), backend="gloo")
            model = parallel_state.get_model_parallel_group(check_initialized=False)
            self._model = new_group(torch.distributed.get_process_group_ranks(model), backend="gloo")
        iterators, made = list(call.iterators), list[list[Any]]()
        replayed = rerun_state_machine.replayed(iterators)
        count = replayed or 0
        for place, items in enumerate(iterators):
            if items is not None and replayed is None:
                iterators[place] = self._beneath(place, items)
                count, made = self._readers[place].begin(lambda source: self._aside.submit(self._make, source, call))
        shared = torch.tensor([count])  # some ranks read no data
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=self._model)
        for batch in filter(None, made if self._announce else ()):
            self._announce([lengths_of(item) for item in batch])  # type: ignore[misc]
        data = iterators if isinstance(call.data_iterator, list) else iterators[0]
        return {**keywords, "data_iterator": data, "num_microbatches": int(shared) or call.num_microbatches}

    def _beneath(self, place: int, items: Any) -> Any:
        """The iterator of a chunk, which gives packed items."""

        def read(source: Any) -> _Packed:
            reader = self._readers.get(place)
            if reader is None or source not in (reader, reader.source):
                self._readers[place] = reader = _Packed(source)
            return reader

        return rerun_state_machine.beneath(items, read)

    def _make(self, source: Iterator[Any], call: Call) -> list[dict[str, torch.Tensor]]:
        """The packed items of the next batch that is read; none where the data end within it. Runs in the thread."""
        items: list[Any] = []
        with suppress(StopIteration):  # upstream's have no __iter__
            while len(items) < call.num_microbatches:
                items.append(next(source))
        if len(items) < call.num_microbatches:
            return []
        step = 2 * call.groups.cp.size() if call.groups.cp.size() > 1 else 1  # tokens that context-parallel ranks can share
        own = [sequence for item in items for sequence in _sequences(item, step)]
        lengths = self._of_all([len(one["tokens"]) for one in own])
        here = self._replicas.rank() if self._replicas else 0
        first = sum(map(len, lengths[:here]))  # of this replica's sequences, counted over all
        whole = not call.config.variable_seq_lengths
        flat = tuple(length for of_one in lengths for length in of_one)
        packed = _pack(flat, self._tokens, self._ranks, len(lengths), self._attention, whole)
        parcels = [
            {place: own[place - first] for one in microbatches for place in one if first <= place < first + len(own)}
            for microbatches in packed
        ]
        arrived = {place: one for parcel in self._to_all(parcels) for place, one in parcel.items()}
        microbatches = [[arrived[place] for place in one] for one in packed[here]]
        step *= call.groups.tp.size()
        return [
            _item(one, self._tokens if whole else -(-sum(len(s["tokens"]) for s in one) // step) * step) for one in microbatches
        ]

    def _of_all(self, own: Any) -> list[Any]:
        """The values of all replicas."""
        found: list[Any] = [own] * (self._replicas.size() if self._replicas else 1)
        if self._replicas:
            torch.distributed.all_gather_object(found, own, group=self._replicas)
        return found

    def _to_all(self, parcels: list[Any]) -> list[Any]:
        """The parcels of all replicas for this one, which has one for each."""
        if not self._replicas:
            return parcels
        sent = [pickle.dumps(parcel) for parcel in parcels]
        arriving = [sizes[self._replicas.rank()] for sizes in self._of_all([len(one) for one in sent])]
        buffer = torch.empty(sum(arriving), dtype=torch.uint8)
        given = torch.frombuffer(bytearray(b"".join(sent)), dtype=torch.uint8)
        torch.distributed.all_to_all_single(buffer, given, arriving, [len(one) for one in sent], group=self._replicas)
        return [pickle.loads(part.numpy().tobytes()) for part in buffer.split(arriving)]


class _Packed:
    """An iterator of packed items in place of a data set's own, some batches ahead."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._items: deque[Any] = deque()
        self._batches: deque[Future[list[Any]]] = deque()  # that have not begun

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._items:
            return self._items.popleft()
        wait(self._batches)  # they read it, too
        return next(self.source)

    def begin(self, make: Callable[[Iterator[Any]], Future[list[Any]]]) -> tuple[int, list[list[Any]]]:
        """Begin a batch, and have one behind it made; returns its number of items, and the batches that are known from now on."""
        first = not self._batches
        while len(self._batches) <= _AHEAD:
            self._batches.append(make(self.source))
        batch, following = self._batches.popleft().result(), self._batches[0].result()
        self._items.extend(batch)
        return len(batch), [batch, following] if first else [following]


def _sequences(item: Any, step: int) -> Iterator[Sequence_]:
    """The sequences of an item, each up to its last token with a loss, in whole steps of tokens."""
    if not (isinstance(item, Mapping) and {"tokens", "loss_mask", "cu_seqlens"} <= item.keys() and len(item["tokens"]) == 1):
        raise ValueError(
            "packing takes sequences apart, and the data has no items of one row with tokens, loss_mask and cu_seqlens: give "
            "--sft and --micro-batch-size 1, or leave packing out"
        )
    for begin, end in pairwise(item["cu_seqlens"].flatten().tolist()):
        if end > begin:
            counted = [0, *item["loss_mask"][0, begin:end].nonzero().flatten().tolist()]
            last = min(begin + -(-(counted[-1] + 1) // step) * step, end)
            yield {name: each[0, begin:last].clone() for name, each in item.items() if name not in _MADE}


def _item(sequences: Sequence[Sequence_], tokens: int) -> dict[str, torch.Tensor]:
    """The item of a microbatch, in memory from which a GPU copies while the host goes on."""
    lengths = [len(one["tokens"]) for one in sequences]
    if padding := tokens - sum(lengths):
        sequences = [*sequences, {name: each.new_zeros(padding) for name, each in sequences[0].items()}]
        lengths.append(padding)
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    whole = {name: torch.cat([one[name] for one in sequences])[None] for name in sequences[0]}
    whole |= {"cu_seqlens": bounds[None], "max_seqlen": torch.tensor([max(lengths)], dtype=torch.int32)}
    return {name: each.pin_memory() for name, each in whole.items()} if torch.cuda.is_available() else whole
