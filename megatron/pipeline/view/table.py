"""Tables as plain text: columns under their heads, and every schedule that was tried, with the reason why it was not taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatron.pipeline.planning.choose import Candidate, Choice, Refusal
from megatron.pipeline.schedule.core.problem import Objective

Amount = Callable[[float], str]


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> str:
    """Columns under their heads: the first and the last ``words`` ones to the left, numbers to the right."""
    lines = (heads, *rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, *range(len(heads) - words, len(heads))}

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column in left else text.rjust(widths[column])

    return "\n".join("  ".join(map(cell, range(len(heads)), line)).rstrip() for line in lines)


def choice_table(
    choice: Choice,
    planned: Sequence[Candidate],
    refused: Sequence[Refusal],
    why: Callable[[Refusal], str],
    time: Amount = "{:g}".format,
    memory: Amount = "{:g}".format,
) -> str:
    """All candidates, the best first, and why each of the others is not taken.

    Args:
        why: from a schedule that cannot be had to the reason.
        time, memory: how amounts of the costs' units are written.
    """
    problem = choice.best.problem
    goal, other = (Objective.MAKESPAN, Objective.SPAN) if problem.objective is Objective.MAKESPAN else Objective
    heads = ["schedule", goal, "bubble", other, "memory", "above bound", "why not"]
    if problem.jitter:
        heads.insert(1, "expected")
    cells = []
    for candidate in sorted(planned, key=lambda candidate: candidate is not choice.best):
        timeline = candidate.timeline
        cells.append(
            [
                str(candidate.variant),
                *([time(candidate.value)] if problem.jitter else []),
                time(goal.length(timeline)),
                f"{goal.bubble_rate(timeline):.1%}",
                time(other.length(timeline)),
                memory(candidate.peak),
                f"{candidate.gap:z.1%}",
                choice.why_not.get(candidate.variant, "-"),
            ]
        )
    for refusal in refused:
        cells.append([str(refusal.variant), *["-"] * (len(heads) - 2), why(refusal)])
    return plain_table(heads, cells, words=1)
