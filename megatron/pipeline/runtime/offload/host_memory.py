"""Host memory that a GPU copies to and from: arenas that are taken and given back, and allocated once."""

from __future__ import annotations

import weakref

import torch

LIMIT_FLAG = "--offload-host-memory"
PAGE = 4096
_SLACK = 1.125  # how much larger than needed an arena may be
_ACTIVATIONS = ("offloaded activations", f"give the machine's ranks less with {LIMIT_FLAG}, or offload less")


class Arena:
    """One piece of host memory.

    Pinning reads every page in, on the calling thread: memory lies on the NUMA node of the thread that allocates, which is
    the one next to its GPU if the launcher binds ranks (docs/offload.md).

    Args:
        size: bytes, rounded up to whole pages.
        pinned: registered with CUDA. PyTorch's own pinned memory is rounded up to a power of two.
        before: bytes that are pinned already, for the error.
        purpose: what it is for and what to do where there is too little, for the error.

    Raises:
        RuntimeError: the memory cannot be pinned.
    """

    def __init__(self, size: int, pinned: bool, before: int = 0, purpose: tuple[str, str] = _ACTIVATIONS) -> None:
        size = -(-size // PAGE) * PAGE
        whole = torch.empty(size + PAGE, dtype=torch.uint8)
        start = -whole.data_ptr() % PAGE  # whole pages are pinned, and none of them is a neighbour's as well
        self.bytes = whole[start : start + size]
        self.size = size
        self._pinned = pinned
        self._last_use: list[torch.cuda.Event] = []  # empty, or its only element
        if pinned:
            _pin(self.bytes, before, *purpose)
            # Not when the process ends: by then CUDA is gone, and everything unpinned.
            weakref.finalize(self, _unpin, self.bytes.data_ptr(), self._last_use).atexit = False

    def begin_use(self) -> None:
        """Copies from or to it may follow in any stream."""
        self._last_use.clear()

    def end_use(self) -> None:
        """No copy from or to it follows what is in the current stream: this is what unpinning it waits for, and nothing else."""
        if self._pinned:
            self._last_use[:] = [torch.cuda.current_stream().record_event()]


class HostPool:
    """Arenas that are allocated once and reused. A request may get an idle arena that is up to an eighth larger than needed.

    Args:
        limit: bytes that may be allocated, those of idle arenas included; None for no limit.
        pinned: for a GPU, whose copies are asynchronous only so.

    Attributes:
        allocated, in_use, most_in_use: bytes, as arenas are rounded up.
        allocations: how many arenas have been allocated.
    """

    def __init__(self, limit: int | None, pinned: bool) -> None:
        self._limit = limit
        self._pinned = pinned
        self._idle: list[Arena] = []  # the most recently returned is last
        self.allocated = 0
        self.in_use = 0
        self.most_in_use = 0
        self.allocations = 0

    def take(self, nbytes: int) -> Arena:
        """An arena of at least ``nbytes``. Its contents are undefined.

        Raises:
            RuntimeError: it would not fit within the limit, or cannot be pinned.
        """
        arena = self._fitting(nbytes) or self._allocate(rounded(nbytes))
        arena.begin_use()
        self.in_use += arena.size
        self.most_in_use = max(self.most_in_use, self.in_use)
        return arena

    def give(self, arena: Arena) -> None:
        """Take an arena back. Only work that follows in the compute stream may use it from here on."""
        arena.end_use()
        self.in_use -= arena.size
        self._idle.append(arena)

    def _fitting(self, nbytes: int) -> Arena | None:
        fitting = [arena for arena in self._idle if nbytes <= arena.size <= max(_SLACK * nbytes, rounded(nbytes))]
        if not fitting:
            return None
        arena = min(fitting, key=lambda one: one.size)
        self._idle.remove(arena)
        return arena

    def _allocate(self, size: int) -> Arena:
        if self._limit is not None:
            if self.in_use + size > self._limit:
                raise RuntimeError(
                    f"offloaded activations need {_mib(self.in_use + size)} of host memory on this rank "
                    f"({_mib(self.in_use)} are in use, {_mib(size)} more were asked for), and the limit is {_mib(self._limit)}: "
                    f"raise {LIMIT_FLAG}, or offload less"
                )
            while self.allocated + size > self._limit:  # idle arenas have other sizes
                self.allocated -= self._idle.pop(0).size
        arena = Arena(size, self._pinned, self.allocated)
        self.allocated += size
        self.allocations += 1
        return arena


def rounded(nbytes: int) -> int:
    """The size of the arena that is allocated for ``nbytes``: at most an eighth more, or whole pages, so that sizes repeat."""
    unit = max(PAGE, 1 << max(0, (nbytes // 8).bit_length() - 1))
    return -(-max(nbytes, 1) // unit) * unit


def _pin(memory: torch.Tensor, before: int, what: str, advice: str) -> None:
    cuda = torch.cuda.cudart()
    error = cuda.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(error):
        raise RuntimeError(
            f"CUDA refused to pin {_mib(memory.numel())} of host memory for {what}: "
            f"{cuda.cudaGetErrorString(error)}. This rank has pinned {_mib(before)} by now. Allow more locked memory "
            f"(ulimit -l unlimited; in a container, its memlock limit), {advice}"
        )


def _unpin(address: int, last_use: list[torch.cuda.Event]) -> None:
    """Once the copies from and to it are over, which the host may be ahead of; the whole device may wait for a message."""
    if last_use:
        last_use[0].synchronize()
    else:
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.4g} MiB"
