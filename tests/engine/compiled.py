"""Transformer Engine's compiled module in operations of torch: what its linears, norms and optimizer call.

Products are in float32 and rounded once, to what they are added to or stored in, as cuBLAS does. Sums are in the order of torch's
CPU kernels: the same call gives the same bits. A product of numbers in FP8 (``quantized.py``) reads the copy, by rows or by
columns, that its kernel would, and fails if that is not there. FP4 has no numbers here.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from engine import quantized
from engine.quantized import TORCH, DType, matrix_of, quantize
from engine.stand_in import missing

Tensor = torch.Tensor


class _Enumeration(enum.EnumType):
    """Other members are those of other releases, and not used."""

    def __getattr__(cls, name: str) -> Any:
        return missing(name)


class NVTE_Fused_Attn_Backend(enum.IntEnum, metaclass=_Enumeration):
    """Its kernels for attention, of which there are none here."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """How the scales of blocks lie: as products want them, or as a gather does."""

    GEMM_READY = 0
    COMPACT = 1


def _tensors_of_three_products(first: str, *others: str) -> type[enum.IntEnum]:
    names = [name.format(number) for number in (1, 2, 3) for name in (first, *others)]
    return enum.IntEnum("Tensors", names, start=0)  # type: ignore[return-value]


FP8FwdTensors = _tensors_of_three_products("GEMM{}_INPUT", "GEMM{}_WEIGHT", "GEMM{}_OUTPUT")
FP8BwdTensors = _tensors_of_three_products("GRAD_OUTPUT{}", "GRAD_INPUT{}")


def get_cublasLt_version() -> int:
    return 130000


def get_cudnn_version() -> int:
    return 91100


def get_num_cublas_streams() -> int:
    return 1


def generic_gemm(
    a: Tensor,
    transposed_a: bool,
    b: Tensor,
    transposed_b: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: int | None,
    bias: Tensor | None,
    _bias_dtype: int,
    gelu: bool,
    _gelu_input: Tensor | None,
    grad: bool,
    _workspace: Tensor,
    _bytes: int,
    accumulate: bool,
    _split_accumulator: bool,
    **overlap: Any,
) -> tuple[Tensor, Tensor | None, None, None]:
    """(product, gradient of the bias, ..): op(b) @ op(a) + bias, or with ``grad`` the sum of b's rows as the bias's gradient."""
    assert not gelu and quantizer is None and overlap["comm_overlap"] is None
    result = _product(a, transposed_a, b, transposed_b)
    bias_gradient = None
    if bias is not None and bias.numel():
        if grad:
            bias_gradient = matrix_of(b).sum(0).to(bias.dtype)
        else:
            result = result + bias.float()
    dtype = TORCH[DType(out_dtype)] if out_dtype is not None else b.dtype
    if not transposed_b:
        result = result.view(*b.shape[:-1], result.shape[-1])
    return _store(result, out, dtype, accumulate), bias_gradient, None, None


def te_general_grouped_gemm(
    a: Sequence[Tensor],
    transposed_a: bool,
    b: Sequence[Tensor],
    transposed_b: bool,
    out: Sequence[Tensor],
    _out_dtype: int,
    rows: Sequence[int],
    bias: Sequence[Tensor],
    _bias_dtype: int,
    single_output: bool,
    _gelu_inputs: Any,
    grad: bool,
    _workspaces: Any,
    _bytes: int,
    accumulate: bool,
    *_: Any,
) -> Sequence[Tensor]:
    """A product for every expert, into ``out``; returns the biases, or with ``grad`` their gradients."""
    outputs = out[0].split(list(rows)) if single_output else out
    for left, right, target, one in zip(a, b, outputs, bias, strict=True):
        result = _product(left, transposed_a, right, transposed_b)
        if one.numel():
            if grad:
                one.copy_(matrix_of(right).sum(0))
            else:
                result = result + one.float()
        _store(result, target, target.dtype, accumulate)
    return bias


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: int, _: int, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, 1 / standard deviation)"""
    rows = matrix_of(x)
    mean = rows.mean(1)
    scale = (rows.var(1, correction=0) + eps).rsqrt()
    normed = (rows - mean[:, None]) * scale[:, None] * _gain(weight, centred) + bias.float()
    return _normed(normed, x, out, quantizer, dtype), mean, scale


