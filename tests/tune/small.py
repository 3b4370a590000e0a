"""A small GPT on a small cluster, as ``mpipe tune`` has them before it searches."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from megatron.pipeline.cli import tune
from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.planner.costmodel import device
from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.planning.planned import Variant
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.tune.candidate import Candidate, Cluster
from megatron.pipeline.tune.iteration import Result, evaluate
from megatron.pipeline.tune.layouts import LayoutChoices, Layouts

# 0.4 billion parameters; hardly a vocabulary, so that stages are equal.
FLAGS = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 127 --global-batch-size 32 "
    "--train-iters 1 --lr 1e-4"
)
A100 = device.named("A100-80GB")


def layouts(flags: str = "", gpus: int = 4, gpu: Device = A100, per_node: int = 8, **choices: Any) -> Layouts:
    """All layouts of that model.

    Args:
        flags: on top of those of the model.
        choices: fields of ``LayoutChoices``.
    """
    with quietly():
        return Layouts(tune.base_flags([*FLAGS.split(), *flags.split()]), Cluster(gpu, gpus, per_node), LayoutChoices(**choices))


def candidate(on: Layouts, schedule: str, stock: bool = False, chunks: int | None = None, **changes: Any) -> Candidate:
    """One of them, by what differs from a single pipeline over all GPUs."""
    told: dict[str, Any] = {"pipeline_model_parallel_size": on.cluster.gpus, "micro_batch_size": 1}
    if not stock:
        told["pipeline_schedule"] = schedule
    family = families.named(schedule)
    if family.any_chunks and family.chunks > 1:
        chunks = chunks or 2
        told["num_virtual_stages_per_pipeline_rank"] = chunks
    return on._candidate(Variant(schedule, chunks), told | changes)


def result(on: Layouts, one: Candidate) -> Result:
    """What it takes; it has to fit."""
    found = evaluate(on.cluster, one)
    assert isinstance(found, Result)
    return found


def on_device(on: Layouts, **changes: Any) -> Layouts:
    """The same on GPUs of another kind."""
    return replace(on, cluster=replace(on.cluster, device=replace(on.cluster.device, **changes)))


class Here:
    """A pool of no processes, for what takes no time to plan."""

    _processes = None

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_: object) -> None:
        pass
