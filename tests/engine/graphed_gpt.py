"""A GPT of Transformer Engine's layers that megatron-core's helper has captured, trained under a schedule on a CPU."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import tiny_gpt
import torch
from engine import gpt, graphs
from megatron.core.transformer import ModuleSpec


class Graphs(NamedTuple):
    """Flags of CUDA graphs.

    Attributes:
        modules: of --cuda-graph-modules.
        implementation: of --cuda-graph-impl.
        mutation: what is wrong with them; of ``MUTATIONS``.
    """

    modules: str = ""
    implementation: str = "transformer_engine"
    mutation: str = ""


MUTATIONS = ("one pool", "a slot fewer", "weights left to W")


def train(
    schedule: str,
    flags: str,
    pp: int = 2,
    given: Graphs | None = None,
    microbatches: tuple[int, ...] = (4,) * 5,
    tp: int = 1,
    layer: str = "",
) -> Any:
    """Losses and norms of every iteration, digests of all weights, how many graphs were replayed, and of how many parts.

    Args:
        given: None without graphs.
        microbatches: of every iteration. Graphs are captured behind the first.
        layer: megatron-core's class of layers, which draw from one generator; by default one that is seeded for each mask.
    """
    from megatron.core.transformer import cuda_graphs, transformer_layer

    from megatron.pipeline.model import layer_spec
    from megatron.pipeline.trainer import state

    graphs.pose()
    configured = state.transformer_config

    def with_graphs(*args: Any) -> Any:
        config = configured(*args)
        if given:
            config.cuda_graph_impl, config.cuda_graph_warmup_steps = given.implementation, 1
            scopes = getattr(cuda_graphs, "CudaGraphModule", None) or cuda_graphs.CudaGraphScope
            config.cuda_graph_scope = config.cuda_graph_modules = [scopes[name] for name in given.modules.split()]
        return config

    with ExitStack() as patched:
        patched.enter_context(patch.object(state, "transformer_config", with_graphs))
        if layer:
            of_class = getattr(transformer_layer, layer)
            patched.enter_context(
                patch.object(layer_spec, "_seeded", lambda _, spec: ModuleSpec(of_class, submodules=spec.submodules))
            )
            patched.enter_context(_one_generator())
        made = patched.enter_context(_local(cuda_graphs, given)) if given and given.implementation == "local" else []
        run = gpt._built(schedule, flags, tp, pp, None, measure=False)
        steps, layers = [], 0
        for iteration, count in enumerate(microbatches):
            if iteration == 1 and given and given.implementation == "transformer_engine":
                made, layers = _capture(run, cuda_graphs)
            run.microbatches = count
            steps.append(gpt._step(run, iteration))
            if iteration == 0 and given and given.implementation == "local":
                layers = len(_managers(run.chunks))
    return steps, gpt._digests(run), sum(one.replays for one in made), layers


def _managers(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Those that have captured something."""
    found: list[Any] = [module for chunk in chunks for module in chunk.modules() if hasattr(module, "follows_slots")]
    return [manager for manager in found if manager.follows_slots.runners]


@contextmanager
def _one_generator() -> Iterator[None]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()):
        yield


@contextmanager
def _local(upstream: Any, given: Graphs) -> Iterator[list[Any]]:
    """Have megatron-core's own runners capture on this CPU; yields the graphs."""
    from megatron.pipeline.model import te_linear
    from megatron.pipeline.runtime import iteration

    made: list[Any] = []

    class Noted(graphs.graphs.CUDAGraph):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def register_generator_state(self, _: Any) -> None:
            """Of all generators: there is one."""

    create, slots, shared = upstream.create_cudagraphs, iteration._slots, graphs.graphs.Pool()

    def drawing_nothing() -> Any:  # as warm-ups do
        drawn = torch.get_rng_state()
        create()
        torch.set_rng_state(drawn)

    def fewer(*plan: Any) -> Any:
        return [[min(slot, max(max(row) - 1, 0)) for slot in row] for row in slots(*plan)]

    view: dict[str, Any] = {
        "CUDAGraph": Noted,
        "graph": graphs.graphs.graph,
        "graph_pool_handle": (lambda: shared) if given.mutation == "one pool" else graphs.graphs.graph_pool_handle,
        "memory_stats": lambda *_: defaultdict(int),
        "default_generators": [torch.Generator()],
    }
    with (
        _one_generator(),
        patch.object(upstream, "create_cudagraphs", drawing_nothing),
        patch.object(iteration, "_slots", fewer if given.mutation == "a slot fewer" else slots),
        patch.object(te_linear, "stay_in_b", (lambda _: None) if given.mutation == "weights left to W" else te_linear.stay_in_b),
        patch.multiple(upstream.torch.cuda, create=True, **view),
        patch.object(upstream, "make_weak_ref", graphs.graphs.weak),
        patch.object(upstream, "_ensure_generator_state_is_cudagraph_safe", lambda given: given),
        patch.object(upstream, "get_cuda_rng_tracker", lambda: SimpleNamespace(is_inference_rng_tracker=True)),
    ):
        yield made
        upstream.delete_cuda_graphs()


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
