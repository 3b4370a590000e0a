"""When data-parallel gradient reduction may start: after the pass that completes a chunk's gradients, not before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from megatron.pipeline.planner import Kind, Pass

NoSync = Callable[[], AbstractContextManager[None]]


class GradientSync:
    """Holds DDP's no_sync through an iteration, and lifts it around the passes that complete gradients.

    The last B of a chunk completes what B finishes (norms, biases, embeddings), its last W the split weights; where the
    vocabulary is spread, the last T and the last IB complete the rank's shard. DDP counts
    a parameter as ready when its hook runs outside no_sync, so no_sync is lifted for just these passes.

    Args:
        no_sync: upstream's ``config.no_sync_func``: a function, or a list of one per chunk.
        passes: this rank's, in order.
        reduces_late: True where gradients are reduced after the iteration instead (``config.grad_sync_func``), or by the caller.
    """

    def __init__(self, no_sync: NoSync | Sequence[NoSync], passes: Sequence[Pass], reduces_late: bool) -> None:
        self._no_sync = [no_sync] if callable(no_sync) else list(no_sync)
        last: dict[tuple[str, int], Pass] = {}
        for work in passes:
            if work.kind.sends_gradient:
                last["B", work.chunk] = work
            if work.kind.finishes_weights:
                last["W", work.chunk] = work
            if work.kind in (Kind.T, Kind.IB):
                last[work.kind, work.chunk] = work
        self._completing = frozenset() if reduces_late else frozenset(last.values())
        self._held = ExitStack()

    def __enter__(self) -> GradientSync:
        self._hold()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def around(self, work: Pass) -> AbstractContextManager[None]:
        return self._lifted() if work in self._completing else nullcontext()

    @contextmanager
    def _lifted(self) -> Iterator[None]:
        self._held.close()
        yield
        self._hold()

    def _hold(self) -> None:
        for no_sync in self._no_sync:
            self._held.enter_context(no_sync())
