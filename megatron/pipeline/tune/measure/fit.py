"""From times to the numbers of a ``Device``: latency and bandwidth of a link, and the efficiency of its formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from megatron.pipeline.planner.costmodel.device import Device, Link, MeasuredLayer
from megatron.pipeline.planner.costmodel.estimate import computing_seconds
from megatron.pipeline.planner.shape.gpt import Shape


@dataclass(frozen=True)
class SendingFit:
    """Messages over a link, one after another: their number, the bytes of each, and the seconds of all of them."""

    messages: int
    size: float
    seconds: float


def link(sent: Sequence[SendingFit]) -> Link:
    """The link for which ``messages * (latency + size / bandwidth)`` is nearest to the times: least squares of relative errors.

    A latency that would be negative is 0; where longer messages took no longer, the bandwidth is that of the longest.
    """
    # Each time is to be a * latency + b / bandwidth = 1, in units of itself.
    rows = [(one.messages / one.seconds, one.messages * one.size / one.seconds) for one in sent]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    latency, per_byte = 0.0, b / bb
    if determinant > 1e-9 * aa * bb:
        latency, per_byte = (a * bb - b * ab) / determinant, (aa * b - ab * a) / determinant
    if latency < 0:
        latency, per_byte = 0.0, b / bb
    if per_byte <= 0:
        longest = max(sent, key=lambda one: one.size)
        latency, per_byte = min(one.seconds / one.messages for one in sent), longest.seconds / longest.messages / longest.size
    return Link(latency, 1 / per_byte)


def ideal_seconds(shape: Shape, device: Device) -> float:
    """F, B and W of a layer where products reach the device's peak and all other kernels its bandwidth."""
    return computing_seconds(shape, replace(device, efficiency=1.0)).total


def efficiency(device: Device, layers: Sequence[tuple[Shape, MeasuredLayer]]) -> float:
    """The efficiency at which the formulas agree best with the measured layers: the median of those that each asks for.

    At most 1: what a cache makes faster than the memory's bandwidth is no reason to expect that elsewhere.
    """
    asked = [ideal_seconds(shape, device) / one.work.total for shape, one in layers]
    return min(1.0, median(asked))
