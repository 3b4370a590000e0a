"""Transformer Engine's compiled module in operations of torch: what its linears, norms and optimizer call.

Products are in float32 and rounded once, to what they are added to or stored in, as cuBLAS does. Sums are in the order of torch's
CPU kernels: the same call gives the same bits. Numbers in FP8 have a scale for a tensor (``DelayedScaling``,
``Float8CurrentScaling``) or for a block (``MXFP8BlockScaling``, ``Float8BlockScaling``); a product reads the copy, by rows or by
columns, that its kernel would, and fails if that is not there. FP4 has no numbers here.
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


class Float8BlockScaleTensorFormat(enum.IntEnum):
    """How the scales of blocks lie: as products want them, or as a gather does."""

    GEMM_READY = 0
    COMPACT = 1


def _tensors_of_three_products(first: str, *others: str) -> type[enum.IntEnum]:
    names = [name.format(number) for number in (1, 2, 3) for name in (first, *others)]
    return enum.IntEnum("Tensors", names, start=0)  # type: ignore[return-value]


__all__ = [
    "bgrad_quantize",
    "create_empty_quantized_tensor",
    "fp8_transpose",
    "generic_gemm",
    "get_cublasLt_version",
    "get_cudnn_version",
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
_BIAS = 127  # of the exponent that MXFP8 has for a scale


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
    """A tensor in FP8, as the quantizer's recipe scales it."""
    result = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
    matrix = tensor.detach().float().reshape(-1, tensor.shape[-1])
    recipe = type(quantizer).__name__
    if recipe in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        _quantize_blocks(matrix, quantizer, result)
        return result
    kind = _TORCH[DType(int(quantizer.dtype))]
    largest = matrix.abs().max() if matrix.numel() else torch.zeros(())  # an expert may have no tokens
    if recipe == "Float8Quantizer":  # delayed scaling: the scale is of earlier tensors, and this one's largest number is noted
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest.to(quantizer.amax.dtype)))
        scale = quantizer.scale.reshape(())
    else:
        assert recipe == "Float8CurrentScalingQuantizer", recipe
        scale = torch.finfo(kind).max / largest.clamp(min=1e-12)
    numbers = _cast(matrix * scale, kind)
    result._scale_inv.copy_(1 / scale)
    if result._data is not None:
        result._data.copy_(numbers.view(result._data.shape))
    if result._transpose is not None:
        result._transpose.copy_(fp8_transpose(numbers, 0).view(result._transpose.shape))
        result._transpose_invalid = False
    return result


def _quantize_blocks(matrix: Tensor, quantizer: Any, result: Any) -> None:
    """Fill the copies by rows and by columns of a tensor whose blocks have scales."""
    kind = _TORCH[DType(int(quantizer.dtype))]
    for columns, data, scales in (
        (False, result._rowwise_data, result._rowwise_scale_inv),
        (True, result._columnwise_data, result._columnwise_scale_inv),
    ):
        if data is None:
            continue
        blocks, each = _blocks(matrix, quantizer, columns)
        scale = torch.exp2(
            torch.ceil(torch.log2(blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / torch.finfo(kind).max))
        )
        numbers = _cast(blocks / scale, kind).view(matrix.shape)
        data.copy_((numbers if _is_mx(quantizer) or not columns else numbers.t()).reshape(data.shape))
        if _is_mx(quantizer):  # a power of two in a byte
            scale = (torch.log2(scale) + _BIAS).to(torch.uint8)
        scales.view(-1)[: each[0] * each[1]].copy_(scale.flatten())


