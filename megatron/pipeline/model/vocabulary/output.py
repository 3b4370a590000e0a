"""The output layer in shards: S makes the logits of a shard's rows and what the loss needs of them, T their gradients.

What is kept from S to T is the logits, in the model's precision; elementwise work turns them into gradients in float32, in
place and a few tokens at a time, so that no float32 copy of all logits exists at any time. See ``loss.py`` for the formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from einops import rearrange

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.backward.linear import accumulate, gradient_of
from megatron.pipeline.distributed import sequence
from megatron.pipeline.model.vocabulary.input import locate
from megatron.pipeline.model.vocabulary.loss import LossSettings, Statistics, enlarged
from megatron.pipeline.model.vocabulary.tied import TiedGradient
from megatron.pipeline.planner import Shards

_BY_TOKEN = "sequence batch hidden -> (sequence batch) hidden"
_ELEMENTS = 4 * 1024**2  # logits in float32 at a time, on a CPU


@cache
def _rows_at_once(columns: int, device: torch.device) -> int:
    """Number of tokens whose logits elementwise work takes at a time: in float32 they fill a GPU's cache twice, so that kernels
    are few
    and most of what one writes is still there for the next."""
    elements = torch.cuda.get_device_properties(device).L2_cache_size // 2 if device.type == "cuda" else _ELEMENTS
    return max(1, elements // columns)


class OutputShard(torch.nn.Module):
    """A shard of the output layer.

    Args:
        weight: [shards.rows, h].
        shards: how the vocabulary is cut.
        index: which shard this is.
        settings: of the loss.
        tp_group: tensor-parallel ranks, each of which has another shard; None for no such ranks.
        sequence_parallel: hidden states are slices of the sequence over ``tp_group``.
        logits_limit: bytes that the logits of this shard may take in float32 for a microbatch. If all tokens' would take more,
            S makes the logits of some tokens at a time and keeps none of them, and T makes them again: a fourth product for
            every three, for memory that does not grow with the vocabulary. At least one token's are made at a time.
        tied: for a weight that is the embedding's, whose module owns, saves and reduces it.
    """

    register_wgrad_accumulation_and_reduce_hooks = weight_tasks.register_hook

    weight: torch.nn.Parameter

    def __init__(
        self,
        weight: torch.nn.Parameter,
        shards: Shards,
        index: int,
        settings: LossSettings,
        tp_group: torch.distributed.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        logits_limit: int | None = None,
        tied: TiedGradient | None = None,
    ) -> None:
        super().__init__()
        self.tied = tied
        if tied:
            self.__dict__["weight"] = weight  # past torch.nn.Module, which would register it
        else:
            self.weight = weight
            weight_tasks.prepare(weight)
        self.shards = shards
        self.index = index
        self.settings = settings
        self.counted = shards.counted(index)
        self.sequence_group = tp_group if sequence_parallel else None
        self._tokens_at_once = None if logits_limit is None else max(1, logits_limit // (4 * shards.rows))

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, labels: torch.Tensor, with_gradient: bool) -> OutputPart:
        """S.

        Args:
            hidden: [s, b, h], or [s / t, b, h] under sequence parallelism; the last stage's output after the final norm.
            labels: [b, s].
            with_gradient: also make what ``OutputPart.input_gradient`` needs (the variant with one barrier).
        """
        return OutputPart(self, hidden, labels, with_gradient)

    def pieces(self, tokens: int) -> list[slice]:
        """The tokens whose logits exist at a time; one piece if there is no limit."""
        return list(_slices(tokens, self._tokens_at_once or tokens))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, rows] of hidden states [tokens, h]; minus infinity for rows that are not in the softmax."""
        logits = hidden @ self.weight.t()
        logits[:, self.counted :] = -torch.inf
        return logits


