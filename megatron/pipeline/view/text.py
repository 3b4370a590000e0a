"""A timeline as plain text, for terminals."""

from __future__ import annotations

from megatron.pipeline.schedule.passes import Kind, Pass
from megatron.pipeline.schedule.timeline import Timeline

# What fills a pass behind its name, so that its length shows.
_FILL = {Kind.F: "-", Kind.B: "=", Kind.W: "~", Kind.BW: "="}
_IDLE = "."


def render(timeline: Timeline, width: int = 100) -> str:
    """One line per rank, at most ``width`` characters wide, on one time axis.

    A pass is its kind and microbatch (``F0--``, ``B0==``, ``W0~~``; with several chunks ``F0.1``), or, where the line is
    too short for that, the first letter of its kind. Dots are idle time.
    """
    passes = [timed for rank in timeline.ranks for timed in rank]
    margin = len(f"rank {len(timeline.ranks) - 1} ")
    start = min((timed.start for timed in passes), default=0.0)
    columns = max(10, width - margin)
    scale = columns / timeline.makespan if timeline.makespan > 0 else 0.0
    shortest = min((timed.end - timed.start for timed in passes if timed.end > timed.start), default=0.0)
    if shortest * scale >= 1:
        # Whole columns for the shortest pass keep passes of equal length equally long.
        scale = int(shortest * scale) / shortest
    several_chunks = any(timed.work.chunk for timed in passes)

    def name(work: Pass) -> str:
        return str(work) if several_chunks else f"{work.kind}{work.microbatch}"

    named = all(len(name(timed.work)) <= int((timed.end - timed.start) * scale) for timed in passes)
    lines = []
    for index, rank in enumerate(timeline.ranks):
        line = ""
        for work, begin, end in rank:
            line += _IDLE * (round((begin - start) * scale) - len(line))
            room = max(0, round((end - start) * scale) - len(line))
            line += (name(work) if named else work.kind[:1]).ljust(room, _FILL[work.kind])[:room]
        line += _IDLE * (round(timeline.makespan * scale) - len(line))
        lines.append(f"rank {index}".ljust(margin) + line)
    return "\n".join(lines)
