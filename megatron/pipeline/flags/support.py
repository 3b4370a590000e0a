"""Features of Megatron-LM under our schedules: one table, for ``mpipe support``, docs/support.md and launch's warnings.

Everything marked as tested was tested on CPUs over gloo; nothing here has run on a GPU yet.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from megatron.pipeline.flags.flags import given, neutral
from megatron.pipeline.flags.importers.upstream import table
from megatron.pipeline.flags.settings import Role

__all__ = ["FEATURES", "Feature", "Support", "check_trained", "of_flag", "unsupported", "untested"]


class Support(StrEnum):
    """Result of a feature under a schedule of ours."""

    TESTED = "tested"
    UNTESTED = "untested"  # accepted, with a warning at the start
    REFUSED = "refused"


class Feature(NamedTuple):
    """One feature of Megatron-LM.

    Attributes:
        title: what its users call it.
        names: the settings that switch it on, as Megatron-LM's parser names them, with the values that do; no values for all
            but None, False and "none".
        trainer: under this project's ``pretrain_gpt.py``. What is refused there has no flag, or a value that is refused.
        launch: under ``mpipe launch`` of Megatron-LM's own script.
        note: with what condition, or what to use in its place.
        details: settings that belong to it and, since Megatron-LM's parser gives them values of its own, do not switch it on.
    """

    title: str
    names: Mapping[str, Collection[Any]]
    trainer: Support
    launch: Support
    note: str = ""
    details: tuple[str, ...] = ()

    def is_on(self, args: Namespace) -> bool:
        return any(_is_one_of(getattr(args, name, None), values) for name, values in self.names.items())


def _is_one_of(value: Any, values: Collection[Any]) -> bool:
    """Tell whether a setting has one of the values that switch a feature on."""
    if isinstance(values, range):  # which compares what is no number, as None, with each of its numbers
        return isinstance(value, int) and value in values
    return value in values if values else value not in (None, False, "none")


def _read(row: Mapping[str, Any]) -> Feature:
    """A row of ``features.json``: a name with ``>1`` is on from 2 on."""
    on = ((*name.partition(">")[::2], values) for name, values in row["on"].items())
    names = {name: range(int(least) + 1, 2**20) if least else values for name, least, values in on}
    support = Support(row["trainer"]), Support(row["launch"])
    return Feature(row["title"], names, *support, row.get("note", ""), tuple(row.get("details", ())))


FEATURES = tuple(map(_read, table("features")))


def untested(args: Namespace) -> list[Feature]:
    """The features that these flags of Megatron-LM, as parsed, switch on, and that the launch accepts untested."""
    return [feature for feature in FEATURES if feature.launch is Support.UNTESTED and feature.is_on(args)]


def of_flag(flag: str) -> Feature | None:
    """The feature to which a flag belongs that ``pretrain_gpt.py`` does not have; None for flags that the table does not know.

    Args:
        flag: without the dashes before it: a setting of the feature, or a switch with more words, as ``fp8-format``.
    """
    given = flag.replace("-", "_")

    def has(feature: Feature) -> bool:
        names = feature.names.items()
        return given in feature.details or any(
            given == name or (not values and given.startswith(f"{name}_")) for name, values in names
        )

    return next((feature for feature in FEATURES if feature.trainer is Support.REFUSED and has(feature)), None)


def unsupported(flag: str) -> str:
    """Words about a flag of Megatron-LM that ``pretrain_gpt.py`` does not train with."""
    feature = of_flag(flag.lstrip("-"))
    if feature is None:
        return f"unknown flag {flag}; --help lists all flags, and mpipe launch runs Megatron-LM's own script with its flags"
    if feature.launch is Support.REFUSED:
        what = "does not work with our schedules: leave it out" + (f" ({feature.note})" if feature.note else "")
    else:
        runs = f"mpipe launch runs Megatron-LM's own script with it ({feature.launch}: mpipe support)"
        what = f"is not in this project's pretrain_gpt.py: {runs}"
    return f"{flag} ({feature.title}) {what}"


def check_trained(args: Namespace) -> None:
    """Refuse models that ``mpipe`` has predictions of and this project's own training does not have.

    Raises:
        ValueError: one is given; says what trains it.
    """
    if flags := given(args, *neutral(Role.PREDICTED)):
        raise ValueError(unsupported(flags[0]))
    if args.moe_token_dispatcher_type == "flex":
        raise ValueError(unsupported("--moe-token-dispatcher-type"))
