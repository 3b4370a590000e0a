"""Braids put into any schedule: a forward and the backward directly behind it in its rank's row run as one unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import ScheduleError
from megatron.pipeline.schedule.lower.program import Compute, Program, Send
from megatron.pipeline.schedule.rules.verify_programs import nothing_deadlocks

Pairs = dict[Pass, Pass]  # a forward, and the backward that runs beside it


def pairs_of(programs: Sequence[Program]) -> tuple[list[Pairs], list[Program]]:
    """On every rank, as many as there can be so that no rank waits for another for ever; and the programs with them."""
    found: list[Pairs] = [{} for _ in programs]
    braided = list(programs)
    for rank, program in enumerate(programs):
        passes = [operation.work for operation in program if isinstance(operation, Compute)]
        for first, second in pairwise(passes):
            if first.kind is not Kind.F or not second.kind.sends_gradient or first[1:3] == second[1:3]:
                continue
            tried = [*braided]
            tried[rank] = together(braided[rank], first, second)
            try:
                nothing_deadlocks(tried)
            except ScheduleError:
                continue
            braided = tried
            found[rank][first] = second
    return found, braided


def together(program: Program, first: Pass, second: Pass) -> Program:
    """What is between two passes comes before both, but for what the first one sends, which comes behind both."""
    start, end = program.index(Compute(first)), program.index(Compute(second))
    between = program[start + 1 : end]
    before = [operation for operation in between if not isinstance(operation, Send)]
    behind = [operation for operation in between if isinstance(operation, Send)]
    return (*program[:start], *before, Compute(first), Compute(second), *behind, *program[end + 1 :])


class BraidingExecutor(Executor):
    """Runs pairs as braids."""

    braids: ClassVar[Counter[str]] = Counter()  # how many have run, by the kind of the backward

    def __init__(self, program: Program, wiring: Any, handlers: Any, *rest: Any) -> None:
        self._beside, braided = PAIRS[id(program)]
        super().__init__(braided, wiring, handlers, *rest)
        self._waiting: Pass | None = None  # a forward that runs with the next pass
        self._passes: Any = handlers.passes[Kind.F].__self__

    def _compute(self, work: Pass) -> None:
        if work in self._beside:
            self._waiting = work  # all that either half needs is here: see ``together``
            return
        if self._waiting is None:
            super()._compute(work)
            return
        first, self._waiting = self._waiting, None
        assert self._beside[first] == work
        halves: list[Any] = []
        for half in (first, work):
            received = {peer: self._take(message, peer) for message, peer in self._wiring.takes.get(half, ())}
            for message, peer in self._wiring.answers.get(half, ()):
                self.transport.finish(message, peer)
            halves += [half, received, tuple(peer for _, peer in self._wiring.makes.get(half, ()))]
        for half, outputs in zip((first, work), self._passes.braid(*halves), strict=True):
            for message, peer in self._wiring.makes.get(half, ()):
                self._made[message, peer] = outputs[peer]
                self._unreleased[message] += half is first
        self.braids[work.kind.value] += 1


PAIRS: dict[int, tuple[Pairs, Program]] = {}


def install(run: Any) -> None:
    """Have a pipeline's training iterations braid."""
    from megatron.core import parallel_state

    from megatron.pipeline.runtime import iteration

    plan = run.pipeline.plan(run.microbatches)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    pairs, programs = pairs_of(plan.programs)
    PAIRS.clear()
    PAIRS[id(plan.programs[rank])] = pairs[rank], programs[rank]
    BraidingExecutor.braids.clear()
    iteration.Executor = BraidingExecutor  # type: ignore[misc, assignment]


def uninstall() -> None:
    """Have iterations run as ever."""
    from megatron.pipeline.runtime import iteration

    iteration.Executor = Executor  # type: ignore[misc, assignment]
