"""A GPT of Transformer Engine's layers that megatron-core's helper has captured, trained under a schedule on a CPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import tiny_gpt
from engine import gpt, graphs


def train(schedule: str, flags: str, pp: int = 2, modules: str | None = "", microbatches: tuple[int, ...] = (4,) * 5) -> Any:
    """Losses and norms of every iteration, digests of all weights, how many graphs were replayed, and of how many layers.

    Args:
        modules: of --cuda-graph-modules; None without graphs.
        microbatches: of every iteration. Graphs are captured behind the first.
    """
    from megatron.core.transformer import cuda_graphs

    from megatron.pipeline.trainer import state

    graphs.pose()
    configured = state.transformer_config

    def with_graphs(*args: Any) -> Any:
        config = configured(*args)
        if modules is not None:
            config.cuda_graph_impl, config.cuda_graph_warmup_steps = "transformer_engine", 1
            scopes = getattr(cuda_graphs, "CudaGraphModule", None) or cuda_graphs.CudaGraphScope
            config.cuda_graph_scope = config.cuda_graph_modules = [scopes[name] for name in modules.split()]
        return config

    with patch.object(state, "transformer_config", with_graphs):
        run = gpt._built(schedule, flags, 1, pp, None, measure=False)
    steps, made, layers = [], list[graphs.graphs.CUDAGraph](), 0
    for iteration, count in enumerate(microbatches):
        if iteration == 1 and modules is not None:
            made, layers = _capture(run, cuda_graphs)
        run.microbatches = count
        steps.append(gpt._step(run, iteration))
    return steps, gpt._digests(run), sum(one.replays for one in made), layers


def _capture(run: tiny_gpt.Run, upstream: Any) -> tuple[list[Any], int]:
    """As Megatron-LM's loop does; returns the graphs, and the number of layers that have them."""
    made = []

    class Noted(graphs.graphs.CUDAGraph):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    view: Any = sys.modules["transformer_engine.pytorch.graph"].torch  # type: ignore[attr-defined]
    given = {"model": run.chunks, "config": run.config, "seq_length": run.args.seq_length, "micro_batch_size": 2}
    tracker = upstream.get_cuda_rng_tracker()  # reads what are numbers of the host on a GPU machine, and there is no dropout
    with (
        patch.object(view.cuda, "CUDAGraph", Noted),
        patch.object(upstream, "get_num_microbatches", lambda: 4),
        patch.object(type(tracker), "fork", lambda *_: nullcontext()),
    ):
        helper = upstream.TECudaGraphHelper(**given, optimizers=[run.optimizer])
        gathering = run.chunks if run.args.overlap_param_gather else []
        for chunk in gathering:
            chunk.disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        for chunk in gathering:
            chunk.enable_forward_pre_hook()
    assert all(layer.cuda_graphs for layers in helper.callables_per_chunk for layer in layers)
    return made, len(helper.flattened_callables)
