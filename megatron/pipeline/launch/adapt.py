"""Flags of a command that was written for megatron-core's own schedules, and that another schedule replaces or excludes.

``combinations/rows.py`` has them, but for numbers of chunks, which depend on the family.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from megatron.pipeline.combinations import table
from megatron.pipeline.combinations.rows import EXCLUDED, GROUPS
from megatron.pipeline.combinations.table import flag_of
from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.flags import CHUNK_FLAGS
from megatron.pipeline.flags.validation import chunks_per_rank
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.names import STOCK


class Excluded(NamedTuple):
    """A flag that does not go with the schedule.

    Attributes:
        flag: as it was given.
        reason: completes a sentence that starts with the flag.
        price: what it costs to leave it out; "" where the training would be another one.
        names: the settings that go with it.
    """

    flag: str
    reason: str
    price: str
    names: tuple[str, ...]


def exclusions(args: Namespace, validated: bool = False) -> list[Excluded]:
    """All flags that do not go with the schedule.

    Args:
        args: as the parser has read them, or ``validated``: as upstream's validation has left them.
    """
    facts = of_flags(args)
    if validated:
        facts["delay_wgrad_compute"] = False  # which our layers need
    found = [
        Excluded(one.flag, one.reason, one.price, (one.row.name, *one.row.details))
        for one in table.found(facts, EXCLUDED if validated else (*EXCLUDED, *GROUPS))
    ]
    return found if validated or args.pipeline_schedule == STOCK else [*found, *_other_chunks(args)]


def adapt(args: Namespace, default: Callable[[str], Any]) -> tuple[dict[str, Any], list[str]]:
    """Leave out what can be.

    Args:
        args: as the parser has read them.
        default: from a name to the value that it has where it is not given.

    Returns:
        The values with which it is left out, and a line for each: the flag, the reason, and the price.
    """
    left_out = [one for one in exclusions(args) if one.price]
    values = {name: default(name) for one in left_out for name in one.names if hasattr(args, name)}
    return values, [f"{one.flag} {one.reason}: left out by --adapt. Price: {one.price}" for one in left_out]


def refusal(found: list[Excluded]) -> str:
    """All of them in one line, with what would run."""
    them, kept = "it" if len(found) == 1 else "them", [one.flag for one in found if not one.price]
    text = f"{'; '.join(f'{one.flag} {one.reason}' for one in found)}: leave {them} out, or take --pipeline-schedule {STOCK}"
    if len(kept) < len(found):
        whom = f"all but {', '.join(kept)}" if kept else them
        text += f"; the same command with --adapt leaves {whom} out, and says at what price"
    return text


def _other_chunks(args: Namespace) -> Iterator[Excluded]:
    """Numbers of chunks, where the family has its own."""
    name = args.pipeline_schedule
    family = families.FAMILIES.get(name)
    if family is None:
        return
    given = tuple(flag for flag in CHUNK_FLAGS if getattr(args, flag, None))
    if given and not family.any_chunks:
        try:
            chunks = chunks_per_rank(args)
            wrong = f"asks for {chunks} chunks per rank, and {name} has {family.chunks}"
        except ValueError as error:
            chunks, wrong = None, f"asks for chunks per rank, of which {name} has {family.chunks} ({error})"
        if chunks != family.chunks:
            stages = args.pipeline_model_parallel_size * family.chunks
            flags = " and ".join(f"{flag_of(flag)} {getattr(args, flag)}" for flag in given)
            yield Excluded(flags, wrong, f"layers are spread evenly over the {stages} stages of {name}", given)
