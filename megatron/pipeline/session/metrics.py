"""``--metrics FILE``: one JSON object per training iteration, appended as soon as it is known."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.pipeline.model.description import shape_of


@dataclass(frozen=True)
class Step:
    """One training iteration, as the rank with the loss saw it.

    Attributes:
        iteration: the number of iterations done, this one included.
        consumed_samples: training samples so far, over all ranks.
        batch: samples of this iteration, over all ranks.
        loss: mean over the tokens that count.
        grad_norm: before clipping; None when the optimizer skipped the step.
        seconds: of the iteration, without evaluation and checkpoints.
        step: how the optimizer stepped: "synchronous", or with post-validation "ahead", and "undone" if that had to be.
    """

    iteration: int
    consumed_samples: int
    batch: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    loss_scale: float
    seconds: float
    step: str = "synchronous"


@dataclass(frozen=True)
class Measured:
    """Measurements of an iteration over the ranks of a pipeline.

    Attributes:
        bubble_rate: the idle share of the makespan.
        span_bubble_rate: that of the span; None where iterations do not interlock.
        slowdown: the span over the simulated one; None where costs are not known in seconds.
        peak_activation_bytes: per rank.
        slow: see ``Slow.fields``.
    """

    bubble_rate: float
    span_bubble_rate: float | None
    slowdown: float | None
    peak_activation_bytes: list[int]
    slow: list[dict[str, Any]] = field(default_factory=list)


class Metrics:
    """A file that one rank appends to.

    Args:
        path: of the file; directories that are missing are made.
        seq_length: tokens of a sample.
    """

    def __init__(self, path: str, seq_length: int) -> None:
        self._path, self._seq_length = path, seq_length
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a")  # noqa: SIM115

    def write(self, step: Step, measured: Measured | None) -> str:
        """Append an iteration; returns what to tell the user if that is no longer possible, and closes the file then."""
        record = {
            "iteration": step.iteration,
            "loss": _finite(step.loss),
            "grad_norm": _finite(step.grad_norm),
            "iteration_seconds": step.seconds,
            "optimizer_step": step.step,
            "bubble_rate": measured.bubble_rate if measured else None,
            **({"span_bubble_rate": measured.span_bubble_rate} if measured and measured.span_bubble_rate is not None else {}),
            "measured_over_simulated": measured.slowdown if measured else None,
            "tokens_per_second": tokens_per_second(self._seq_length, step.batch, step.seconds),
            "peak_activation_bytes": measured.peak_activation_bytes if measured else None,
            **({"slow": measured.slow} if measured and measured.slow else {}),
        }
        try:
            self._file.write(json.dumps(record) + "\n")  # json writes floats as repr does
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # what is still buffered does not fit either
                self._file.close()
            return f" WARNING: no more metrics in {self._path} ({error.strerror}); training goes on"
        return ""

    def close(self) -> None:
        self._file.close()


def on_board(step: Step, measured: Measured | None, seq_length: int) -> dict[str, float]:
    """Values for TensorBoard or Weights & Biases, by name, that Megatron-LM does not write."""
    values: dict[str, float | None] = {"tokens-per-second": tokens_per_second(seq_length, step.batch, step.seconds)}
    if measured:
        values |= {
            "bubble-rate": measured.bubble_rate,
            "span-bubble-rate": measured.span_bubble_rate,
            "measured-over-simulated": measured.slowdown,
            "peak-activation-bytes": max(measured.peak_activation_bytes),
        }
    return {name: value for name, value in values.items() if value is not None}


def tokens_per_second(seq_length: int, batch: int, seconds: float) -> float:
    """Throughput of an iteration of ``batch`` sequences."""
    return batch * seq_length / seconds


def training_flops(args: Namespace, samples: int) -> float:
    """Floating-point operations of the matrix products in training on ``samples`` samples, without recomputation.

    Of causal attention the half that is not masked counts.
    """
    return replace(shape_of(args), microbatch=samples).training_operations(causal=True)


def _finite(value: float | None) -> float | None:
    """JSON has no word for what is not a number."""
    return value if value is not None and math.isfinite(value) else None
