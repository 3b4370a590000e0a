"""Make a ``Device`` from the ranks' measurements, and write it to a file."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner.costmodel import device
from megatron.pipeline.planner.costmodel.device import Device, MeasuredLayer
from megatron.pipeline.planner.costmodel.estimate import layer_size
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.shape.gpt import Shape, Work
from megatron.pipeline.tune.measure import fit
from megatron.pipeline.tune.measure.rank import Measurements, Timing
from megatron.pipeline.tune.measure.sizes import Size, shape


def make(found: Measurements, args: Settings, base: Device | None, command: str) -> Device:
    """A device from measurements.

    Args:
        args: flags of the model whose layers these are.
        base: the device whose latency counts, its links where there were none to measure, and on a GPU its peak; where it is None
            and the GPU is of a shipped kind, that one.
        command: how this was measured, for people.

    Raises:
        ValueError: a number is nowhere to be had.
    """
    base = base or (known(found.name) if found.gpu else None)
    links, taken = dict(found.links), []
    for name, other in (("within", None), ("hop", "within"), ("between", "hop")):
        if name in links:
            continue
        if base is not None:
            links[name] = getattr(base, name)
            taken.append(f"{name} of {base.name}")
        elif other in links:
            links[name] = links[other]
            taken.append(f"{name} as {other}")
        else:
            raise ValueError(NO_LINKS)
    peak = found.peak
    if found.gpu and base is not None:
        peak = base.peak
        taken.append(f"peak of {base.name}")
    latency = base.latency if base is not None else 0.0
    taken.append(f"latency of {base.name}" if base is not None else "latency, 0")
    beside = found.beside_communication
    if beside is None:
        beside = base.beside_communication if base is not None else 1.0
        taken.append(f"beside_communication{f' of {base.name}' if base is not None else ', 1'}")
    where = f"{found.ranks} ranks" + (f" on {found.nodes} nodes" if found.nodes > 1 else "")
    source = f"measured on {date.today()} by {where}, torch {found.torch}: {command}"
    bare = Device(
        name=found.name,
        memory=found.memory,
        peak=peak,
        efficiency=1.0,
        bandwidth=found.bandwidth,
        latency=latency,
        within=links["within"],
        hop=links["hop"],
        between=links["between"],
        to_host=found.to_host,
        to_device=found.to_device,
        beside_communication=beside,
        source=f"{source}; not measured: {', '.join(taken)}",
    )
    if not found.timings:
        return bare
    shapes = [(shape(args, timing.size), timing.seconds) for timing in found.timings]
    layers = [(each, _measured(each, times)) for each, times in shapes]
    return replace(bare, efficiency=fit.efficiency(bare, layers), layers=tuple(layer for _, layer in layers))


def _measured(layer: Shape, times: Work) -> MeasuredLayer:
    *size, experts = layer_size(layer)
    return MeasuredLayer(*size, **times._asdict(), experts=experts)  # type: ignore[misc]


NO_LINKS = "one rank has no links to measure: say whose to take with --gpu NAME, or measure with --ranks 2 or more"


def known(name: str) -> Device | None:
    """The shipped device of a GPU that CUDA calls so, such as A100-80GB of NVIDIA A100-SXM4-80GB; a GH200 is no H200."""
    words = set(re.split(r"[\s-]+", name))
    kinds = [kind for kind in device.shipped() if set(kind.split("-")) <= words]
    return device.named(kinds[0]) if kinds else None


def of_rehearsal(costs: Costs, layers: int, size: Size) -> Timing:
    """A layer from a rehearsal's costs: medians over the stages between the first and the last, which have other work besides.

    Args:
        costs: of stages with the same number of layers each, in seconds and bytes.
        layers: of the model.
        size: of the layers that were rehearsed.

    Raises:
        ValueError: the stages are too few, or no such number of layers has them; or they have no W.
    """
    stages, inner = len(costs.stages), costs.stages[1:-1]
    if not inner:
        raise ValueError(
            f"{stages} stages, and the first and the last have embedding and output layer besides: rehearse with 3 stages or "
            "more, as --pipeline-schedule zb-v has on 2 ranks"
        )
    if layers % stages:
        raise ValueError(
            f"{layers} layers are not spread evenly over {stages} stages: give the model's flags as it was rehearsed"
        )
    if not all(stage.forward > 0 and stage.backward > 0 and stage.weight > 0 for stage in inner):
        raise ValueError(
            "F, B and W must each take time, and some take none: rehearse a schedule that splits the backward, as zb-h1"
        )
    each = layers // stages

    def of_layer(name: str) -> float:
        return median(getattr(stage, name) for stage in inner) / each

    return Timing(size, Work(of_layer("forward"), of_layer("backward"), of_layer("weight")), of_layer("activation"))


def existing(path: Path) -> Device | None:
    """Measurements that exist already.

    Raises:
        ValueError: the file is no device's, or cannot be read.
    """
    if not path.exists():
        return None
    try:
        return device.read(str(path))
    except ValueError as error:
        raise ValueError(f"cannot add to {error}; move it away, or give another -o") from None


def merged(before: Device | None, now: Device, path: Path) -> Device:
    """Measurements of now, with those layers of before that were not measured again.

    All else is of now, the efficiency too: it says what to expect of sizes near to those measured last.

    Raises:
        ValueError: they are of different machines.
    """
    if before is None:
        return now
    if before.name != now.name:
        raise ValueError(f"{path} is of {before.name}, and this is {now.name}: give another -o")
    again = {layer.size for layer in now.layers}
    kept = tuple(layer for layer in before.layers if layer.size not in again)
    return replace(now, layers=kept + now.layers)
