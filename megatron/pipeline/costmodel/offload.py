"""k: how long copies of activations to host memory and back take, compared with computing, for one GPT on one machine.

k is the time in which a layer's activations are copied to host memory and back over the time of its F, B and W (Wan et al.,
"PipeOffload", arXiv 2503.01328, formula 1). Up to k = 1 the two copy lanes move everything while ranks compute, and with k = 2
half of it.
"""

from __future__ import annotations

from megatron.pipeline.costmodel import activations
from megatron.pipeline.costmodel.device import Device
from megatron.pipeline.shape import gpt
from megatron.pipeline.shape.gpt import Shape


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
    attention = gpt.HALF * (2 * shape.hidden + shape.queries + shape.attended + shape.keys_and_values)
    return shape.tokens * (attention + gpt.HALF * (2 if shape.gated else 1) * shape.ffn)
