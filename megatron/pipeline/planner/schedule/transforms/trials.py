"""Changes of a schedule that are kept where they make it shorter: all at once first, then halves of what did not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import within
from megatron.pipeline.planner.schedule.time.replay import Stuck
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate

if TYPE_CHECKING:
    from megatron.pipeline.planner.schedule.time.orders import Orders

_Change = TypeVar("_Change")
_LARGE = 500  # passes from which on it pays to load what is compiled


def fits(schedule: Schedule, problem: Problem) -> bool:
    """Tell whether a changed schedule stays within the limits; only where a B allocates may it not."""
    if problem.limits is None or not any(stage.backward_allocates for stage in problem.costs.stages):
        return True
    return within(activation_peaks(schedule, problem.costs), problem.limits)


class Trials:
    """The best schedule so far, and how many more may be simulated.

    Of schedules of one length the one whose passes end earlier is better.

    Args:
        most: simulations of the whole schedule.
        braids: whether changes may be braids.
    """

    def __init__(self, schedule: Schedule, problem: Problem, most: int, braids: bool = False) -> None:
        self.best, self.left = schedule, most
        self._problem = problem
        self._orders = None if braids else _orders(schedule, problem)
        self._value = self._of(schedule)

    def begin(self, schedules: Iterable[Schedule]) -> None:
        """Take the shortest of these, if it is shorter than the one so far; these are no trials."""
        for schedule in schedules:
            if fits(schedule, self._problem) and (value := self._of(schedule))[0] < self._value[0]:
                self.best, self._value = schedule, value

    def halved(self, changes: Sequence[_Change], change: Callable[[Schedule, Sequence[_Change]], Schedule]) -> None:
        """Adopt these changes where that helps: all at once, or each half of them, and so on, down to single ones.

        Args:
            changes: of which each can be made whether or not others are, neighbours in time next to each other.
            change: a schedule with some of them.
        """
        waiting = [changes] if changes else []
        while waiting and self.left:
            some = waiting.pop()
            if not self.try_(change(self.best, some)) and len(some) > 1:
                middle = len(some) // 2
                waiting += [some[middle:], some[:middle]]

    def try_(self, schedule: Schedule) -> bool:
        """Tell whether a schedule is better than the best one, which it then is."""
        self.left -= 1
        if not fits(schedule, self._problem):
            return False
        try:
            value = self._of(schedule)
        except Stuck:
            return False
        better = value < self._value
        if better:
            self.best, self._value = schedule, value
        return better

    def _of(self, schedule: Schedule) -> tuple[float, float]:
        """Value that the problem minimises, and the sum of the moments at which passes end."""
        if self._orders:
            found = self._orders.lengths(schedule)
            return self._problem.value(found), found.ends
        timeline = simulate(schedule, self._problem.costs)
        return self._problem.value(timeline), math.fsum(timed.end for row in timeline.ranks for timed in row)


def _orders(schedule: Schedule, problem: Problem) -> Orders | None:
    """Replayer of a large schedule and its changes, where neither has braids."""
    if sum(map(len, schedule.passes)) < _LARGE:
        return None
    from megatron.pipeline.planner.schedule.time.orders import (  # compiles, which small schedules do not need
        Orders,
        can_be_compiled,
    )

    return Orders(schedule, problem.costs) if can_be_compiled(schedule) else None
