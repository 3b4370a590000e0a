"""How ``mpipe`` reads numbers from its command line, and how it says what is wrong: in one line."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import NoReturn, TypeAlias

Numbers: TypeAlias = dict[str, float]


def checked(given: object, names: tuple[str, ...]) -> Numbers:
    """Numbers by name, from the command line or a file.

    Raises:
        ValueError: not a table of numbers, an unknown name, or a number out of range.
    """
    # The range keeps sums and ratios of costs, over any number of passes, within what a float can hold.
    allowed = f"allowed are {', '.join(names)}, each 0 or between 1e-100 and 1e100"
    if not isinstance(given, dict):
        raise ValueError(f"expected costs by name, got {given!r}; {allowed}")
    for name, value in given.items():
        if name not in names:
            raise ValueError(f"unknown cost {name!r}; {allowed}")
        if type(value) not in (int, float) or not (value == 0 or 1e-100 <= value <= 1e100):
            raise ValueError(f"{name}={value}; {allowed}")
    return {name: float(value) for name, value in given.items()}


def numbers(*names: str) -> Callable[[str], Numbers]:
    """An argument type for ``F=1,B=2`` with these names."""

    def parse(text: str) -> Numbers:
        given: Numbers = {}
        for item in text.split(","):
            name, equals, value = (part.strip() for part in item.partition("="))
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if not equals or name in given:
                raise argparse.ArgumentTypeError(
                    f"{text!r}: expected each of {', '.join(names)} at most once, as in {names[0]}=1"
                )
            given[name] = number
        try:
            return checked(given, names)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None

    return parse


def limit(text: str) -> float:
    """An argument type for a memory limit in microbatches."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not limit >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of microbatches of at least 0")
    return limit


class Parser(argparse.ArgumentParser):
    """Complains in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message} (see {self.prog} --help)"))


def complain(message: str) -> int:
    """One line on stderr; returns the exit code of bad input."""
    print("mpipe:", " ".join(message.split()), file=sys.stderr)
    return 2
