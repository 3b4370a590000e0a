"""What the examples train, on what, and where: nothing in here depends on the pipeline."""

from typing import Any

import torch

LENGTH, VOCABULARY, BATCH, CUDA = 16, 64, 2, torch.cuda.is_available()


def start() -> None:
    """Join the world that torchrun has started, on this rank's GPU if there is one."""
    torch.distributed.init_process_group("nccl" if CUDA else "gloo")
    if CUDA:
        torch.cuda.set_device(torch.distributed.get_node_local_rank())


def batches(count: int, seed: int) -> list[torch.Tensor]:
    """Random microbatches [b, s + 1], the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, VOCABULARY, (count, BATCH, LENGTH + 1), generator=generator))


def draw(models: list[Any]) -> list[Any]:
    """The chunks, their weights drawn again by layer: megatron-core's depend on which layers a rank has. Zeros stay."""
    for model in models:
        ends = [(0, getattr(model, "embedding", None)), (-1, getattr(model, "output_layer", None))]
        for number, part in [*((layer.layer_number, layer) for layer in model.decoder.layers), *ends]:
            for place, weight in enumerate(part.parameters() if part is not None else ()):
                if weight.dim() > 1 and weight.any():
                    generator = torch.Generator(weight.device).manual_seed(1000 * number + place + 1000)
                    weight.data.normal_(std=0.1, generator=generator)
    return models
