"""Running forwards again as if they had not run: the same data, the same random states, the same buffers of the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model


class Rewind:
    """The state that forwards change: positions in the data, random states and buffers, as they were when this was made.

    Args:
        chunks: whose buffers forwards may change, such as an expert router's counts of tokens.
        iterators: of data, by chunk; ``iterators`` are to be read instead of them.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], iterators: Sequence[Iterator[Any] | None]) -> None:
        wrapped = {id(items): _Repeatable(items) for items in iterators if items is not None}
        self._read = list(wrapped.values())  # chunks may share one
        self.iterators = [items if items is None else wrapped[id(items)] for items in iterators]
        self._buffers = [(buffer, buffer.detach().clone()) for chunk in unwrap_model(list(chunks)) for buffer in chunk.buffers()]
        self._random = torch.get_rng_state()
        self._random_of_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._streams = get_cuda_rng_tracker().get_states()

    def rewind(self) -> None:
        """Restore that state; the data that has been read will be read again."""
        for items in self._read:
            items.rewind()
        for buffer, before in self._buffers:
            buffer.copy_(before)
        torch.set_rng_state(self._random)
        if self._random_of_gpu is not None:
            torch.cuda.set_rng_state(self._random_of_gpu)
        get_cuda_rng_tracker().set_states(self._streams)

    def forget(self) -> None:
        """Keep what has happened, and let go of the copies."""
        for items in self._read:
            items.forget()
        self._buffers.clear()


class _Repeatable:
    """An iterator that can go back to where it was wrapped, until it forgets."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._read: list[Any] | None = []
        self._again: deque[Any] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self._items)
        if self._read is not None:
            self._read.append(item)
        return item

    def rewind(self) -> None:
        assert self._read is not None, "it has not forgotten"
        self._again.extendleft(reversed(self._read))
        self._read = []

    def forget(self) -> None:
        self._read = None
