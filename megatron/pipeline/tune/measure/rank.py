"""Process of one of the ranks that measure, from its first word to the last. torch is imported when it begins."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner.costmodel.device import Link
from megatron.pipeline.planner.shape.gpt import Work
from megatron.pipeline.tune.measure.sizes import Size, layer_flags

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Tell = Callable[[str], object]  # what a rank is at; said again and again while it is

SILENCE = 300.0  # seconds after which a rank that says nothing hangs


@dataclass(frozen=True)
class MeasureJob:
    """Layers and links to measure.

    Attributes:
        args: flags of a dense model after ``validate``, for ranks that share nothing.
        iterations: of which medians count.
    """

    args: Settings
    sizes: tuple[Size, ...]
    iterations: int = 10


@dataclass(frozen=True)
class Timing:
    """Seconds of the passes of a layer on the slowest rank, and the bytes that its F keeps."""

    size: Size
    seconds: Work
    activation: float


@dataclass(frozen=True)
class Measurements:
    """The measurements of all ranks: where they differ, those of the slowest.

    Attributes:
        name: of the GPU or the processor.
        gpu: whether it is a GPU.
        torch: its version.
        ranks, nodes: that measured.
        memory, peak, bandwidth, to_host, to_device: as a ``Device`` has them.
        links: by the names that a ``Device`` has for them; those that there are between these ranks.
        timings: of layers.
        too_large: sizes that the memory is too small for.
        beside_communication: as a ``Device`` has it; None where there is none.
    """

    name: str
    gpu: bool
    torch: str
    ranks: int
    nodes: int
    memory: float
    peak: float
    bandwidth: float
    to_host: float
    to_device: float
    links: Mapping[str, Link]
    timings: tuple[Timing, ...]
    too_large: tuple[Size, ...]
    beside_communication: float | None = None


def run(job: MeasureJob, tell: Tell) -> Measurements:
    """Measure, together with all other ranks of the world that torchrun's environment tells of.

    Returns:
        The same on all ranks.
    """
    # Upstream warns of every package that is not there, and torch of what upstream uses, on every rank.
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    from megatron.pipeline import patches

    patches.install()
    import torch

    from megatron.pipeline.distributed.device import this_device
    from megatron.pipeline.flags.config import params_dtype
    from megatron.pipeline.tune.measure import links, machine

    tell("start-up")
    with _world(job.args):
        host, device, ranks = socket.gethostname(), this_device(), torch.distributed.get_world_size()
        hosts = _everyone(host)
        tell("a large product")
        links.together(device)
        peak = machine.peak(params_dtype(job.args), device, job.iterations)
        tell("a large product beside communication")
        links.together(device)
        beside = _everyone(machine.beside_communication(params_dtype(job.args), device, job.iterations))
        tell("a large copy")
        links.together(device)
        bandwidth = machine.bandwidth(device, job.iterations)
        tell("copies to host memory and back")
        to_host, to_device = machine.host_copies(device, host)
        found = links.measure_links(hosts, device, job.iterations, tell)
        timings, too_large = _layers(job, device, tell)
        neighbours = hosts.count(host)
        return Measurements(
            name=machine.name(device, neighbours),
            gpu=device.type == "cuda",
            torch=torch.__version__,
            ranks=ranks,
            nodes=len(links.nodes(hosts)),
            memory=min(_everyone(machine.memory(device, neighbours))),
            peak=min(_everyone(peak)),
            bandwidth=min(_everyone(bandwidth)),
            beside_communication=None if None in beside else max(beside),
            to_host=to_host,
            to_device=to_device,
            links=found,
            timings=tuple(timings),
            too_large=tuple(too_large),
        )


def _layers(job: MeasureJob, device: torch.device, tell: Tell) -> tuple[list[Timing], list[Size]]:
    """Every size, on all ranks at once: they share power, or cores, when they train.

    All are measured twice, the second time in the opposite order, and the better counts: so what else a machine does for a while
    makes no size look slow.
    """
    from megatron.pipeline.tune.measure.layers import Layer
    from megatron.pipeline.tune.measure.links import together

    timings: dict[Size, Timing] = {}
    order = [[size for size in job.sizes if size.tensor == tensor] for tensor in dict.fromkeys(size.tensor for size in job.sizes)]
    for sizes in order + order[::-1]:  # those of one layer together
        layer = _unless_too_large(partial(Layer, layer_flags(job.args, sizes[0])))
        for size in sizes:
            at = partial(tell, str(size))
            at()
            together(device)
            everyone = _everyone(layer and _unless_too_large(partial(layer.measure, size.microbatch, job.iterations, at)))
            if None not in everyone:
                slowest = Timing(size, *max(everyone, key=lambda measured: measured[0].total))
                timings[size] = min(slowest, timings.get(size, slowest), key=lambda timing: timing.seconds.total)
        if layer:
            layer.close()
    return [timings[size] for size in job.sizes if size in timings], [size for size in job.sizes if size not in timings]


def _unless_too_large(action: Callable[[], T]) -> T | None:
    """Result of an action; None where the GPU's memory is too small for it."""
    import torch

    try:
        return action()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


@contextmanager
def _world(args: Settings) -> Iterator[None]:
    """All ranks, each on its GPU or on one thread, with megatron-core's groups."""
    import torch
    from megatron.core import parallel_state

    from megatron.pipeline.planner.schedule import families
    from megatron.pipeline.session.groups import initialize_model_parallel

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    else:
        torch.set_num_threads(1)
    torch.distributed.init_process_group(args.distributed_backend, timeout=timedelta(seconds=SILENCE))
    try:
        initialize_model_parallel(args, families.placement("1f1b", 1))
        yield
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


def _everyone(mine: Any) -> list[Any]:
    """Gather what every rank has. Collective over the world."""
    import torch

    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, mine)
    return found