class OutputPart:
    """Results of a shard for one microbatch's last hidden states, between S and T.

    Attributes:
        statistics: [n, s * b] float32, to be gathered over all shards: maximum, sum of exponentials relative to it, the label's
            logit or 0, and with label smoothing the sum of the logits; see ``loss.Statistics``.
    """

    def __init__(self, layer: OutputShard, hidden: torch.Tensor, labels: torch.Tensor, with_gradient: bool) -> None:
        self._layer = layer
        self._hidden = hidden
        self._row, self._own = locate(rearrange(labels, "batch sequence -> (sequence batch)"), layer.shards, layer.index)
        whole, gathering = sequence.gather(hidden, layer.sequence_group)
        gathering.wait()
        self._shape = whole.shape
        tokens = rearrange(whole, _BY_TOKEN)
        pieces = layer.pieces(len(tokens))
        self._logits: torch.Tensor | None = None
        self._products = torch.empty_like(tokens) if with_gradient else None
        self.statistics = torch.empty((layer.settings.statistics, len(tokens)), dtype=torch.float32, device=tokens.device)
        for piece in pieces:
            logits = layer.logits(tokens[piece])
            if len(pieces) == 1:
                self._logits = logits
            probabilities = None
            if with_gradient:
                probabilities = logits if self._logits is None else torch.empty_like(logits)
            self._read(logits, piece, probabilities)
            if self._products is not None and probabilities is not None:
                torch.mm(probabilities, layer.weight, out=self._products[piece])

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors that are kept until T; under sequence parallelism this rank's slice of the hidden states only."""
        return [tensor for tensor in (self._hidden, self._logits, self._products, self._row, self._own) if tensor is not None]

    def _read(self, logits: torch.Tensor, piece: slice, probabilities: torch.Tensor | None) -> None:
        """Fill in the statistics of some tokens, and the softmax over this shard's rows, which may go where the logits are.

        Without the label: where it is nearly certain its row and the label's share cancel, which only float32 gets right.
        """
        maximum, total, labelled, *summed = self.statistics[:, piece]
        # Finite where no row counts, so that the exponentials there are 0 and not NaN.
        torch.clamp(logits.amax(1).float(), min=torch.finfo(torch.float32).min, out=maximum)
        labelled.copy_(self._at_labels(logits, piece).masked_fill(~self._own[piece], 0))
        for out in summed:
            torch.sum(logits[:, : self._layer.counted], 1, dtype=torch.float32, out=out)
        for rows in _slices(len(logits), _rows_at_once(logits.size(1), logits.device)):
            exponentials = torch.sub(logits[rows], maximum[rows, None]).exp_()
            torch.sum(exponentials, 1, out=total[rows])
            if probabilities is not None:
                # Where a row counts, the sum is 1 or more.
                scale = enlarged(logits.dtype) / total[rows].clamp(min=1)
                torch.mul(exponentials, scale[:, None], out=probabilities[rows])
        if probabilities is not None:
            self._put_at_labels(probabilities, piece, torch.zeros_like(total))

    def _at_labels(self, values: torch.Tensor, piece: slice) -> torch.Tensor:
        """Values [tokens, rows] in the labels' rows; anything for labels of other shards."""
        return values.gather(1, self._row[piece, None])[:, 0]

    def _put_at_labels(self, values: torch.Tensor, piece: slice, new: torch.Tensor) -> None:
        """Replace values [tokens, rows] in the labels' rows, for the labels that are this shard's."""
        chosen = torch.where(self._own[piece], new.to(values.dtype), self._at_labels(values, piece))
        values.scatter_(1, self._row[piece, None], chosen[:, None])

    def _label_share(self, statistics: Statistics) -> torch.Tensor:
        """[s * b] the label's gradient before tokens are weighed and without what all rows get; 0 for labels of other shards."""
        probability = torch.exp(self.statistics[2] - statistics.maximum) * statistics.softmax_scale
        return (probability - statistics.label_share).masked_fill_(~self._own, 0)

    @torch.no_grad()
    def input_gradient(self, statistics: Statistics, tp_group: torch.distributed.ProcessGroup | None = None) -> torch.Tensor:
        """This shard's part of the gradient by the hidden states, in their shape, for ``loss.weigh`` to finish.

        To be summed over the pipeline's ranks, and without sequence parallelism over tensor-parallel ranks. Once, for a part
        made with ``with_gradient``.

        Args:
            statistics: of all shards.
            tp_group: the tensor-parallel ranks, over which sequence parallelism sums; None for the layer's own group.
        """
        assert self._products is not None
        layer, weight = self._layer, self._layer.weight
        maximum, total = self.statistics[:2]
        scale = total * torch.exp(maximum - statistics.maximum) * statistics.softmax_scale
        gradient = self._products * scale[:, None]
        self._products = None
        gradient += weight[self._row] * (enlarged(weight.dtype) * self._label_share(statistics))[:, None]
        if statistics.uniform_share:
            uniform = enlarged(weight.dtype) * statistics.uniform_share
            gradient -= uniform * weight[: layer.counted].sum(0, dtype=torch.float32)
        group = layer.sequence_group and (tp_group or layer.sequence_group)
        part, reduction = sequence.reduce_scatter(gradient.to(weight.dtype).view(self._shape), group)
        reduction.wait()
        return part

    @torch.no_grad()
    def backward(self, statistics: Statistics, weights: torch.Tensor, with_gradient: bool) -> torch.Tensor | None:
        """T: add the microbatch's gradient to that of the weight, and notify DDP. Once.

        Args:
            statistics: of all shards.
            weights: [b, s], the derivative of the training's loss by each token's.
            with_gradient: also make this shard's part of the gradient by the hidden states (the variants with two barriers).

        Returns:
            With ``with_gradient`` that part, in the shape of the hidden states, to be summed over the pipeline's ranks, and
            without sequence parallelism over tensor-parallel ranks; None otherwise.
        """
        layer = self._layer
        whole, gathering = sequence.gather(self._hidden, layer.sequence_group)
        weights = rearrange(weights, "batch sequence -> (sequence batch)").float()
        pieces, tokens = layer.pieces(len(weights)), rearrange(whole, _BY_TOKEN)
        gradient = torch.empty_like(whole) if with_gradient else None
        part, reduction = None, None
        if self._logits is None:
            gathering.wait()  # otherwise behind the work before the weight gradient
        for piece in pieces:
            logits = layer.logits(tokens[piece]) if self._logits is None else self._logits
            self._differentiate(logits, piece, statistics, weights)
            if gradient is not None:
                torch.mm(logits, layer.weight, out=rearrange(gradient, _BY_TOKEN)[piece])
                if piece is pieces[-1]:
                    part, reduction = sequence.reduce_scatter(gradient, layer.sequence_group)
            if self._logits is not None:
                gathering.wait()
            accumulate(layer.weight, logits, tokens[piece])
        self._logits = None
        if layer.tied:
            layer.tied.added(gradient_of(layer.weight))
        weight_tasks.notify(layer.weight)
        if reduction is not None:
            reduction.wait()
        return part

    def _differentiate(self, logits: torch.Tensor, piece: slice, statistics: Statistics, weights: torch.Tensor) -> None:
        """Put the gradient by the logits of some tokens in their place."""
        uniform = statistics.uniform_share * weights[piece]
        at_labels = self._label_share(statistics)[piece] * weights[piece] - uniform
        maximum, scale = statistics.maximum[piece], statistics.softmax_scale[piece] * weights[piece]
        for rows in _slices(len(logits), _rows_at_once(logits.size(1), logits.device)):
            part = torch.sub(logits[rows], maximum[rows, None]).exp_().mul_(scale[rows, None])
            if statistics.uniform_share:
                part[:, : self._layer.counted] -= uniform[rows, None]
            logits[rows] = part
        self._put_at_labels(logits, piece, at_labels)


def _slices(length: int, size: int) -> Iterator[slice]:
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))
