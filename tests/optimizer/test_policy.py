"""When steps are taken ahead: arms by itself, is suspended while too many would be undone, and comes back."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.pipeline.runtime.optimizer.policy import Observation, Policy


def run(policy: Policy, fates: Sequence[bool], waiting: float = 10.0, saved: float = 9.0, lost: float = 14.0) -> list[str]:
    """Feed the fates of steps, each with the time that it leads to; returns the lines for the log."""
    lines = []
    for stood in fates:
        ahead = policy.ahead
        seconds = waiting if not ahead else saved if stood else lost
        lines.append(policy.observe(Observation(ahead, stood, seconds, wasted=2.0)))
    return [line for line in lines if line]


def test_it_first_measures_and_then_steps_ahead() -> None:
    policy = Policy()
    assert not policy.ahead
    (line,) = run(policy, [True] * 4)
    assert policy.ahead
    assert line == (
        "post-validation on: none of the last 4 steps was clipped or skipped; what stepping ahead saves is now measured"
    )


def test_it_waits_while_steps_are_clipped() -> None:
    policy = Policy()
    assert not run(policy, [True, True, False] * 10)
    run(policy, [True] * 4)
    assert policy.ahead


def test_an_undone_step_ends_what_has_not_been_measured() -> None:
    policy = Policy()
    run(policy, [True] * 5)
    (line,) = run(policy, [False])
    assert line == "post-validation suspended: a step was rolled back before it was known what stepping ahead saves"


def test_the_break_even_is_that_of_the_measured_times() -> None:
    policy = Policy()
    run(policy, [True] * 6)
    assert policy.break_even is None, "two iterations tell little"
    run(policy, [True] * 26)
    assert policy.break_even == 1 / (1 + 2), "saves 1; until some were undone, what ran in vain is the loss"
    run(policy, [False] * 3)
    assert policy.break_even == 1 / (1 + 4), "14 instead of 10"


def test_it_is_suspended_at_the_break_even_and_comes_back_below_half() -> None:
    policy = Policy()
    run(policy, [True] * 32)
    lines = run(policy, [False] * 7)
    assert not policy.ahead
    assert lines == [
        "post-validation suspended: 7 of the last 32 steps were clipped or skipped (21.9%), and break-even is at 20.0%: a step "
        "ahead saves 1e+03 ms a microbatch when it is accepted and costs 4e+03 ms when it is rolled back"
    ]
    run(policy, [True] * 28)
    assert not policy.ahead, "4 of 32 are more than a tenth"
    (line,) = run(policy, [True])
    assert policy.ahead
    assert line.startswith("post-validation on: 3 of the last 32")


def test_what_saves_nothing_is_suspended_and_tried_again_later() -> None:
    policy = Policy()
    lines = run(policy, [True] * 8, saved=10.5)
    assert not policy.ahead
    assert lines[1] == (
        "post-validation suspended: stepping ahead saves nothing here (-500 ms a microbatch); 0 of the last 7 steps were "
        "clipped or skipped (0.0%)"
    )
    run(policy, [True] * 30)
    assert not policy.ahead
    run(policy, [True] * 2)
    assert policy.ahead


def test_always() -> None:
    policy = Policy(always=True)
    assert policy.ahead
    assert not run(policy, [False] * 50)
    assert policy.ahead
