"""What stands at the borders of frameworks on a CPU: packages that their files import and no loop of training calls."""

from __future__ import annotations

import argparse
import gc
import importlib.machinery
import json
import sys
import time
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))


class Row(NamedTuple):
    """What a program trains, as ``SCHEDULE,PIPELINE_RANKS,WHAT``; the last is empty for all weights."""

    schedule: str
    ranks: int
    trains: str

    @classmethod
    def read(cls, text: str) -> Row:
        schedule, ranks, trains = text.split(",")
        return cls(schedule, int(ranks), trains)


def start(description: str | None, *absent: str) -> list[Row]:
    """The rows of the command line of a framework's program, this process ready for its files, in a world of all processes.

    megatron-core must not be imported yet.

    Args:
        description: of the program, for its help.
        absent: modules that are not there, any name of which can be imported.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="folder with Transformer Engine's own Python, whose kernels are the tests' stand-in's")
    parser.add_argument("rows", nargs="+", type=Row.read, metavar="SCHEDULE,PIPELINE_RANKS,WHAT")
    given = parser.parse_args()
    if sys.version_info < (3, 12):  # which these packages ask for
        import typing_extensions

        for name in ("override", "TypedDict"):
            setattr(typing, name, getattr(typing_extensions, name))
    from engine import stand_in

    stand_in.load(Path(given.engine))
    sys.meta_path.append(Absent(absent))
    from megatron.pipeline.patches import training_cpu

    from megatron.pipeline import patches

    patches.install()
    training_cpu.install()  # Megatron Bridge takes functions of megatron.training
    stand_in.see_the_cpu()
    torch.distributed.init_process_group("gloo")
    rows: list[Row] = given.rows
    return rows


def train(rows: Sequence[Row], main: Callable[[Row], None]) -> None:
    """Train row after row, each with process groups of its own, and have the last rank of its first replica print its name."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    for row in rows:
        began, used = time.monotonic(), time.process_time()
        main(row)
        spent = torch.tensor(time.process_time() - used)
        torch.distributed.all_reduce(spent)  # also a barrier
        if _reports(row.ranks):
            print(f"took {','.join(map(str, row))} {time.monotonic() - began:.0f} {spent:.0f}", flush=True)
        parallel_state.destroy_model_parallel()
        unset_num_microbatches_calculator()
        get_cuda_rng_tracker().reset()
        gc.collect()


def _reports(ranks: int) -> bool:
    """It is the last rank of the first replica."""
    world = torch.distributed.get_world_size()
    return torch.distributed.get_rank() == world - world // ranks


def see_the_cpu(*packages: str) -> None:
    """Have the modules of packages that are loaded by now see a CPU as their GPU."""
    from megatron.pipeline.patches import cpu

    view: Any = cpu.view_of_torch()
    view.cuda.mem_get_info = lambda *_: (0, 0)
    cpu.give_view(view, *packages)
    moved = torch.Tensor.to
    if getattr(moved, "__module__", "") == __name__:  # by an earlier row
        return

    def to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        args = tuple("cpu" if isinstance(one, str) and one.startswith("cuda") else one for one in args)
        return moved(tensor, *args, **options)

    torch.Tensor.to = to  # type: ignore[assignment, method-assign]


def install(row: Row) -> Any:
    """The loop of a row's schedule; with ``lengths`` every batch is planned for those that the framework's data have."""
    from megatron.pipeline import EveryBatch
    from megatron.pipeline import install as take_the_place

    if row.trains != "lengths" or row.schedule == "stock":
        return take_the_place(row.schedule)
    return take_the_place(row.schedule, every_batch=EveryBatch(wait=100.0))


def draw(chunks: list[Any]) -> list[Any]:
    """Draw the weights that train, of layers by their numbers, and of the two ends, wherever they are."""
    from megatron.core.utils import unwrap_model

    for chunk in map(unwrap_model, chunks):
        parts = {layer.layer_number: layer for layer in chunk.decoder.layers}
        parts |= {0: getattr(chunk, "embedding", None), 1 + chunk.config.num_layers: getattr(chunk, "output_layer", None)}
        for number, part in parts.items():
            weights = [weight for weight in part.parameters() if weight.requires_grad and weight.dim() > 1] if part else []
            for place, weight in enumerate(weights):
                weight.data.copy_(torch.empty(weight.shape).normal_(std=0.05, generator=_seeded(100 * number + place)))
    return chunks


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def report(loop: Any, microbatches: int, steps: str, numbers: Sequence[Any], forwards: Sequence[float] = ()) -> None:
    """Have the last rank of the first replica print what came of every step, as ``check_frameworks.py`` reads it.

    Args:
        loop: that was installed.
        microbatches: of the last call.
        steps: in words.
        numbers: of every step what was reported, and the norm.
        forwards: what the first forwards alone have computed, which no layout changes.
    """
    from megatron.core import parallel_state

    ranks = parallel_state.get_pipeline_model_parallel_world_size()
    assert loop.pipeline(ranks).is_stock or loop.pipeline(ranks).microbatches == microbatches, "another function has run"
    batches = loop.pipeline(ranks).batches
    assert batches is None or not batches.counts["unknown"], f"lengths have not been found: {batches.counts}"
    steps += "" if batches is None else f"; {batches.counts['planned']} planned by length"
    if _reports(ranks):
        print(f"found {json.dumps({'steps': steps, 'numbers': numbers, 'forwards': forwards})}", flush=True)


def attend_in_torch() -> None:
    """Have Transformer Engine's attention, of whole rows or of packed sequences, be torch's, where its kernels would be."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    TEDotProductAttention.forward = _attend


def _attend(_module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    """Causal attention of [s, b, heads, n], or [t, heads, n] of packed sequences; returns their heads side by side."""
    packed = options.get("packed_seq_params")
    if packed is None:
        rows = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        return _causal(*rows).permute(2, 0, 1, 3).flatten(2)
    ends = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
    sizes = ends.diff().tolist()
    sizes.append(len(query) - sum(sizes))
    sequences = zip(*(one.split(sizes) for one in (query, key, value)), strict=True)
    parts = [_causal(*(one.transpose(0, 1) for one in sequence)).transpose(0, 1) for sequence in sequences]
    return torch.cat(parts).flatten(1)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Absent:
    """Finds modules that are not there."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(f"{name}.".startswith(f"{absent}.") for absent in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Names(spec.name)

    def exec_module(self, _module: types.ModuleType) -> None:
        """Its names are made when they are asked for."""


class _Names(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Name,), {})


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Name,), {})

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Of a decorator what it decorates."""
        return args[0] if len(args) == 1 and callable(args[0]) else super().__call__()


class _Name(metaclass=_Meta):
    """Can be imported, stand in annotations, be a base, and decorate; what a call of it returns is false."""

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else None
