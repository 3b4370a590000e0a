"""Turns on a shared device: the passes of a rehearsal run one at a time, so that each takes what it takes alone.

A turn is a lock on a file of this machine. The kernel gives it to the next rank that waits, which holds no core until then, and
takes it back from a rank that dies. Messages and collectives need no turn: a rank waits for them without computing, and only a
rank that can compute asks for a turn. So turns delay passes, but never make two ranks wait for each other.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.monitor.clock import undisturbed
from megatron.pipeline.monitor.recorder import NullRecorder
from megatron.pipeline.planner import Pass, ops


class DeviceLock:
    """The turns that this rank takes.

    Args:
        file: open, and the same file on all ranks that share a device.
        together: ranks that exchange data within passes, such as those that share a layer: they take a turn together. None for a
            rank that runs its passes alone.

    Attributes:
        clock: times what runs in a turn: what other processes of the machine take away does not count.
        host: seconds that this thread has computed, less what its turns take to begin and to end.
    """

    def __init__(self, file: Any, together: torch.distributed.ProcessGroup | None = None) -> None:
        self._file = file
        self._together = together if together is not None and together.size() > 1 else None
        self.clock = undisturbed()
        self._has_turn = False
        self._around = 0.0  # seconds of the thread

    def host(self) -> float:
        return time.thread_time() - self._around

    def recorder(self, recorder: NullRecorder) -> NullRecorder:
        """A recorder that has every pass in a turn."""
        return SerializedRecorder(recorder, self)

    @classmethod
    def open(cls) -> DeviceLock:
        """Turns between all ranks of this machine. Collective over the world.

        Raises:
            ValueError: the ranks are on several machines.
        """
        hosts: list[str] = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(hosts, socket.gethostname())
        if len(set(hosts)) > 1:
            raise ValueError(
                f"--rehearse runs all ranks on one machine, and they are on {', '.join(dict.fromkeys(hosts))}: start them on one"
            )
        path = [tempfile.mkstemp(prefix="mpipe-turns-")[1] if torch.distributed.get_rank() == 0 else ""]
        torch.distributed.broadcast_object_list(path, src=0)
        file = open(path[0], "ab")  # noqa: SIM115 - open as long as this process lives
        together = _sharing_passes()
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            os.unlink(path[0])
        return cls(file, together)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have the device alone (with the ranks of the same turn) until the end of the context.

        Within a turn it is the same turn.
        """
        if self._has_turn:
            yield
            return
        with self._not_counted():
            self._begin()
        try:
            yield
            with self._not_counted():
                if torch.cuda.is_available():
                    torch.cuda.current_stream().synchronize()
                self._meet()
        finally:
            with self._not_counted():
                self._end()

    @contextmanager
    def _not_counted(self) -> Iterator[None]:
        before = time.thread_time()
        try:
            yield
        finally:
            self._around += time.thread_time() - before

    def _begin(self) -> None:
        self._meet()  # before the lock is taken: a rank that is late may wait for a message of another rank's pass
        if self._leads:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._has_turn = True
        try:
            self._meet()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        self._has_turn = False
        if self._leads:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def _leads(self) -> bool:
        return self._together is None or self._together.rank() == 0

    @contextmanager
    def optimizer_steps(self) -> Iterator[dict[int, list[float]]]:
        """Have the device alone in every step of an optimizer too; yields the seconds of these, by optimizer.

        What upstream's optimizers do around a step of torch's, such as sums over other ranks, needs no turn.
        """
        taken: dict[int, list[float]] = defaultdict(list)
        running = ExitStack()

        def start(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            running.enter_context(self.turn())
            taken[id(optimizer)].append(-self.clock())

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.current_stream().synchronize()
            taken[id(optimizer)][-1] += self.clock()
            running.close()

        hooks = register_optimizer_step_pre_hook(start), register_optimizer_step_post_hook(end)
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def _meet(self) -> None:
        if self._together is not None:
            torch.distributed.barrier(group=self._together)


def _sharing_passes() -> torch.distributed.ProcessGroup | None:
    """The ranks that exchange data within this rank's passes: tensor, context and expert parallelism."""
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return parallel_state.get_tensor_and_context_parallel_group()  # type: ignore[no-any-return]
    # Experts are shared with data-parallel ranks, in groups that cross those of a layer: all ranks of the stage.
    mine = parallel_state.get_pipeline_model_parallel_rank()
    stages: list[int] = [0] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(stages, mine)
    return new_group([rank for rank, stage in enumerate(stages) if stage == mine])


class SerializedRecorder(NullRecorder):
    """Recorder of an iteration, or of none, with every pass in a turn."""

    def __init__(self, recorder: NullRecorder, turns: DeviceLock) -> None:
        self._recorder, self._turns = recorder, turns

    @contextmanager
    def measure(self, work: Pass) -> Iterator[None]:
        with self._turns.turn(), self._recorder.measure(work):
            yield

    def wait(self, message: ops.Message | ops.Collective | Pass) -> AbstractContextManager[None]:
        return self._recorder.wait(message)

    def reach(self, copy: Pass) -> None:
        self._recorder.reach(copy)

    def observing(self) -> AbstractContextManager[None]:
        return self._recorder.observing()

    def end(self, copies: Iterable[tuple[Pass, Any, Any]] = ()) -> None:
        self._recorder.end(copies)
