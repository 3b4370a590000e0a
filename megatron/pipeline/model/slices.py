"""Microbatches in slices along the sequence: the model computes one slice at a time, with the numbers of the whole.

The schedule runs a microbatch's slices forwards in order and backwards in reverse (``Schedule.splits``). The runtime
makes a ``Slices`` per iteration and runs every pass in ``around``. In this context

* the user's forward step sees the whole microbatch (``iterator`` hands it out once per slice), and the model cuts its slice
  from what it is called with;
* positions start where the slice does;
* attention sees the keys and values of the slices before, kept until the microbatch's last backward;
* the last stage returns losses as long as the microbatch: those of earlier slices without their graph, the slice's own, and
  zeros. A loss function that is linear in the losses (all that mask, add up and divide are) so gives every slice the
  gradient of its share, and the last slice the value and the report of the whole microbatch.

Hooks on the modules do all of this while a pass runs. Between passes the model has no hooks.
Dropout masks follow from the pass's number, which counts slices, so they differ from those of the whole microbatch.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megatron.pipeline.model.adapter import adapter_of, signature
from megatron.pipeline.planner import Facts, Kind, Pass, topics


def check_slices(args: Namespace, splits: int) -> None:
    """Refuse flags under which microbatches cannot be cut into slices.

    Args:
        args: flags that have gone through the other checks of ``validate``.
        splits: slices per microbatch.

    Raises:
        ValueError: the sequence cannot be cut so, or a setting works on whole sequences only.
    """
    if splits == 1:
        return
    unit = splits * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    if args.seq_length % unit:
        below = args.seq_length // unit * unit
        ranks = f" over {args.tensor_model_parallel_size} ranks of --sequence-parallel" if unit > splits else ""
        raise ValueError(
            f"--seq-length {args.seq_length} cannot be cut into {splits} equal slices{ranks}: it must be a multiple of {unit}, "
            f"such as {f'{below} or ' if below else ''}{below + unit}; or choose another number of slices"
        )
    Facts(vars(args), splits=splits).refuse(topics.SLICES)


class Slices:
    """Facts about the microbatches that are in flight on one rank, in slices. One iteration owns it.

    Args:
        chunks: this rank's, wrapped or not.
        splits: slices per microbatch; with 1 everything here does nothing.
        keep_graphs: False for iterations without backwards: then a microbatch ends with its last forward.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], splits: int, keep_graphs: bool = True) -> None:
        self.splits = splits
        self._ends_in = (Kind.B, Kind.BW) if keep_graphs else (Kind.F,)
        self._models = unwrap_model(list(chunks))
        self._positions, self._attention = (
            [_modules(model, kind) for model in self._models] if splits > 1 else [] for kind in ("positions", "attention")
        )
        self._in_flight: defaultdict[tuple[int, int], _SlicedMicrobatch] = defaultdict(_SlicedMicrobatch)

    def around(self, work: Pass) -> AbstractContextManager[None]:
        """The context that a pass runs in: forwards, and backwards as well, since they may recompute forwards."""
        return nullcontext() if self.splits == 1 or work.kind is Kind.W else self._hooked(work)

    @contextmanager
    def _hooked(self, work: Pass) -> Iterator[None]:
        current = self._slice(work)
        model = self._models[work.chunk]
        with ExitStack() as hooks:
            hooks.enter_context(model.register_forward_pre_hook(current.cut_inputs, with_kwargs=True))
            hooks.enter_context(model.register_forward_hook(current.complete_losses, with_kwargs=True))
            for module in self._positions[work.chunk]:
                hooks.enter_context(module.register_forward_pre_hook(current.shift_positions, with_kwargs=True))
            for module in self._attention[work.chunk]:
                hooks.enter_context(module.register_forward_pre_hook(current.attend_to_earlier, with_kwargs=True))
            yield
        if work.kind in self._ends_in and current.part == (self.splits - 1 if work.kind is Kind.F else 0):
            del self._in_flight[work.chunk, work.microbatch // self.splits]

    def iterator(self, work: Pass, source: Iterator[Any] | None) -> Iterator[Any] | None:
        """The data for a forward: what the microbatch's first slice reads from ``source``, for every one of its slices."""
        if self.splits == 1 or source is None:
            return source
        current = self._slice(work)
        data = current.microbatch.data
        if current.part == 0:
            return noting(source, data)
        again = iter(tuple(data))
        if current.part == self.splits - 1:
            data.clear()
        return again

    def completes(self, work: Pass) -> bool:
        """Tell whether a forward is its microbatch's last: then its report and number of tokens are the microbatch's."""
        return work.microbatch % self.splits == self.splits - 1

    def _slice(self, work: Pass) -> _Slice:
        microbatch, part = divmod(work.microbatch, self.splits)
        return _Slice(self._in_flight[work.chunk, microbatch], part, self.splits)


def _modules(model: torch.nn.Module, kind: str) -> list[torch.nn.Module]:
    """The modules of a chunk that its adapter names as ``kind``."""
    return [module for module in model.modules() if isinstance(module, getattr(adapter_of(model), kind))]


@dataclass
class _SlicedMicrobatch:
    """State that the slices of one microbatch on one chunk share.

    Attributes:
        data: what the forward step of the first slice read, until the last slice has read it.
        losses: of the slices so far, each [batch, slice], without their graphs.
        remembered: the keys and the values, by attention module.
    """

    data: list[Any] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    remembered: dict[torch.nn.Module, tuple[_Remembered, _Remembered]] = field(default_factory=dict)


@dataclass
class _Slice:
    """One slice of a microbatch: what the modules do differently for it. The methods are hooks of torch's modules."""

    microbatch: _SlicedMicrobatch
    part: int
    splits: int

    def cut_inputs(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the model: whole tensors in, the slice's part of them on.

        Masks are causal: what would let a slice attend to later ones is cut off.

        Raises:
            ValueError: a tensor has no length that can be cut equally, an input cannot be cut, or the last stage is to
                return logits, whose loss cannot be added up over slices.
        """
        adapter, (_, *names) = adapter_of(model), signature(model).parameters
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        for name, value in inputs.items():
            if name in adapter.by_token and value is not None:
                inputs[name] = value[:, self._columns(name, value.size(1))]
            elif name == "attention_mask" and value is not None:
                columns = self._columns(name, value.size(-1))
                rows = columns if value.size(-2) > 1 else slice(None)
                inputs[name] = value[..., rows, : columns.stop]
            elif name not in adapter.whole and value is not None:
                raise ValueError(
                    f"{name} cannot be cut into {self.splits} slices: call the model without it, or choose a schedule without "
                    "slices"
                )
        if model.post_process and inputs.get("labels") is None:
            raise ValueError("the model needs labels under a schedule with slices: losses of slices add up, logits do not")
        return (), inputs

    def complete_losses(self, model: Any, _args: Any, _kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        """After the model: on the last stage the losses of the whole microbatch, with the slice's graph alone."""
        if not model.post_process:
            return output
        earlier, later = self.microbatch.losses, self.splits - 1 - self.part
        whole = torch.cat([*earlier, output, *[torch.zeros_like(output)] * later], dim=1)
        earlier.append(output.detach())
        return whole

    def shift_positions(self, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the rotary embedding, which is asked for as many positions as the slice has."""
        return args, {**kwargs, "offset": self.part * args[0]}

    def attend_to_earlier(self, attention: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Before the attention core: the keys and values of the slices so far, and the mask's rows of this one."""
        query, key, value, mask, *rest = args
        length, remembered = key.size(0), self.microbatch.remembered
        if attention not in remembered:
            remembered[attention] = _Remembered(key, self.splits), _Remembered(value, self.splits)
        keys, values = remembered[attention]
        start = self.part * length
        if mask is None and self.part > 0:
            mask = torch.ones(length, start + length, dtype=torch.bool, device=key.device).triu(start + 1)
        return (query, _Extend.apply(key, keys, start), _Extend.apply(value, values, start), mask, *rest), kwargs

    def _columns(self, name: str, size: int) -> slice:
        length, rest = divmod(size, self.splits)
        if rest:
            raise ValueError(f"{name} has {size} tokens, which cannot be cut into {self.splits} equal slices: pad the microbatch")
        return slice(self.part * length, (self.part + 1) * length)


def noting(items: Iterator[Any], noted: list[Any]) -> Iterator[Any]:
    """The items, each noted as it is read. All that is asked of them is what is next: Megatron-LM's can do no more."""
    with suppress(StopIteration):
        while True:
            noted.append(next(items))
            yield noted[-1]


class _Remembered:
    """The keys, or the values, of one microbatch in one layer, and the gradients that later slices left for them.

    Memory for the whole microbatch is there from the first slice on: every slice writes its part and attends to the
    beginning, so nothing is copied again for later slices. A slice that is recomputed writes what is there already.
    """

    def __init__(self, first: torch.Tensor, splits: int) -> None:
        self._whole = first.new_empty(first.size(0) * splits, *first.shape[1:])
        self._gradient: torch.Tensor | None = None

    def extend(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Write a slice's part, [slice, ...]; everything up to its end."""
        end = start + own.size(0)
        self._whole[start:end] = own
        # Not a view that autograd tracks: what comes behind it may be written while a backward needs it.
        return self._whole[:end].data

    def collect(self, gradient: torch.Tensor, start: int) -> torch.Tensor:
        """Add a slice's gradient by all keys it attended to. Returns the complete gradient by the slice's own keys."""
        if self._gradient is not None:
            gradient = gradient + self._gradient
        self._gradient = gradient[:start] if start else None
        return gradient[start:]


class _Extend(torch.autograd.Function):
    """From a slice's keys (values) to those of all slices so far; in the backward, to the gradient from all later ones."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, remembered: _Remembered, start: int) -> torch.Tensor:
        ctx.remembered, ctx.start = remembered, start
        return remembered.extend(own, start)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return ctx.remembered.collect(gradient, ctx.start), None, None
