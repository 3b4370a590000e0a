"""Transformer Engine's compiled module in operations of torch: what its linears, norms and optimizer call.

Products are in float32 and rounded once, to what they are added to or stored in, as cuBLAS does. Sums are in the order of torch's
CPU kernels: the same call gives the same bits. FP8 is that of the recipe Float8CurrentScaling alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from engine.stand_in import missing

Tensor = torch.Tensor


class DType(enum.IntEnum):
    """Its numbers of types."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class _Enumeration(enum.EnumType):
    """Other members are those of other releases, and not used."""

    def __getattr__(cls, name: str) -> Any:
        return missing(name)


class NVTE_Fused_Attn_Backend(enum.IntEnum, metaclass=_Enumeration):
    """Its kernels for attention, of which there are none here."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


def _tensors_of_three_products(first: str, *others: str) -> type[enum.IntEnum]:
    names = [name.format(number) for number in (1, 2, 3) for name in (first, *others)]
    return enum.IntEnum("Tensors", names, start=0)  # type: ignore[return-value]


__all__ = [
    "bgrad_quantize",
    "create_empty_quantized_tensor",
    "fp8_transpose",
    "generic_gemm",
    "get_cublasLt_version",
    "get_num_cublas_streams",
    "layernorm_bwd",
    "layernorm_fwd",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "quantize",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    "split_quantize",
    "te_general_grouped_gemm",
]
_TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}


FP8FwdTensors = _tensors_of_three_products("GEMM{}_INPUT", "GEMM{}_WEIGHT", "GEMM{}_OUTPUT")
FP8BwdTensors = _tensors_of_three_products("GRAD_OUTPUT{}", "GRAD_INPUT{}")


def get_cublasLt_version() -> int:
    return 130000


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
            bias_gradient = _matrix(b).sum(0).to(bias.dtype)
        else:
            result = result + bias.float()
    dtype = _TORCH[DType(out_dtype)] if out_dtype is not None else b.dtype
    if not transposed_b:
        result = result.view(*b.shape[:-1], -1)
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
                one.copy_(_matrix(right).sum(0))
            else:
                result = result + one.float()
        _store(result, target, target.dtype, accumulate)
    return bias


def layernorm_fwd(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: int, _: int, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, 1 / standard deviation)"""
    rows = _matrix(x)
    mean = rows.mean(1)
    scale = (rows.var(1, correction=0) + eps).rsqrt()
    normed = (rows - mean[:, None]) * scale[:, None] * _gain(weight, centred) + bias.float()
    return _normed(normed, x, out, quantizer, dtype), mean, scale


def layernorm_bwd(
    gradient: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, _: int, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias."""
    dy, normed = _matrix(gradient), (_matrix(x) - mean[:, None]) * scale[:, None]
    dn = dy * _gain(weight, centred)
    dx = (dn - dn.mean(1, keepdim=True) - normed * (dn * normed).mean(1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (dy * normed).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: Any, dtype: int, _: int, centred: bool
) -> tuple[Tensor, None, Tensor]:
    """(output, None, 1 / root mean square)"""
    rows = _matrix(x)
    scale = (rows.square().mean(1) + eps).rsqrt()
    return _normed(rows * scale[:, None] * _gain(weight, centred), x, out, quantizer, dtype), None, scale


def rmsnorm_bwd(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor, _: int, centred: bool) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight."""
    dy, normed = _matrix(gradient), _matrix(x) * scale[:, None]
    dn = dy * _gain(weight, centred)
    dx = (dn - normed * (dn * normed).mean(1, keepdim=True)) * scale[:, None]
    return dx.to(x.dtype), (dy * normed).sum(0).to(weight.dtype)


def quantize(tensor: Tensor, quantizer: Any, out: Any = None, _unchanged: Tensor | None = None) -> Any:
    """A tensor in FP8, scaled by its own largest number."""
    assert type(quantizer).__name__ == "Float8CurrentScalingQuantizer"
    result = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
    kind = _TORCH[DType(int(quantizer.dtype))]
    largest = tensor.detach().abs().max().float() if tensor.numel() else torch.zeros(())  # an expert may have no tokens
    scale = torch.finfo(kind).max / largest.clamp(min=1e-12)
    numbers = (tensor.detach().float() * scale).to(kind).view(torch.uint8)
    result._scale_inv.copy_(1 / scale)
    if result._data is not None:
        result._data.copy_(numbers.view(result._data.shape))
    if result._transpose is not None:
        result._transpose.copy_(fp8_transpose(numbers, 0).view(result._transpose.shape))
        result._transpose_invalid = False
    return result


def split_quantize(tensor: Tensor, rows: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """The rows of every expert in FP8."""
    parts = tensor.reshape(-1, tensor.shape[-1]).split(list(rows))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, _pinned: bool
) -> Any:
    """A tensor in FP8 whose numbers are not set, as ``make_empty`` of earlier releases."""
    from transformer_engine.pytorch.float8_tensor import Float8Tensor

    data = torch.empty(shape, dtype=torch.uint8)
    return Float8Tensor(
        shape=shape,
        dtype=dtype,
        data=data,
        fp8_scale_inv=torch.empty(1),
        fp8_dtype=quantizer.dtype,
        data_transpose=fp8_transpose(data, 0) if quantizer.columnwise_usage else None,
        quantizer=quantizer,
        device=device,
    )


def bgrad_quantize(gradient: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(gradient of a bias, the gradient of the output in FP8)"""
    return _matrix(gradient).sum(0).to(gradient.dtype), quantize(gradient, quantizer)


def fp8_transpose(numbers: Tensor, _kind: int, out: Tensor | None = None) -> Tensor:
    """The transposed matrix of a tensor's rows."""
    transposed = numbers.reshape(-1, numbers.shape[-1]).t().contiguous()
    return transposed if out is None else out.copy_(transposed)


def multi_tensor_l2norm(_chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], _each: bool) -> tuple[Tensor, None]:
    """(norm of all tensors of the only list, ..)"""
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().view(1), None


def multi_tensor_scale(_chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], factor: float) -> None:
    """Write the tensors of the first list, times a factor, into those of the second."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * factor)


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
    return missing(name)


def _matrix(tensor: Any) -> Tensor:
    """A tensor as rows in float32, dequantized where it is made of numbers in FP8 and a scale."""
    if not hasattr(tensor, "_scale_inv"):
        matrix: Tensor = tensor.detach().float().reshape(-1, tensor.shape[-1])
        return matrix
    rows = tensor._data if tensor._data is not None else tensor._transpose.t().contiguous()
    return rows.reshape(-1, rows.shape[-1]).view(_TORCH[DType(int(tensor._fp8_dtype))]).float() * tensor._scale_inv


def _product(a: Tensor, transposed_a: bool, b: Tensor, transposed_b: bool) -> Tensor:
    left, right = _matrix(b), _matrix(a)
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
        return quantize(result.view(x.shape).to(_TORCH[DType(dtype)]), quantizer, out)
    return _store(result.view(x.shape), out, _TORCH[DType(dtype)], False)
