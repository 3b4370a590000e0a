"""When to step ahead: an accepted step saves time, a rolled-back one costs time, and both are measured."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

_WINDOW = 32  # steps over which roll-backs are counted; after this many synchronous steps, stepping ahead is tried anew
_CALM = 4  # accepted steps in a row before the first is taken ahead; meanwhile the barrier is timed
_FEWEST, _MOST = 3, 8  # iterations of a kind, for its time to be known, and that are remembered


@dataclass(frozen=True)
class Observation:
    """Facts about a step once the iteration after it has ended; the same on all ranks.

    Attributes:
        ahead: it was taken before its validation.
        accepted: gradients were finite and needed no clipping, so that a step ahead was accepted, or would have been.
        seconds: from its end to the end of the next, divided by the microbatches in between.
        wasted: seconds of that, likewise divided, in which forwards ran ahead.
    """

    ahead: bool
    accepted: bool
    seconds: float
    wasted: float


class Policy:
    """Decides for every step whether it is taken ahead. Every rank feeds it the same, so every rank decides the same.

    A step ahead saves G seconds when it is accepted (the cost of a barrier after every iteration) and costs L when it is rolled
    back (the forwards that ran in vain, and the restoring), so stepping ahead pays while the share of roll-backs is below
    G / (G + L). All are medians over recent iterations, per microbatch; until enough steps have been rolled back, L is the time
    of the forwards that run ahead.

    Args:
        always: step ahead every time, without measuring.
    """

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._fates: deque[bool] = deque(maxlen=_WINDOW)  # whether steps were accepted
        self._waited: deque[float] = deque(maxlen=_MOST)  # seconds of iterations after a barrier
        self._saved: deque[float] = deque(maxlen=_MOST)  # of those after an accepted step ahead
        self._lost: deque[float] = deque(maxlen=_MOST)  # and after one that was rolled back
        self._wasted: deque[float] = deque(maxlen=_MOST)
        self._suspended = 0  # steps since the last one ahead
        self.ahead = always

    def observe(self, seen: Observation) -> str | None:
        """Take in the fate of a step, and decide anew; returns a line for the log if the decision is another one."""
        self._fates.append(seen.accepted)
        if seen.ahead:
            self._suspended = 0
            (self._saved if seen.accepted else self._lost).append(seen.seconds)
            self._wasted.append(seen.wasted)
        else:
            self._suspended += 1
            self._waited.append(seen.seconds)
        if self._suspended == _WINDOW:  # what was measured then may not be so any more
            self._saved.clear()
            self._lost.clear()
            self._wasted.clear()
        before, self.ahead = self.ahead, self._always or self._pays()
        if before == self.ahead:
            return None
        return f"post-validation {'on' if self.ahead else 'suspended'}: {self._reasons()}"

    @property
    def gain(self) -> float | None:
        """Seconds that an accepted step ahead saves; None until iterations of both kinds have been timed."""
        if min(len(self._waited), len(self._saved)) < _FEWEST:
            return None
        return statistics.median(self._waited) - statistics.median(self._saved)

    @property
    def break_even(self) -> float | None:
        """The share of rolled-back steps at which stepping ahead saves as much as it costs; None until both are known."""
        if self.gain is None:
            return None
        return self.gain / (self.gain + self._loss()) if self.gain > 0 else 0.0

    def _loss(self) -> float:
        if len(self._lost) < _FEWEST:
            return statistics.median(self._wasted)
        return max(0.0, statistics.median(self._lost) - statistics.median(self._waited))

    def _pays(self) -> bool:
        if len(self._waited) < _FEWEST:
            return False
        limit = self.break_even
        if limit is None:  # to find out, when all is calm
            return len(self._fates) >= _CALM and all(list(self._fates)[-_CALM:])
        # Half of the limit to come back, so that a share near it does not switch every time.
        rolled_back = self._fates.count(False) / len(self._fates)
        return rolled_back < (limit if self.ahead else limit / 2)

    def _reasons(self) -> str:
        rolled_back, limit = self._fates.count(False), self.break_even
        if self.gain is None or limit is None:
            if self.ahead:
                return f"none of the last {_CALM} steps was clipped or skipped; what stepping ahead saves is now measured"
            return "a step was rolled back before it was known what stepping ahead saves"
        share = (
            f"{rolled_back} of the last {len(self._fates)} steps were clipped or skipped ({rolled_back / len(self._fates):.1%})"
        )
        if self.gain <= 0:
            return f"stepping ahead saves nothing here ({1e3 * self.gain:.3g} ms a microbatch); {share}"
        return (
            f"{share}, and break-even is at {limit:.1%}: a step ahead saves {1e3 * self.gain:.3g} ms a microbatch "
            f"when it is accepted and costs {1e3 * self._loss():.3g} ms when it is rolled back"
        )
