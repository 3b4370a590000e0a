"""When to step ahead: a step that stands saves time, one that is undone costs some, and how often each happens is measured."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

_WINDOW = 32  # steps whose fate tells how often one is undone
_FIRST = 4  # iterations that all end in a barrier, to know what that costs; the first of them is not counted
_TIMES = 8  # of each kind of iteration that are remembered


@dataclass(frozen=True)
class Observation:
    """What is known of a step once the iteration after it has ended; the same on all ranks.

    Attributes:
        ahead: it was taken before its verdict.
        stood: gradients were finite and needed no clipping, so that a step ahead stood, or would have.
        seconds: from its end to the end of the next, divided by the microbatches in between.
        wasted: seconds of that, likewise divided, in which forwards ran ahead.
    """

    ahead: bool
    stood: bool
    seconds: float
    wasted: float


class Policy:
    """Decides for every step whether it is taken ahead. Every rank feeds it the same, so every rank decides the same.

    A step ahead saves G seconds when it stands (what a barrier after every iteration costs) and costs L when it is undone (the
    forwards that ran in vain, and the way back), so stepping ahead pays while the share of steps that are undone is below
    G / (G + L). All are medians over recent iterations; until a step has been undone, L is the time of the forwards that run
    ahead.

    Args:
        always: never step otherwise, whatever is measured.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._fates: deque[bool] = deque(maxlen=_WINDOW)  # whether steps stood
        self._waited: deque[float] = deque(maxlen=_TIMES)  # seconds of iterations after a barrier
        self._saved: deque[float] = deque(maxlen=_TIMES)  # of those after a step ahead that stood
        self._lost: deque[float] = deque(maxlen=_TIMES)  # and after one that was undone
        self._wasted: deque[float] = deque(maxlen=_TIMES)
        self._seen = 0
        self.ahead = always

    def observe(self, seen: Observation) -> str | None:
        """Take in the fate of a step, and decide anew; returns a line for the log if the decision is another one."""
        self._seen += 1
        self._fates.append(seen.stood)
        if seen.ahead:
            (self._saved if seen.stood else self._lost).append(seen.seconds)
            self._wasted.append(seen.wasted)
        elif self._seen > 1:
            self._waited.append(seen.seconds)
        before, self.ahead = self.ahead, self._always or self._pays()
        if before == self.ahead:
            return None
        return f"post-validation {'on' if self.ahead else 'suspended'}: {self._reasons()}"

    @property
    def undone(self) -> float:
        """The share of recent steps that a verdict would have undone."""
        return self._fates.count(False) / len(self._fates) if self._fates else 0.0

    @property
    def break_even(self) -> float | None:
        """The share at which stepping ahead saves as much as it costs; None until iterations of both kinds have been timed."""
        if not self._waited or not self._saved:
            return None
        gain = max(0.0, statistics.median(self._waited) - statistics.median(self._saved))
        return gain / (gain + self._loss()) if gain else 0.0

    def _loss(self) -> float:
        if self._lost:
            return max(0.0, statistics.median(self._lost) - statistics.median(self._waited))
        return statistics.median(self._wasted)

    def _pays(self) -> bool:
        if self._seen < _FIRST:
            return False
        limit = self.break_even
        if limit is None:  # not yet tried: when all is calm
            return all(list(self._fates)[-_FIRST:])
        # Half of the limit to come back, so that a share near it does not go to and fro.
        return self.undone <= (limit if self.ahead else limit / 2)

    def _reasons(self) -> str:
        undone = f"{self._fates.count(False)} of the last {len(self._fates)} steps were clipped or skipped"
        limit = self.break_even
        if limit is None:
            return f"{undone}; what stepping ahead saves is now measured"
        gain = max(0.0, statistics.median(self._waited) - statistics.median(self._saved))
        return (
            f"{undone}, {self.undone:.1%}; break-even {limit:.1%}: per microbatch a step ahead saves {1e3 * gain:.3g} ms when it "
            f"stands and costs {1e3 * self._loss():.3g} ms when it is undone"
        )
