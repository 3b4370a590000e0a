"""The planner's one tolerance."""

from collections.abc import Iterable

# Relative: sums of floats stray in their last bits, as of fractions such as 1/3, and rounding errors are below this. A limit this
# much larger is not broken, and keeps every bound valid.
SLACK = 1e-9


def within(peaks: Iterable[float], limits: Iterable[float]) -> bool:
    """Tell whether no rank holds more than its limit."""
    return all(peak <= limit * (1 + SLACK) for peak, limit in zip(peaks, limits, strict=True))
