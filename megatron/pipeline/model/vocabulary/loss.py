"""The loss of a token from the statistics of every vocabulary shard, and the terms of its gradient that need all shards.

A shard k of the logits Y of a token with label g knows its maximum m_k, Z_k = sum of exp(Y - m_k), Y_g if g is one of its rows,
and the sum of Y where labels are smoothed. Together, as in arXiv 2411.05288, with w the derivative of the training's loss by
the token's:

    m = max m_k,  Z = sum of Z_k exp(m_k - m),  lse = log Z + m,  P = exp(Y - m) / Z
    loss = (1 - s) (lse - Y_g) + s (lse - mean Y) + z lse^2
    dY = w (P (1 + 2 z lse) - (1 - s) [g] - s / C)

where C is the number of rows that count and s = label_smoothing C / (C - 1), as in megatron-core's vocab_parallel_cross_entropy.
Tokens are in the order of [s, b] here, as in the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange

# Without the loss's scale in them, fp16 has few digits left for what is small among thousands of probabilities, and for
# gradients by hidden states before tokens are weighed: until then both are as many times larger.
_ENLARGED = {torch.float16: 2.0**10}


def enlarged(dtype: torch.dtype) -> float:
    """By what probabilities and gradients are multiplied while tokens are not weighed yet."""
    return _ENLARGED.get(dtype, 1.0)


@dataclass(frozen=True)
class LossSettings:
    """Terms that are added to the cross entropy.

    Attributes:
        label_smoothing: the probability that the label gives to all other rows, from 0 to less than 1.
        z_loss: factor of the squared logarithm of the softmax's denominator.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label smoothing {self.label_smoothing}: give at least 0 and less than 1")
        if self.z_loss < 0:
            raise ValueError(f"z-loss {self.z_loss}: give 0 or more")

    @property
    def statistics(self) -> int:
        """Number of values that a shard gathers for a token."""
        return 4 if self.label_smoothing else 3


class Statistics:
    """Facts that all shards have about the tokens of one microbatch, the same on every rank.

    Args:
        gathered: [shards, ``settings.statistics``, s * b] float32, the ``OutputPart.statistics`` of all shards.
        settings: of the loss.
        shape: (b, s).
        counted: rows in the softmax, over all shards.

    Attributes:
        losses: [b, s] float32.
        maximum: [s * b], m above.
        softmax_scale: [s * b], (1 + 2 z lse) / Z: what exp(Y - m) is multiplied by.
        label_share, uniform_share: what the label's row, and every row that counts, have subtracted: 1 - s and s / C.
    """

    def __init__(self, gathered: torch.Tensor, settings: LossSettings, shape: tuple[int, int], counted: int) -> None:
        maxima, sums, labelled = gathered[:, 0], gathered[:, 1], gathered[:, 2].sum(0)
        self.maximum = maxima.amax(0)
        total = (sums * torch.exp(maxima - self.maximum)).sum(0)
        logarithm = total.log()
        lse = logarithm + self.maximum
        losses = logarithm - (labelled - self.maximum)
        smoothing = 0.0
        if settings.label_smoothing and counted > 1:
            smoothing = settings.label_smoothing * counted / (counted - 1)
            losses = (1 - smoothing) * losses + smoothing * (lse - gathered[:, 3].sum(0) / counted)
        if settings.z_loss:
            losses = losses + settings.z_loss * lse.square()
        self.label_share, self.uniform_share = 1 - smoothing, smoothing / counted
        self.softmax_scale = (1 + 2 * settings.z_loss * lse) / total
        batch, sequence = shape
        self.losses = rearrange(losses, "(sequence batch) -> batch sequence", sequence=sequence, batch=batch).contiguous()


def weigh(gradient: torch.Tensor, weights: torch.Tensor, tp_rank: int = 0, tp_size: int = 1) -> torch.Tensor:
    """Multiply the gradient of every token by the token's weight, on the last stage.

    Args:
        gradient: all shards' ``OutputPart.input_gradient``, summed: [s, b, h], or [s / tp_size, b, h] under sequence parallelism.
        weights: [b, s], the derivative of the training's loss by each token's.
        tp_rank: which part of the sequence the gradient is for.
        tp_size: number of parts, 1 without sequence parallelism.
    """
    own = rearrange(weights, "batch (rank token) -> rank token batch 1", rank=tp_size)[tp_rank]
    return (gradient * (own.float() / enlarged(gradient.dtype))).to(gradient.dtype)