def layernorm_bwd(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, _: int, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias."""
    dy, normed = matrix_of(gradient), (matrix_of(x) - mean[:, None]) * scale[:, None]
    dn = dy * _gain(weight, centred)
    dx = (dn - dn.mean(1, keepdim=True) - normed * (dn * normed).mean(1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (dy * normed).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: int, _: int, centred: bool
) -> tuple[Tensor, None, Tensor]:
    """(output, None, 1 / root mean square)"""
    rows = matrix_of(x)
    scale = (rows.square().mean(1) + eps).rsqrt()
    return _normed(rows * scale[:, None] * _gain(weight, centred), x, out, quantizer, dtype), None, scale


def rmsnorm_bwd(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor, _: int, centred: bool) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight."""
    dy, normed = matrix_of(gradient), matrix_of(x) * scale[:, None]
    dn = dy * _gain(weight, centred)
    dx = (dn - normed * (dn * normed).mean(1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (dy * normed).sum(0).to(weight.dtype)


def fused_multi_row_padding(source: Tensor, out: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """The rows of every expert, and behind them zeros up to a number of rows that a kernel can have."""
    for part, target, count in zip(source.split(list(rows)), out.split(list(padded)), rows, strict=True):
        target[:count], target[count:] = part, 0


def fused_multi_row_unpadding(source: Tensor, out: Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    """The rows of every expert without those zeros."""
    for part, target in zip(source.split(list(padded)), out.split(list(rows)), strict=True):
        target.copy_(part[: len(target)])


def multi_tensor_l2norm(_chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], _each: bool) -> tuple[Tensor, None]:
    """(norm of all tensors of the only list, ..)"""
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().view(1), None


def multi_tensor_scale(_chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Write the tensors of the first list, times a factor, into those of the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * factor)


def multi_tensor_scale_tensor(_chunk: int, overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: Tensor) -> None:
    """The same, where the factor is on the device."""
    multi_tensor_scale(_chunk, overflow, lists, factor.item())


def multi_tensor_adam(
    _chunk: int,
    _overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decoupled: int,
    bias_correction: int,
    decay: float,
) -> None:
    """A step of AdamW on lists of gradients, parameters and both moments."""
    assert decoupled and bias_correction
    for gradient, parameter, first, second in zip(*lists, strict=True):
        first.lerp_(gradient.float(), 1 - beta1)
        second.lerp_(gradient.float().square(), 1 - beta2)
        update = (first / (1 - beta1**step)) / ((second / (1 - beta2**step)).sqrt() + eps)
        parameter.sub_(lr * (update + decay * parameter))


def __getattr__(name: str) -> Any:
    return getattr(quantized, name, None) or missing(name)


def _product(a: Any, transposed_a: bool, b: Any, transposed_b: bool) -> Tensor:
    left, right = matrix_of(b, by_columns=transposed_b), matrix_of(a, by_columns=not transposed_a)
    return (left.t() if transposed_b else left) @ (right.t() if transposed_a else right)


def _store(result: Tensor, out: Tensor | None, dtype: torch.dtype, accumulate: bool) -> Tensor:
    if out is None:
        return result.to(dtype)
    out.copy_(out.float() + result if accumulate else result)
    return out


def _gain(weight: Tensor, centred: bool) -> Tensor:
    return weight.detach().float() + 1 if centred else weight.detach().float()


def _normed(result: Tensor, x: Tensor, out: Tensor | None, quantizer: Any, dtype: int) -> Any:
    if quantizer is not None:
        return quantize(result.view(x.shape).to(TORCH[DType(dtype)]), quantizer, out)
    return _store(result.view(x.shape), out, TORCH[DType(dtype)], False)
