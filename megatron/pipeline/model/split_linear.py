"""Weights of a model whose gradient W computes, later than B and in any order.

The layers' backwards are in ``backward/`` (megatron-core's linears and grouped experts) and ``te_linear.py`` (Transformer
Engine's). B finishes the gradients of all other parameters: norms, biases, embeddings.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import layers as upstream_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.pipeline.patches import distributed_data_parallel

from megatron.pipeline.backward import weight_tasks
from megatron.pipeline.backward.linear import SplitLinear
from megatron.pipeline.model import local_graphs, te_linear
from megatron.pipeline.model.adapter import adapter_of, has_adapter

__all__ = ["split_chunks", "split_weights"]

# The method by which DDP learns of delayed gradients: a module has it if its backward submits weight tasks.
DDP_HOOK = "register_wgrad_accumulation_and_reduce_hooks"


def split_weights(chunk: torch.nn.Module, fuse_recomputed: bool = False) -> list[str]:
    """Prepare every linear of a model chunk whose backward can be split. Call it before wrapping the chunk in DDP.

    DDP then leaves the readiness of these weights to ``register_wgrad_accumulation_and_reduce_hooks`` of their modules, and cuts
    the chunk into buckets on every pipeline rank. Modules of Transformer Engine split if they have been built after
    ``te_linear.delay_weight_gradients``.

    Args:
        fuse_recomputed: B also computes the weight gradients of layers whose activations it recomputes. Otherwise W does, and
            the inputs and output gradients of their linears are kept from B to W.

    Returns:
        What runs fused although it has a weight matrix: ``"name: reason"`` for every such module. Embeddings do not count:
        their gradient is no product, and finished by B.

    Raises:
        RuntimeError: ``patches.install()`` has not run, so that no backward would know of this.
        ValueError: a weight that Transformer Engine delays is shared between modules.
    """
    if upstream_layers.LinearWithGradAccumulationAndAsyncCommunication is not SplitLinear:
        raise RuntimeError("megatron-core's linears are not patched: call megatron.pipeline.patches.install() first")
    distributed_data_parallel.mark(chunk)
    uses = Counter(parameter for module in chunk.modules() for parameter in module.parameters(recurse=False))
    if has_adapter(chunk):
        uses.update(adapter_of(chunk).extra_uses(chunk))
    fused = []
    captured = local_graphs.captured_parts(chunk)
    for name, module in chunk.named_modules():
        weights = _matrices(module)
        if module in captured:
            te_linear.stay_in_b(module)
            if weights:
                fused.append(f"{name}: it is in CUDA graphs")
            continue
        shared = any(uses[weight] > 1 for weight in weights)
        if te_linear.is_delayed(module) and shared:
            raise ValueError(f"{name}: Transformer Engine cannot delay the gradient of a weight that modules share: untie it")
        reason = _why_fused(module, weights, shared)
        if reason:
            fused.append(f"{name}: {reason}")
            continue
        if te_linear.is_delayed(module) and weights:
            te_linear.prepare(module)
        for weight in weights:
            if not te_linear.is_delayed(module):
                weight_tasks.prepare(weight, _row_parallel(module))
            if fuse_recomputed:
                weight_tasks.fuse_if_recomputed(weight)
    return fused


def split_chunks(models: Sequence[torch.nn.Module], fuse_recomputed: bool = False) -> str:
    """Prepare all chunks of a rank (``split_weights``), and name what runs fused, in a line; empty where nothing does."""
    fused: dict[str, list[str]] = defaultdict(list)
    for chunk, model in enumerate(models):
        for line in split_weights(model, fuse_recomputed):
            name, _, reason = line.partition(": ")
            fused[reason].append(name if len(models) == 1 else f"chunk {chunk}: {name}")  # layers count from 0 in every chunk
    parts = (f"{name}{f' and {len(more)} more' if more else ''}: {reason}" for reason, (name, *more) in fused.items())
    return f"backward is not split, runs fused in B: {'; '.join(parts)}" if fused else ""


def trained_share(chunk: torch.nn.Module) -> float | None:
    """Share of a chunk's weight gradients that W computes, by the elements of its matrices; call it after ``split_weights``.

    Frozen matrices have none, and some are left to B. 1 for a chunk without matrices; None where nothing trains, not even by B.
    """
    if not any(weight.requires_grad for weight in chunk.parameters()):
        return None
    matrices = {
        weight: te_linear.is_delayed(module) or weight_tasks.is_prepared(weight)
        for module in chunk.modules()
        for weight in _products(module)
    }
    elements = sum(weight.numel() for weight in matrices)
    trained = sum(weight.numel() for weight, split in matrices.items() if split and weight.requires_grad)
    return trained / elements if elements else 1.0


def work_of(chunks: Sequence[torch.nn.Module]) -> int:
    """A number for what a rank has to do, equal where its chunks have the same weights and train the same of them.

    No other rank's equals it where layers with the same weights may differ: in experts, or in windows of attention.
    """
    weights = repr([(name, each.shape, each.requires_grad) for chunk in chunks for name, each in chunk.named_parameters()])
    windows = any(getattr(getattr(chunk, "config", None), "window_attn_skip_freq", None) for chunk in chunks)
    return -1 - torch.distributed.get_rank() if windows or "experts" in weights else zlib.crc32(weights.encode())


def _matrices(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights of a module's own whose gradient is a product that could wait."""
    # Shards of the vocabulary, which are prepared, have passes of their own.
    return [weight for weight in _products(module) if weight.requires_grad and not weight_tasks.is_prepared(weight)]


def _products(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights of a module's own whose gradient is a product, where they train."""
    if isinstance(module, (VocabParallelEmbedding, torch.nn.Embedding)):
        return []
    return [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]


def _row_parallel(module: torch.nn.Module) -> weight_tasks.RowParallel | None:
    """Experts' linears are none: their tokens are sent and summed elsewhere."""
    if not isinstance(module, RowParallelLinear) or module.explicit_expert_comm or module.tp_group.size() == 1:
        return None
    return weight_tasks.RowParallel(module.tp_group if module.sequence_parallel else None)


def _why_fused(module: torch.nn.Module, weights: list[torch.nn.Parameter], shared: bool) -> str | None:
    if isinstance(module, ColumnParallelLinear) and module.weight is None:
        # Tied to the embedding of the same stage: autograd adds both gradients before either is accumulated,
        # and taking the linear's apart would change the order of that sum.
        return "shares its weight with the embedding of this stage"
    if shared:
        return "its weight has more than one use in this stage"
    if weights and not (te_linear.is_delayed(module) if te_linear.is_engines(module) else hasattr(module, DDP_HOOK)):
        return f"{type(module).__name__} has no backward that splits"
    return None
