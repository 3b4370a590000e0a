"""Flags of a command that was written for megatron-core's own schedules, and that another schedule replaces or excludes.

``planner/combinations/rows.py`` has them.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.flags import CHUNK_FLAGS
from megatron.pipeline.flags.validation import chunks_per_rank
from megatron.pipeline.planner import STOCK, Facts, Found, families, topics


def exclusions(args: Namespace) -> list[Found]:
    """All flags that do not go with the schedule.

    Args:
        args: as the parser has read them. Upstream's validation fills in others, in each release another set: what is really on
            behind it, an iteration asks the model's configuration (``runtime/call.py``).
    """
    return list(Facts(of_flags(args), **_chunks(args)).found((*topics.EXCLUDED, *topics.GROUPS, *topics.CHUNKS)))


def adapt(args: Namespace, default: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """Leave out what can be.

    Args:
        args: as the parser has read them.
        default: from a name to the value that it has where it is not given.

    Returns:
        The values with which it is left out, and a line for each: the flag, the reason, and the price.
    """
    left_out = [one for one in exclusions(args) if one.price]
    values = {name: default(name) for one in left_out for name in (one.row.name, *one.row.details) if hasattr(args, name)}
    return values, [f"{one.flag} {one.reason}: left out by --adapt. Price: {one.price}" for one in left_out]


def refusal(found: list[Found]) -> str:
    """All of them in one line, with what would run."""
    them, kept = "it" if len(found) == 1 else "them", [one.flag for one in found if not one.price]
    text = f"{'; '.join(f'{one.flag} {one.reason}' for one in found)}: leave {them} out, or take --pipeline-schedule {STOCK}"
    if len(kept) < len(found):
        whom = f"all but {', '.join(kept)}" if kept else them
        text += f"; the same command with --adapt leaves {whom} out, and says at what price"
    return text


def _chunks(args: Namespace) -> dict[str, Any]:
    """Facts of numbers of chunks that a family does not have."""
    name = args.pipeline_schedule
    family = families.FAMILIES.get(name)
    if family is None or family.any_chunks or not any(getattr(args, flag, None) for flag in CHUNK_FLAGS):
        return {}
    try:
        chunks = chunks_per_rank(args)
        asks = f"asks for {chunks} chunks per rank, and {name} has {family.chunks}"
    except ValueError as error:
        chunks, asks = None, f"asks for chunks per rank, of which {name} has {family.chunks} ({error})"
    if chunks == family.chunks:
        return {}
    return {"fixed_chunks": family.chunks, "asks": asks, "stages_there": args.pipeline_model_parallel_size * family.chunks}
