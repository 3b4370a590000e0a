"""What runs on the ranks of ``test_measure.py``: stand-ins for ``rank.run`` that fail in every way, and parts of the real one."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from megatron.pipeline.tune.measure.rank import Tell

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()


def act(job: dict[int, str], tell: Tell) -> str:
    """Does what the job says of this rank."""
    tell("work")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    how = job.get(rank, "")
    if how == "dies":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hangs":
        time.sleep(600)
    elif how:
        raise RuntimeError(f"{how}\nand more")
    return f"rank {rank} of {ranks}"


def links_of(hosts: list[str]) -> Any:
    """The links between ranks on these hosts, as they are said to be."""
    import torch

    from megatron.pipeline.tune.measure.links import measure_links

    return measure_links(hosts, torch.device("cpu"), 2, lambda _: None)


def layer_of(flags: list[str], tensor: int, microbatch: int) -> Any:
    """The passes of a layer of the model that the flags describe, and how often the layer spoke up."""
    from megatron.pipeline import patches

    patches.install()
    from megatron.pipeline.cli import tune_measure
    from megatron.pipeline.planner.schedule import families
    from megatron.pipeline.session.groups import initialize_model_parallel
    from megatron.pipeline.tune.measure.layers import Layer
    from megatron.pipeline.tune.measure.sizes import Size, dense, layer_flags

    args = dense(tune_measure._model(flags))
    initialize_model_parallel(args, families.placement("1f1b", 1))
    layer = Layer(layer_flags(args, Size(tensor, microbatch)))
    told: list[int] = []
    passes = layer.measure(microbatch, 2, lambda: told.append(1))
    weights = sum(weight.numel() for weight in layer._layer.parameters())
    layer.close()
    return passes, len(told), weights
