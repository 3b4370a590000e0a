"""What copying activations to host memory costs beside computing: k, from the shape of a GPT and a machine alone.

k is the time in which a layer's activations are copied to host memory and back over the time of its F, B and W (Wan et al.,
"PipeOffload", arXiv 2503.01328, formula 1). Up to k = 1 the two copy lanes move everything while ranks compute, and with k = 2
half of it.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.pipeline.costmodel import activations
from megatron.pipeline.costmodel.device import Device, named
from megatron.pipeline.shape import gpt
from megatron.pipeline.shape.gpt import Shape

HIDDEN_SIZES = (4096, 5120, 6144, 7168, 8192, 10240)
SEQUENCE_LENGTHS = (4096, 8192, 16384, 32768)

_UNEXPLAINED = 0.755  # see ``published_k``


# What the paper's authors reach in training: 220 and 440 TFLOP/s, and 15 and 21 GB/s.
DEVICES = {
    "A100": replace(named("A100-80GB"), efficiency=220 / 312, to_host=15e9, to_device=15e9),
    "H100": replace(named("H100-80GB"), efficiency=440 / 989, to_host=21e9, to_device=21e9),
}


def k_of(shape: Shape, device: Device, kept: float | None = None) -> float:
    """Seconds in which a layer's activations go to host memory and back, over the seconds of its F, B and W.

    Args:
        kept: bytes of a layer and microbatch that are copied; by default all that F keeps, ``activations.layer_activation``.
    """
    kept = activations.layer_activation(shape) if kept is None else kept
    return kept * (1 / device.to_host + 1 / device.to_device) / device.seconds(gpt.layer_work(shape).total)


def copy_seconds(shape: Shape, device: Device, work: float, kept: float | None = None) -> tuple[float, float]:
    """What D2H and H2D of a rank's microbatch take, in the unit in which its F, B and W take ``work``: ``--cost D2H=..,H2D=..``.

    Args:
        work: F + B + W of a rank, such as 3 where each takes 1.
        kept: as in ``k_of``.
    """
    both = work * k_of(shape, device, kept)
    to_device = both * device.to_host / (device.to_host + device.to_device)
    return both - to_device, to_device


def lean_activation(shape: Shape) -> float:
    """Bytes that F of a layer keeps where norms, the MLP's activation and dropout masks are made again: 20sbh for a plain GPT.

    That is ``activations.layer_activation`` without the outputs of both norms (4h), that of the activation function (8h) and the
    masks (2h); section 4.2 of the paper.
    """
    attention = gpt.HALF * (2 * shape.hidden + 2 * shape.queries + shape.keys_and_values)
    return shape.tokens * (attention + gpt.HALF * (2 if shape.gated else 1) * shape.ffn)


def published_shape(hidden: int, seq: int) -> Shape:
    """A layer of the models in figure 1 of the paper: heads 128 wide that share 8 groups of keys and values."""
    return replace(Shape.plain(1, hidden, hidden // 128, seq, 1), groups=8)


def published_k(hidden: int, seq: int, device: Device) -> float:
    """k of ``published_shape``.

    Formula 1 as it is printed, 10/(3(6h + s)) times operations over bytes per second, is that of heads that share nothing, and
    agrees with only 3 of the figure's 24 cells. With r = 8/(h/128) groups per head, k is 2(16 + 4r + c)/(3((20 + 4r)h + 4s)) of
    the same, and all 24 agree with c = 0.755 bytes per token and unit of width, which the paper does not explain.
    """
    shape = published_shape(hidden, seq)
    return k_of(shape, device, lean_activation(shape) + _UNEXPLAINED * shape.tokens * shape.hidden)


def grid(device: Device) -> list[list[float]]:
    """``published_k`` for all ``HIDDEN_SIZES`` (rows) and ``SEQUENCE_LENGTHS`` (columns)."""
    return [[published_k(hidden, seq, device) for seq in SEQUENCE_LENGTHS] for hidden in HIDDEN_SIZES]
