"""Numbers in FP8, as Transformer Engine's compiled module makes them, in operations of torch.

They have a scale for a tensor (``DelayedScaling``, ``Float8CurrentScaling``) or for a block (``MXFP8BlockScaling``,
``Float8BlockScaling``). Of weights that an optimizer keeps in shards a rank rounds its part, with scales for the whole.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch

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


TORCH = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
_BIAS = 127  # of the exponent that MXFP8 has for a scale


def quantize(tensor: Tensor, quantizer: Any, out: Any = None, _unchanged: Tensor | None = None) -> Any:
    """A tensor in FP8, as the quantizer's recipe scales it."""
    result = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) if out is None else out
    matrix = tensor.detach().float().reshape(-1, tensor.shape[-1])
    recipe = type(quantizer).__name__
    if recipe in ("MXFP8Quantizer", "Float8BlockQuantizer"):
        _quantize_blocks(matrix, quantizer, result)
        return result
    kind = TORCH[DType(int(quantizer.dtype))]
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
    kind = TORCH[DType(int(quantizer.dtype))]
    for columns, data, scales in (
        (False, result._rowwise_data, result._rowwise_scale_inv),
        (True, result._columnwise_data, result._columnwise_scale_inv),
    ):
        if data is None:
            continue
        blocks, each = _blocks(matrix, quantizer, columns)
        scale = _powers_of_two(blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(kind).max)
        numbers = _cast(blocks / scale, kind).view(matrix.shape)
        data.copy_((numbers if _is_mx(quantizer) or not columns else numbers.t()).reshape(data.shape))
        if _is_mx(quantizer):  # a power of two in a byte
            scale = (torch.log2(scale) + _BIAS).to(torch.uint8)
        _places(scales, each, quantizer, columns).copy_(scale.view(each))


def _blocks(matrix: Tensor, quantizer: Any, columns: bool) -> tuple[Tensor, tuple[int, int]]:
    """([blocks, rows of one, blocks, columns of one], numbers of blocks): a scale's block lies along what a product sums over."""
    size = 32 if _is_mx(quantizer) else quantizer.block_len
    high, wide = (size if _is_2d(quantizer) or columns else 1), (size if _is_2d(quantizer) or not columns else 1)
    return _cut(matrix, high, wide)


def _cut(matrix: Tensor, high: int, wide: int) -> tuple[Tensor, tuple[int, int]]:
    rows, length = matrix.shape
    return matrix.reshape(rows // high, high, length // wide, wide), (rows // high, length // wide)


def _places(scales: Tensor, each: tuple[int, int], quantizer: Any, columns: bool) -> Tensor:
    """Where the scales of blocks stand in a tensor of them, which has rows and columns of padding.

    Of blocks of rows and columns Transformer Engine's Python transposes them itself; only kernels read those of other blocks.
    """
    if not _is_2d(quantizer):
        return scales.view(-1)[: each[0] * each[1]].view(each)
    return scales[: each[1], : each[0]].t() if columns else scales[: each[0], : each[1]]


def _powers_of_two(numbers: Tensor) -> Tensor:
    """The next ones."""
    return torch.exp2(torch.ceil(torch.log2(numbers.clamp(min=1e-15))))


def _is_2d(quantizer: Any) -> bool:
    return getattr(quantizer, "block_scaling_dim", 1) == 2 and not _is_mx(quantizer)


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
    return matrix_of(gradient).sum(0).to(gradient.dtype), quantize(gradient, quantizer)


def fp8_transpose(numbers: Tensor, _kind: int, out: Tensor | None = None) -> Tensor:
    """The transposed matrix of a tensor's rows."""
    transposed = numbers.reshape(-1, numbers.shape[-1]).t().contiguous()
    return transposed if out is None else out.copy_(transposed)


def compute_amax(tensor: Tensor, out: Tensor) -> None:
    """The largest absolute number of a part of a weight."""
    out.copy_(tensor.float().abs().max())


def multi_tensor_compute_scale_and_scale_inv(
    _chunk: int, _overflow: Tensor, lists: Sequence[Sequence[Tensor]], largest: float, powers_of_two: bool, _epsilon: float
) -> None:
    """From the largest numbers in the first list, scales into the second and what undoes them into the third."""
    for amax, scale, inverse in zip(*lists, strict=True):
        scale.copy_(1 / _powers_of_two(amax / largest) if powers_of_two else largest / amax.clamp(min=1e-12))
        inverse.copy_(1 / scale)


def fp8_block_scaling_compute_partial_amax(part: Tensor, amax: Tensor, rows: int, length: int, start: int, block: int) -> None:
    """The largest numbers of the blocks of a matrix of which a rank has one part; 0 where it has none."""
    matrix = torch.zeros(rows * length)
    matrix[start : start + part.numel()] = part.float().flatten()
    blocks, each = _cut(matrix.view(rows, length), block, block)
    amax[: each[0], : each[1]] = blocks.abs().amax((1, 3))


def fp8_block_scaling_partial_cast(
    part: Tensor, out: Tensor, scale: Tensor, rows: int, length: int, start: int, block: int, kind: int
) -> None:
    """A rank's part of a matrix in FP8."""
    of_blocks = scale[: rows // block, : length // block]
    of_numbers = of_blocks.repeat_interleave(block, 0).repeat_interleave(block, 1).flatten()[start : start + part.numel()]
    out.copy_(_cast(part.float().flatten() * of_numbers, TORCH[DType(int(kind))]))


def matrix_of(tensor: Any, by_columns: bool = False) -> Tensor:
    """A tensor as rows in float32, dequantized where it is made of numbers in FP8 and scales.

    Args:
        by_columns: of the two copies that it may have, the one whose blocks lie along the rows: of a product that sums over them.
    """
    if hasattr(tensor, "_rowwise_data"):
        return _dequantized_blocks(tensor, by_columns)
    if not hasattr(tensor, "_scale_inv"):
        matrix: Tensor = tensor.detach().float().reshape(-1, tensor.shape[-1])
        return matrix
    rows = tensor._data
    if rows is None:
        rows = tensor._transpose.reshape(len(tensor._transpose), -1).t().contiguous()
    return rows.reshape(-1, rows.shape[-1]).view(TORCH[DType(int(tensor._fp8_dtype))]).float() * tensor._scale_inv


def _dequantized_blocks(tensor: Any, by_columns: bool) -> Tensor:
    quantizer, kind = tensor._quantizer, TORCH[DType(int(tensor._fp8_dtype))]
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
    scale = _places(scales, each, quantizer, by_columns).reshape(each[0], 1, each[1], 1)
    return (blocks * (torch.exp2(scale.float() - _BIAS) if _is_mx(quantizer) else scale)).view(matrix.shape)
