"""Types of flags: from a word of the command line to a number, or an error that says what is expected."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable
from typing import Any

from megatron.pipeline.planner import refusals


def number_type(kind: type[int] | type[float], wanted: str, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """Reader of a number from ``low`` to ``high``."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None
        if not low <= value <= high:
            most = f" and at most {high:,}" if value > high == _HUGE else ""
            raise argparse.ArgumentTypeError(f"expected {wanted}{most}, got {text}")
        return value

    return read


_ABOVE_0 = math.nextafter(0, 1)
_HUGE = 10**15
MOST = 10_000
_YEAR = 366 * 24 * 60  # minutes

positive_int = number_type(int, "a whole number of at least 1", 1, _HUGE)
count = number_type(int, "a whole number of at least 1", 1, 999_999_999)
# Of layers, ranks and experts, by which planning takes time and memory.
to_10_000 = number_type(int, "a whole number from 1 to 10,000", 1, MOST)
whole = number_type(int, "a whole number of at least 0", 0)
positive_float = number_type(float, "a number above 0", _ABOVE_0)
at_least_one = number_type(float, "a number of at least 1", 1, sys.float_info.max)
not_negative = number_type(float, "a number of at least 0", 0, sys.float_info.max)
minutes = number_type(float, "a number of minutes above 0, of at most a year", _ABOVE_0, _YEAR)
pass_seconds = number_type(float, "a number of seconds of at least 5", 5)
probability = number_type(float, "a number from 0 to 1", 0, 1)
share_below_one = number_type(float, "a number of at least 0 and below 1", 0, math.nextafter(1, 0))


def memory_size(text: str) -> int:
    """Bytes, from a number and its unit such as ``256MiB``."""
    try:
        size = refusals.read_amount(text)
    except ValueError:
        size = 0.0
    if not (size and isinstance(size, refusals.Bytes)):
        raise argparse.ArgumentTypeError(
            f"expected bytes above 0 such as 256MiB, in one of {', '.join(refusals.MEMORY_UNITS)}, got {text!r}"
        )
    return int(size)


def layer_pattern(text: str) -> int | list[int]:
    """A number, or Megatron's list expression of zeros and ones."""
    wanted = f"expected a number or a list such as '([0]+[1]*3)*2', got {text!r}"
    if text.isdecimal() and int(text):
        return int(text)
    if not re.fullmatch(r"[\[\]()01+, ]*(\*\s*\d{1,4}[\[\]()01+, ]*)*", text):
        raise argparse.ArgumentTypeError(wanted)
    try:
        pattern = eval(stages(text), {"__builtins__": {}})  # brackets, zeros, ones, sums and small multiples
    except (SyntaxError, TypeError):
        pattern = None
    if not isinstance(pattern, list) or not all(one in (0, 1) for one in pattern):
        raise argparse.ArgumentTypeError(wanted)
    return pattern


def stages(text: str) -> str:
    """The same text, whose factors make no more than a model can have."""
    if math.prod(int(times[:9]) for times in re.findall(r"\*\s*(\d+)", text)) > MOST**2 // 2:
        raise argparse.ArgumentTypeError(f"expected at most {MOST:,} layers, got {text!r}")
    return text


def window(text: str) -> tuple[int, int]:
    """Two whole numbers, as ``128,0``, ``(128, 0)`` or ``[128, 0]``.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    found = re.fullmatch(r"[(\[]?\s*(-?\d+)\s*,\s*(-?\d+)\s*[)\]]?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected keys before and behind, such as 128,0, got {text!r}")
    return int(found[1]), int(found[2])
