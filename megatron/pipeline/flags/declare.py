"""A flag in one row: its name, its text for ``--help``, what reads its value, its default and its topic."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from typing import Any


class Role(Enum):
    """Topic of a flag, for programs that put aside a user's flags of one kind: see ``neutral``."""

    CHUNKS = auto()  # chunks per rank, and how many microbatches each runs in turn
    LAYOUT = auto()  # how ranks share the model, its gradients and its optimizer
    SCHEDULE = auto()  # the pipeline schedule and its transformations
    DETAILS = auto()  # how --vocab-parallel and --offload work
    MEMORY = auto()  # recomputation
    FILES = auto()  # what is read at the start and written on the way
    LENGTH = auto()  # iterations, and what changes over them
    DATA = auto()  # the training data
    PREDICTED = auto()  # what mpipe predicts of models that this project's pretrain_gpt.py does not train


Flag = tuple[list[str], dict[str, Any], Role | None]  # what ``add_argument`` takes, and the role


def add_flags(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[Flag]]) -> None:
    """Add groups of flags to a parser."""
    for title, flags in groups.items():
        group = parser.add_argument_group(title)
        for names, options, role in flags:
            vars(group.add_argument(*names, **options))["role"] = role


def flag(
    names: str,
    text: str,
    values: Callable[[str], Any] | Sequence[Any] | None = None,
    default: Any = None,
    *,
    clears: str = "",
    role: Role | None = None,
    **options: Any,
) -> Flag:
    """A row of a table of flags.

    Args:
        names: the flag, and further names of it.
        text: for ``--help``.
        values: what reads the flag's value, or the values to choose from; None for a switch.
        clears: the name that a switch sets to False; without it a switch sets its own name to True.
        options: further ones of ``add_argument``.
    """
    options["help"] = text
    if clears:
        options |= {"action": "store_false", "dest": clears}
    elif values is None:
        options["action"] = "store_true"
    elif isinstance(values, Sequence):
        options |= {"choices": values, "type": type(values[0]), "default": default}
    else:
        options |= {"type": values, "default": default}
    return names.split(), options, role


chunks, layout, schedule, detail, memory, files, length, data, predicted = (partial(flag, role=role) for role in Role)