def _blocks(matrix: Tensor, quantizer: Any, columns: bool) -> tuple[Tensor, tuple[int, int]]:
    """([blocks, rows of one, blocks, columns of one], numbers of blocks): a scale's block lies along what a product sums over."""
    size = 32 if _is_mx(quantizer) else quantizer.block_len
    whole = getattr(quantizer, "block_scaling_dim", 1) == 2 and not _is_mx(quantizer)
    high, wide = (size if whole or columns else 1), (size if whole or not columns else 1)
    rows, length = matrix.shape
    return matrix.reshape(rows // high, high, length // wide, wide), (rows // high, length // wide)


def _is_mx(quantizer: Any) -> bool:
    return type(quantizer).__name__ == "MXFP8Quantizer"


def _cast(numbers: Tensor, kind: torch.dtype) -> Tensor:
    largest = torch.finfo(kind).max
    return numbers.clamp(-largest, largest).to(kind).view(torch.uint8)


def split_quantize(tensor: Tensor, rows: Sequence[int], quantizers: Sequence[Any], **_: Any) -> list[Any]:
    """The rows of every expert in FP8."""
    parts = tensor.reshape(-1, tensor.shape[-1]).split(list(rows))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizers, strict=True)]


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, _pinned: bool
) -> Any:
    """A tensor in FP8 whose numbers are not set, as ``make_empty`` of earlier releases."""
    recipe = type(quantizer).__name__
    options = {"shape": shape, "dtype": dtype, "fp8_dtype": quantizer.dtype, "quantizer": quantizer, "device": device}
    if recipe in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        for rows in (True, False):
            has = quantizer.rowwise_usage if rows else quantizer.columnwise_usage
            size = shape if rows or _is_mx(quantizer) else quantizer.get_columnwise_shape(tuple(shape))
            scales = torch.empty(
                quantizer.get_scale_shape(tuple(shape), not rows), dtype=torch.uint8 if _is_mx(quantizer) else torch.float32
            )
            name = "rowwise" if rows else "columnwise"
            options[f"{name}_data"] = torch.empty(size, dtype=torch.uint8) if has else None
            options[f"{name}_scale_inv"] = scales if has else None
        if _is_mx(quantizer):
            from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor

            return MXFP8Tensor(**options, with_gemm_swizzled_scales=False)
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

        return Float8BlockwiseQTensor(**options, is_2D_scaled=quantizer.block_scaling_dim == 2)
    from transformer_engine.pytorch.float8_tensor import Float8Tensor

    data = torch.empty(shape, dtype=torch.uint8)
    transpose = fp8_transpose(data, 0) if quantizer.columnwise_usage else None
    return Float8Tensor(**options, data=data, fp8_scale_inv=torch.empty(1), data_transpose=transpose)


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


def _matrix(tensor: Any, by_columns: bool = False) -> Tensor:
    """A tensor as rows in float32, dequantized where it is made of numbers in FP8 and scales.

    Args:
        by_columns: of the two copies that it may have, the one whose blocks lie along the rows: of a product that sums over them.
    """
    if hasattr(tensor, "_rowwise_data"):
        return _dequantized_blocks(tensor, by_columns)
    if not hasattr(tensor, "_scale_inv"):
        matrix: Tensor = tensor.detach().float().reshape(-1, tensor.shape[-1])
        return matrix
    rows = tensor._transpose.t().contiguous() if tensor._data is None else tensor._data
    return rows.reshape(-1, rows.shape[-1]).view(_TORCH[DType(int(tensor._fp8_dtype))]).float() * tensor._scale_inv


def _dequantized_blocks(tensor: Any, by_columns: bool) -> Tensor:
    quantizer, kind = tensor._quantizer, _TORCH[DType(int(tensor._fp8_dtype))]
    data, scales = (
        (tensor._columnwise_data, tensor._columnwise_scale_inv)
        if by_columns
        else (tensor._rowwise_data, tensor._rowwise_scale_inv)
    )
    assert data is not None, f"no copy by {'columns' if by_columns else 'rows'}"
    if by_columns and not _is_mx(quantizer):
        data = data.reshape(data.shape[0], -1).t().contiguous()
    matrix = data.reshape(-1, data.shape[-1]).view(kind).float()
    blocks, each = _blocks(matrix, quantizer, by_columns)
    scale = scales.view(-1)[: each[0] * each[1]].view(each[0], 1, each[1], 1)
    return (blocks * (torch.exp2(scale.float() - _BIAS) if _is_mx(quantizer) else scale)).view(matrix.shape)


def _product(a: Any, transposed_a: bool, b: Any, transposed_b: bool) -> Tensor:
    left, right = _matrix(b, by_columns=transposed_b), _matrix(a, by_columns=not transposed_a)
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
