"""The gradient of a shard that is both input and output layer, in an order that no schedule decides."""

from __future__ import annotations

import torch


class TiedGradient:
    """Keeps what IB adds to a tied weight apart from what T adds, until the iteration has added all of both.

    T and IB each come in microbatch order, but which T comes before which IB is the schedule's, and a sum of floats depends on
    its order. So these are two sums, as those of the first and the last stage without vocabulary parallelism.
    """

    def __init__(self) -> None:
        self._missing = 0
        self._sum: torch.Tensor | None = None

    def expect(self, microbatches: int) -> None:
        """Start an iteration with this number of T and of IB."""
        self._missing, self._sum = 2 * microbatches, None

    def of_input(self, total: torch.Tensor) -> torch.Tensor:
        """Tensor that IB adds to, in place of the weight's gradient, whose shape and type it has."""
        if self._sum is None:
            self._sum = torch.zeros_like(total)
        return self._sum

    def added(self, total: torch.Tensor) -> None:
        """A T or an IB has added its part. The last one joins the sums, before DDP is notified.

        Args:
            total: the weight's gradient, to which T has added.
        """
        assert self._missing > 0, "expect() says how many there are"
        self._missing -= 1
        if not self._missing and self._sum is not None:
            total.add_(self._sum)
            self._sum = None
