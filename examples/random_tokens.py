"""What the examples train on, and where: nothing in here depends on the pipeline."""

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
