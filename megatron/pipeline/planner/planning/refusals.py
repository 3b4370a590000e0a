"""Why there is no schedule within a limit: one value for each refused schedule, and the words for every unit of memory.

``schedule/`` raises ``LimitTooLow`` with the least limit that suffices, in the costs' unit. The command line, training and
planning again each show it in the unit in which the user gave the limit: a ``Unit``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.pipeline.planner.planning.planned import Variant
from megatron.pipeline.planner.schedule.core.costs import Costs, MemoryUnit
from megatron.pipeline.planner.schedule.core.problem import HostLimitTooLow, LimitTooLow, TooLow
from megatron.pipeline.planner.schedule.rules.verify import rounded_up

MEMORY_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "MB": 10**6, "GB": 10**9}
_MOST_NAMED = 6  # variants with the same reason; the others are counted


@dataclass(frozen=True)
class Unit:
    """Unit in which an amount of memory is written.

    Attributes:
        name: follows the number.
        size: of one, in the costs' unit.
    """

    name: str = ""
    size: float = 1.0

    def number(self, memory: float) -> str:
        return f"{memory / self.size:g}"

    def of(self, number: str) -> str:
        """The name behind a number."""
        return self.name.removesuffix("es") if number == "1" else self.name

    def amount(self, memory: float) -> str:
        return f"{self.number(memory)}{self.of(self.number(memory))}"

    def at_least(self, memory: float) -> str:
        """The amount, never less than it is: a limit that a user takes from a message suffices."""
        number = str(rounded_up(memory / self.size))
        return f"{number}{self.of(number)}"

    def needs(self, least: float, limit: float) -> str:
        return f"needs {self.at_least(least)}, limit {self.number(limit) if self.name.startswith(' ') else self.amount(limit)}"

    def too_little(self, given: str, name: str, least: float, others: Sequence[str] = ()) -> ValueError:
        """Error for a limit below what a schedule needs.

        Args:
            given: the limit as the user wrote it, with its flag.
            others: the families that can hold less.
        """
        instead = f", or take {' or '.join(others)}, which can hold less" if others else ""
        return ValueError(f"{given} is too little for {name}, which needs {self.at_least(least)}: raise it{instead}")

    def no_room(self, given: str, least: float) -> HostLimitTooLow:
        """Error for a limit of host memory below what one copy needs; ``given`` as of ``too_little``."""
        words = f"{given} has no room for one microbatch of a chunk, which takes {self.at_least(least)} or more"
        return HostLimitTooLow(f"{words}: raise it, or leave --offload out", least)


class Bytes(float):
    """An amount of memory that was given in a ``unit``, such as 20GiB."""

    unit: Unit


def read_amount(text: str) -> float:
    """A number, or ``Bytes`` of one with a unit.

    Raises:
        ValueError: it is neither.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([A-Za-z]+)", text)
    if match and match[2] in MEMORY_UNITS:
        amount = Bytes(int(float(match[1]) * MEMORY_UNITS[match[2]]))
        amount.unit = Unit(match[2], MEMORY_UNITS[match[2]])
        return amount
    number = float(text)
    if number >= 0 and (number < math.inf or "inf" in text.lower()):  # 1e400 is infinite too
        return number
    raise ValueError(f"{text!r}: expected a number of at least 0")


MICROBATCHES = Unit(" microbatches")
COSTS_UNIT = Unit()  # of a file of costs that are no bytes: any, and unnamed
MIB = Unit("MiB", 2**20)
_LEAST_LIMIT = 2**20  # bytes: a limit below is hardly meant in bytes
ROUNDED_UP = 1.15  # host memory is rounded up, and reused for what is smaller: it takes this many times the copied bytes
HOST_MIB = Unit("MiB", 2**20 / ROUNDED_UP)  # of host memory, for copied bytes


def unit_of(costs: Costs | None) -> Unit:
    """Unit of memory at the costs of a file; None for costs in microbatches."""
    if costs is None:
        return MICROBATCHES
    return MIB if costs.unit is MemoryUnit.BYTES else COSTS_UNIT


def in_unit(error: TooLow, unit: Unit, name: str, limit: float | None, host_limit: float | None) -> TooLow:
    """A refusal of a limit, or of one of host memory, worded in MiB where costs count bytes."""
    is_of_host = isinstance(error, HostLimitTooLow)
    limit = host_limit if is_of_host else limit
    if unit is not MIB or limit is None:
        return error
    if is_of_host:
        return MIB.no_room(f"--host-memory-limit {MIB.amount(limit)}", error.least)
    given = f"{limit:g}, which is in bytes (give such as 20GiB)," if limit < _LEAST_LIMIT else MIB.amount(limit)
    return LimitTooLow(str(MIB.too_little(f"--memory-limit {given}", name, error.least)), error.least)


def check_limit(
    limit: float | None,
    unit: Unit,
    flag: str = "--memory-limit",
    instead: str = "--costs FILE of mpipe costs or mpipe rehearse, or a limit in microbatches",
) -> None:
    """Raises:
    ValueError: a limit in bytes is for costs that do not count bytes.
    """
    if isinstance(limit, Bytes) and unit is not MIB:
        raise ValueError(f"{flag} of {limit.unit.amount(limit)}, but the costs do not count bytes: give {instead}")


@dataclass(frozen=True)
class Refusal:
    """Why there is no schedule of a family.

    Attributes:
        reason: a sentence for the user.
        needs: the memory that the family takes, in the costs' unit, where the limit is below it.
    """

    variant: Variant
    reason: str
    needs: float | None = None

    def short(self, unit: Unit, limit: float | None) -> str:
        """The reason in a few words, for tables."""
        if self.needs is not None and limit is not None:
            return unit.needs(self.needs, limit)
        return self.reason.removeprefix(f"{self.variant.name} ")


def folded(refused: Sequence[Refusal], unit: Unit, limit: float | None) -> list[str]:
    """Why there are no schedules: a line for every reason, with all the variants that it holds for."""
    lines: dict[str, list[str]] = {}
    for refusal in refused:
        lines.setdefault(refusal.short(unit, limit), []).append(str(refusal.variant))
    more = {why: f" and {len(names) - _MOST_NAMED} more" for why, names in lines.items() if len(names) > _MOST_NAMED}
    return [f"{', '.join(names[:_MOST_NAMED])}{more.get(why, '')}: {why}" for why, names in lines.items()]


def nothing_fits(refused: Sequence[Refusal], unit: Unit, limit: float | None) -> ValueError:
    """Error for where every schedule is refused: the least limit that one of them can take, or what else is wrong."""
    needs = {refusal.needs: refusal.variant for refusal in reversed(refused) if refusal.needs is not None}
    if needs and limit is not None:
        least = min(needs)
        needed = unit.at_least(least) if unit is MIB else rounded_up(least)
        return LimitTooLow(
            f"no schedule fits within a memory of {unit.amount(limit)}: the least that one needs is {needed}, for "
            f"{needs[least]}; raise --memory-limit to that",
            least,
        )
    reasons = {refusal.short(unit, limit) for refusal in refused}
    return ValueError(f"no schedule is possible: {'; '.join(reasons if len(reasons) == 1 else folded(refused, unit, limit))}")
