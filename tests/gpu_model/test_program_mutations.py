"""Each message and each collective of a program, taken out, turned round or swapped: reported without a training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpu_model.judge import SETTINGS, judge
from gpu_model.symbolic import traces
from gpu_model.test_symbolic import planned, programs
from megatron.pipeline.planner.schedule.certify.certificate import certify
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.schedule.lower.program import Join, Operation, Program, Receive, Send, Wait, describe
from megatron.pipeline.planner.schedule.lower.traffic import of_programs

Changed = tuple[str, tuple[Program, ...]]


def _without(program: Program, *places: int) -> Program:
    return tuple(operation for at, operation in enumerate(program) if at not in places)


def _swapped(program: Program, one: int, other: int) -> Program:
    operations = list(program)
    operations[one], operations[other] = program[other], program[one]
    return tuple(operations)


def _next(program: Program, at: int, like: Operation) -> int | None:
    """The next operation to or from the same peer."""
    return next(
        (
            other
            for other in range(at + 1, len(program))
            if type(program[other]) is type(like) and program[other][-1] == like[-1]  # type: ignore[misc]
        ),
        None,
    )


def _changes(program: Program) -> Iterator[tuple[str, Program]]:
    for at, operation in enumerate(program):
        match operation:
            case Send():
                yield f"without the {describe(operation)}", _without(program, at)
                other = _next(program, at, operation)
                if other is not None:
                    yield f"{describe(operation)} and the next one swapped", _swapped(program, at, other)
            case Receive(message, _):
                waits = program.index(Wait(message))
                yield f"without the {describe(operation)}", _without(program, at, waits)
            case Join(collective):
                ends = [other for other, one in enumerate(program) if one == Wait(collective)]
                yield f"without the {describe(operation)}", _without(program, at, *ends)


def changed(whole: tuple[Program, ...]) -> Iterator[Changed]:
    for rank, program in enumerate(whole):
        for title, other in _changes(program):
            yield f"rank {rank}: {title}", (*whole[:rank], other, *whole[rank + 1 :])


@pytest.mark.parametrize(("name", "ranks", "extra"), [("zb-v", 4, None), ("1f1b", 2, Vocabulary.ONE_BARRIER)])
def test_every_mutation_of_a_program_is_reported(name: str, ranks: int, extra: Vocabulary | None) -> None:
    """By the judge where it hangs; by ``mpipe certify`` where a message would be taken for another, which NCCL lets pass."""
    (schedule, costs), whole = planned(name, ranks, extra), programs(name, ranks, extra)
    missed, many = [], 0
    for title, mutant in changed(whole):
        many += 1
        hangs = judge(traces([mutant]), SETTINGS["eager, one queue"]).deadlock
        if not hangs and not certify(of_programs(schedule, mutant), costs, ()).swapped:
            missed.append(title)
    print(f"{many - len(missed)} of {many} reported")
    assert many > 50 and not missed, (many, missed)
