"""Planning in a process of its own: the interpreter that trains has its passes to run."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
import zlib
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from queue import SimpleQueue
from typing import Any

from megatron.pipeline.planner.planning.every_batch import ordered, without_loads
from megatron.pipeline.planner.planning.no_gc import without_gc
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Posting
from megatron.pipeline.planner.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.planner.schedule.time.simulate import simulate

_PR_SET_PDEATHSIG = 1  # of prctl(2): a signal when the thread that has started this process ends
_NICER = 10  # than the training, whose own threads go first where there are too few cores


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A plan for a batch, verified and proved.

    Attributes:
        planned: with its programs.
        of_equal: what the order of passes for equal microbatches takes with these, or the one in use, in the costs' unit.
    """

    planned: Planned
    of_equal: float

    @cached_property
    def gain(self) -> float:
        """Share by which it is shorter than the order for equal microbatches."""
        return 1 - self.planned.value / self.of_equal if self.of_equal else 0.0

    def packed(self) -> bytes:
        """All of it in a message, with what training computes at first use, and without what it does not."""
        _ = self.gain, self.planned.programs, self.planned.leads
        vars(self.planned).pop("timeline", None)
        return zlib.compress(pickle.dumps(self), level=1)

    @classmethod
    def unpacked(cls, message: bytes) -> PlannedBatch:
        batch: PlannedBatch = pickle.loads(zlib.decompress(message))
        return batch


def plan_batch(
    request: Request, posting: Posting = Posting.SINGLE, any_order: bool = False, used: Schedule | None = None
) -> PlannedBatch:
    """Plan for a request, the same on every machine; never longer than the searched order for equal microbatches, or the one that
    is in use, where that fits into the limits.

    Args:
        posting: how sends and receives are started.
        any_order: the microbatches may change places: see ``ordered``.
        used: the order in use, which stays where it is as short.

    Raises:
        ValueError: as ``Request.plan`` and ``ordered``.
    """
    planned = ordered(request) if any_order else request.plan()
    problem, given = planned.problem, request.problem().costs
    other = used or planned.schedule
    if used is None and (request.quick or given.loads):
        other = _equal(pickle.dumps(replace(without_loads(request), quick=False)))
    of_other = problem.value(simulate(other, given))
    if of_other < planned.value or (used is not None and of_other == planned.value):
        with suppress(ValueError):  # it holds too much with these
            verify(other, given, problem.limits)
            planned = replace(planned, schedule=other, problem=replace(problem, costs=given), order=None)
    verify_programs(planned.schedule, planned.programs, posting)
    return PlannedBatch(planned, of_other)


@lru_cache(maxsize=8)
def _equal(pickled: bytes) -> Schedule:
    """The schedule of a request for equal microbatches; requests with functions are equal as bytes alone."""
    request: Request = pickle.loads(pickled)
    return request.plan().schedule


class PlanningProcess:
    """Plans one after the other, in a process that starts with the first and ends with this one.

    Args:
        patience: seconds that a plan may take; then the process counts as stopped, and is ended. The next plan starts another.
    """

    def __init__(self, patience: float = 120) -> None:
        self._patience = patience
        self._asked: SimpleQueue[tuple[Future[bytes], Any]] = SimpleQueue()
        self._asking: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def plan(self, request: Request, posting: Posting, any_order: bool = False, used: Schedule | None = None) -> Future[bytes]:
        """Start ``plan_batch``, whose answer comes packed; one that has not begun may be cancelled.

        In the future are a ``ValueError`` of ``plan_batch``, and a ``ChildProcessError`` where the process has ended.
        """
        if self._asking is None:  # a daemon, as an executor's thread would keep this process waiting for its last plan
            self._asking = threading.Thread(target=self._ask_all, name="planning", daemon=True)
            self._asking.start()
            atexit.register(self._end)
        plan: Future[bytes] = Future()
        self._asked.put((plan, (request, posting, any_order, used)))
        return plan

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask_all(self) -> None:
        while True:
            plan, asked = self._asked.get()
            if plan.set_running_or_notify_cancel():
                try:
                    plan.set_result(self._ask(pickle.dumps(asked)))
                except Exception as error:  # the training goes on, and says so
                    plan.set_exception(error)

    def _ask(self, asked: bytes) -> bytes:
        if self._process is None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-c", f"from {__name__} import main; main()"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None and received is not None, "both are pipes"
        limit = threading.Timer(self._patience, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            sent.write(asked)
            sent.flush()
            answer: bytes | ValueError = pickle.load(received)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self._end()
            code, self._process = self._process.returncode, None
            with suppress(OSError):  # of what could not be sent
                sent.close()
            raise ChildProcessError(
                f"the process that plans has ended with code {code}, or took more than {self._patience:g} s and was ended; the "
                "next plan starts another"
            ) from error
        finally:
            limit.cancel()
        if isinstance(answer, ValueError):
            raise answer
        return answer


def _answer(asked: Any) -> bytes | ValueError:
    try:
        with without_gc():
            return plan_batch(*asked).packed()
    except ValueError as error:
        return error
    except Exception as error:  # the training goes on, and says so
        return ValueError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until the process that asks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # a process that is stopped sees no end of its input
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # where the training is in real time
        os.sched_setaffinity(0, range(os.cpu_count() or 1))  # and bound to a core
    os.nice(_NICER)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anybody prints is no answer
    while True:
        try:
            asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_answer(asked), answers)
        answers.flush()
