"""Planning of batches in a process of its own: the interpreter that trains has its passes to run."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron.pipeline.planning.every_batch import ordered, without_loads
from megatron.pipeline.planning.planned import Planned
from megatron.pipeline.planning.request import Request
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.schedule.time.simulate import simulate

_NICER = 10  # than the training, whose own threads go first where there are too few cores


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A plan for a batch of unequal microbatches, verified and proved.

    Attributes:
        planned: with its programs.
        of_equal: what the order of passes for equal microbatches takes with these, in the costs' unit.
    """

    planned: Planned
    of_equal: float

    def packed(self) -> bytes:
        """All of it in a message, with what is computed at first use."""
        _ = self.planned.programs, self.planned.leads
        return zlib.compress(pickle.dumps(self))

    @classmethod
    def unpacked(cls, message: bytes) -> PlannedBatch:
        batch: PlannedBatch = pickle.loads(zlib.decompress(message))
        return batch


def plan_batch(request: Request, posting: Posting = Posting.SINGLE, any_order: bool = False) -> PlannedBatch:
    """Plan for the loads of a request, the same on every machine; never longer than the order for equal microbatches where that
    one fits into the limits.

    Args:
        posting: how sends and receives are started.
        any_order: the microbatches may change places: see ``ordered``.

    Raises:
        ValueError: as ``Request.plan`` and ``ordered``.
    """
    planned = ordered(request) if any_order else request.plan()
    problem, equal = planned.problem, _equal(pickle.dumps(replace(without_loads(request), quick=False)))
    given = request.problem().costs
    of_equal = problem.value(simulate(equal, given))
    if of_equal < planned.value:
        try:
            verify(equal, given, problem.limits)
            planned = replace(planned, schedule=equal, problem=replace(problem, costs=given), order=None)
        except ValueError:
            pass  # it holds too much with these
    verify_programs(planned.schedule, planned.programs, posting)
    return PlannedBatch(planned, of_equal)


@lru_cache(maxsize=8)
def _equal(pickled: bytes) -> Schedule:
    """The schedule of a request for equal microbatches; requests with functions are equal as bytes alone."""
    request: Request = pickle.loads(pickled)
    return request.plan().schedule


class PlanningProcess:
    """Plans batches one after the other, in a process that starts with the first and ends with this one."""

    def __init__(self) -> None:
        self._asking = ThreadPoolExecutor(1, "planning of batches")
        self._process: subprocess.Popen[bytes] | None = None

    def plan(self, request: Request, posting: Posting, any_order: bool) -> Future[bytes]:
        """Start ``plan_batch``, whose answer comes packed; one that has not begun may be cancelled."""
        return self._asking.submit(self._ask, request, posting, any_order)

    def _ask(self, *asked: Any) -> bytes:
        if self._process is None or self._process.poll() is not None:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-c", f"from {__name__} import main; main()"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        sent, received = self._process.stdin, self._process.stdout
        assert sent is not None and received is not None, "both are pipes"
        pickle.dump(asked, sent)
        sent.flush()
        answer: bytes | ValueError = pickle.load(received)
        if isinstance(answer, ValueError):
            raise answer
        return answer


def _answer(asked: Any) -> bytes | ValueError:
    try:
        return plan_batch(*asked).packed()
    except Exception as error:  # the training goes on, and says so
        return ValueError(f"{type(error).__name__}: {error}")


def main() -> None:
    """Answer requests until the process that asks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
