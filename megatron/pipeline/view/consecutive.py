"""Recorded iterations that follow one another, on one time axis: where they interlock, each is a parallelogram."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

from megatron.pipeline.schedule.core.reading import parse_json
from megatron.pipeline.schedule.core.timeline import Timed, Timeline

# Of an iteration's span: by how much two iterations of a rank may overlap. On GPUs, the clock is read anew for each.
_CLOCK_ERROR = 0.01


@dataclass(frozen=True)
class RecordedIteration:
    """Record of one iteration of a training: its number, the name of its schedule, and when its passes ran."""

    number: int
    schedule: str
    timeline: Timeline

    @classmethod
    def from_json(cls, text: str) -> RecordedIteration:
        """Read a recorded trace.

        Raises:
            ValueError: the text is not one, or a rank ran no pass.
        """
        timeline = Timeline.from_json(text)
        content = parse_json(text, "an iteration")
        number = content.get("iteration")
        if type(number) is not int:
            raise ValueError("no iteration's number is in there: it must be an iteration_*.json of --pipeline-trace")
        for rank, passes in enumerate(timeline.ranks):
            if not passes:
                raise ValueError(f"rank {rank} ran no pass in iteration {number}")
        return cls(number, str(content.get("schedule", "")), timeline)

    def label(self, room: float) -> str:
        """The label where it begins: the longest text with fewer characters than ``room``, or an empty one."""
        return next((text for text in (f"iteration {self.number}", str(self.number)) if len(text) < room), "")

    @property
    def starts(self) -> list[float]:
        return [passes[0].start for passes in self.timeline.ranks]

    @property
    def ends(self) -> list[float]:
        return [passes[-1].end for passes in self.timeline.ranks]


@dataclass(frozen=True)
class Consecutive:
    """Iterations of one run, in their order and without a gap.

    Raises:
        ValueError: they are fewer than two, of different numbers of ranks, or cannot be of one run in this order.
    """

    iterations: tuple[RecordedIteration, ...]

    def __post_init__(self) -> None:
        if len(self.iterations) < 2:
            raise ValueError(f"consecutive iterations are at least two, got {len(self.iterations)}: name more files")
        for before, after in zip(self.iterations, self.iterations[1:], strict=False):
            if reason := _obstacle(before, after):
                raise ValueError(reason)

    @property
    def title(self) -> str:
        first, last = self.iterations[0], self.iterations[-1]
        return f"{last.schedule or 'measured'}, iterations {first.number} to {last.number}"

    @cached_property
    def timeline(self) -> Timeline:
        """All passes of every rank; microbatches count from 0 in each iteration."""

        def joined(tables: Iterable[Sequence[Sequence[Timed]]]) -> tuple[tuple[Timed, ...], ...]:
            return tuple(tuple(timed for part in row for timed in part) for row in zip(*tables, strict=True))

        timelines = [one.timeline for one in self.iterations]
        none = ((),) * len(timelines[0].ranks)
        copies = joined(timeline.copies or none for timeline in timelines)
        return Timeline(joined(timeline.ranks for timeline in timelines), copies if any(copies) else ())

    @property
    def period(self) -> float:
        """Time of an iteration, on average, from its start to the next one's on the same rank; of the slowest rank."""
        first, last = self.iterations[0].starts, self.iterations[-1].starts
        return max(end - start for start, end in zip(first, last, strict=True)) / (len(self.iterations) - 1)

    def summary(self) -> str:
        """Period of the iterations, and their mean span: equal where iterations interlock without a gap."""
        timelines = [one.timeline for one in self.iterations]
        span, bubble = mean(one.span for one in timelines), mean(one.span_bubble_rate for one in timelines)
        return f"on average an iteration every {self.period:.4g} s (span {span:.4g} s, bubble {bubble:.1%})"


def latest(iterations: Sequence[RecordedIteration]) -> Consecutive | None:
    """The last iterations that ran one directly after another; None where that are fewer than two.

    They begin after a pause that is longer than the iterations before and after it, such as for an evaluation, or after an
    earlier run into the same directory.
    """
    chain = list(iterations[-1:])
    for before in reversed(iterations[:-1]):
        after = chain[0]
        if _obstacle(before, after):
            break
        if min(after.starts) - max(before.ends) > max(before.timeline.makespan, after.timeline.makespan):
            break
        chain.insert(0, before)
    return Consecutive(tuple(chain)) if len(chain) > 1 else None


def _obstacle(before: RecordedIteration, after: RecordedIteration) -> str:
    """Why one iteration cannot have followed the other; empty if it can."""
    if len(after.timeline.ranks) != len(before.timeline.ranks):
        return (
            f"iteration {before.number} ran on {len(before.timeline.ranks)} ranks and iteration {after.number} on "
            f"{len(after.timeline.ranks)}: name files of one run"
        )
    if after.schedule != before.schedule:
        names = f"iteration {before.number} ran {before.schedule} and iteration {after.number} {after.schedule}"
        return f"{names}: name files of one run"
    if after.number != before.number + 1:
        return (
            f"iteration {after.number} does not follow iteration {before.number}: name each from the first to the last, in that "
            "order (--log-interval 1 records all of them)"
        )
    allowed = _CLOCK_ERROR * min(before.timeline.span, after.timeline.span)
    for rank, (end, start) in enumerate(zip(before.ends, after.starts, strict=True)):
        if start < end - allowed:
            return (
                f"rank {rank} begins iteration {after.number} {end - start:.4g} s before it ends iteration {before.number}: "
                "they are not of one run"
            )
    return ""
