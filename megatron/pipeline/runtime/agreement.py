"""All ranks run one plan: every rank plans for itself, so before a plan runs, all compare what they have.

Ranks that differ (another release on one node, another file, another machine's rounding) would wait for a message that is never
sent, or train wrong numbers. Here they end with an error that names them, and what differs. So they do where a program has built
the model for another placement than the plan's.
"""

from __future__ import annotations

import hashlib
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from typing import Any, NamedTuple

import torch
from megatron.core.utils import unwrap_model
from megatron.pipeline.patches import compat

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.model.split_linear import trained_share
from megatron.pipeline.planner import Placement, Planned

_PACKAGES = ("megatron-pipeline", "torch", "numba", "numpy")  # that run, and that plan

Identity = Mapping[str, str]


class RanksDiffer(RuntimeError):
    """Not all ranks have the same plan or the same software."""


def agree(plans: Mapping[str, Planned]) -> None:
    """Compare plans and versions of all ranks. Collective over the world: 32 bytes a rank, if all is well.

    Args:
        plans: by what each is called in an error.

    Raises:
        RanksDiffer: on every rank; names the ranks that differ from most others, and what differs.
    """
    mine = _versions() | {name: _digest(plan) for name, plan in plans.items()}
    own = hashlib.sha256(repr(sorted(mine.items())).encode()).digest()
    sent = torch.tensor(list(own), dtype=torch.uint8, device=this_device())
    gathered = [torch.empty_like(sent) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(gathered, sent)
    if torch.equal(torch.stack(gathered), sent.expand(len(gathered), -1)):
        return
    everyone: list[tuple[str, Identity]] = [(socket.gethostname(), mine)] * len(gathered)
    torch.distributed.all_gather_object(everyone, (socket.gethostname(), mine))
    raise RanksDiffer(differences([host for host, _ in everyone], [identity for _, identity in everyone]))


def differences(hosts: Sequence[str], identities: Sequence[Identity]) -> str:
    """Name the ranks that differ from most others, and in what.

    Args:
        hosts: of every global rank.
        identities: what every global rank has: versions and digests, by name.
    """
    lines = []
    for name in dict.fromkeys(name for identity in identities for name in identity):
        values = [identity.get(name, "none") for identity in identities]
        (usual, count), *others = Counter(values).most_common()
        for value, _ in others:
            ranks = [rank for rank, own in enumerate(values) if own == value]
            where = ", ".join(f"{rank} on {hosts[rank]}" for rank in ranks)
            lines.append(
                f"global rank{'s' * (len(ranks) > 1)} {where}: {name} {value}, but {count} of {len(values)} ranks have {usual}"
            )
    return (
        f"the ranks do not run the same plan: {'; '.join(lines)}. Install the same versions and give the same files on all nodes"
    )


class Built(NamedTuple):
    """Layers and ends of a chunk by its own account; where it says nothing, nothing is compared.

    Attributes:
        ends: which of ``_ENDS`` it has.
        layers: the numbers of its transformer layers, as they follow each other; None if it does not say them.
    """

    ends: tuple[bool, ...]
    layers: tuple[int, ...] | None


_ENDS = {"embedding": "pre_process", "output layer": "post_process"}


def check_chunks(
    group: torch.distributed.ProcessGroup, placement: Placement, schedule: str, chunks: Sequence[torch.nn.Module]
) -> list[float | None]:
    """Refuse a model whose chunks are not the stages that a schedule's placement has there. Collective over the pipeline.

    Returns:
        The ``trained_share`` of every stage if some weights are frozen; otherwise 1 of all. Empty for other numbers of chunks.

    Args:
        schedule: its name.
        chunks: of this rank, wrapped or not.

    Raises:
        ValueError: on every rank of the pipeline: what a chunk has, what the schedule wants, and what to do.
    """
    everyone: list[list[tuple[Built, bool, float | None]]] = [[]] * group.size()
    own = [(_built(unwrap_model(chunk)), all(each.requires_grad for each in chunk.parameters()), trained_share(chunk))
           for chunk in chunks]  # fmt: skip
    torch.distributed.all_gather_object(everyone, own, group=group)
    if [len(row) for row in everyone] != [placement.chunks] * placement.ranks:
        return []
    if found := misplaced([[built for built, *_ in row] for row in everyone], placement, schedule):
        raise ValueError(
            f"{found}: build the chunks for the schedule's placement, once it is installed, as examples/own_training_loop.py "
            "does, or take a schedule for chunks as they are: megatron-core's own functions build those of interleaved and gis, "
            "with one chunk those of 1f1b and zb-h1"
        )
    stages = [everyone[rank][chunk] for rank, chunk in map(placement.home, range(placement.depth))]
    return [1.0 if all(whole for _, whole, _ in stages) else share for *_, share in stages]


def misplaced(chunks: Sequence[Sequence[Built]], placement: Placement, schedule: str) -> str | None:
    """Say what is where the placement of a schedule has something else; None if all is right.

    Args:
        chunks: of every rank, as many as the placement has.
    """
    following = 0
    for rank, row in enumerate(placement.stages):
        for chunk, stage in enumerate(row):
            right = placement.is_first(stage), placement.is_last(stage)
            for end, has, may, home in zip(_ENDS, chunks[rank][chunk].ends, right, (0, placement.last_stage), strict=True):
                if has and not may:
                    its_rank, its_chunk = placement.home(home)
                    return (
                        f"chunk {chunk} of pipeline rank {rank} has the {end}, and schedule {schedule} has it in chunk "
                        f"{its_chunk} of rank {its_rank}"
                    )
    for stage in range(placement.last_stage + 1):
        rank, chunk = placement.home(stage)
        layers = chunks[rank][chunk].layers
        if placement.is_first(stage) or layers is None:
            following = 0  # unknown
        if not layers:
            continue
        first = following or layers[0]
        following = first + len(layers)
        if layers != tuple(range(first, following)):
            return (
                f"chunk {chunk} of pipeline rank {rank} has layers {', '.join(map(str, layers))}, and schedule {schedule} has "
                f"layer {first} and what follows it there"
            )
    return None


def _built(chunk: Any) -> Built:
    layers = getattr(getattr(chunk, "decoder", None), "layers", None)
    numbers: list[Any] = [getattr(layer, "layer_number", None) for layer in layers or ()]
    says = layers is not None and None not in numbers
    return Built(tuple(getattr(chunk, name, None) is True for name in _ENDS.values()), tuple(numbers) if says else None)


def _versions() -> dict[str, str]:
    # The megatron-core that is imported counts, not the one that pip has; behind "+" its version names some commit.
    core = compat.version().partition("+")[0]
    return {name: _version(name) for name in _PACKAGES} | {"megatron-core": core, "Python": platform.python_version()}


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # run from its source, on PYTHONPATH
        return "not installed"


def _digest(plan: Planned) -> str:
    """Digest of all that ranks must have in common: the order of all passes, and all programs."""
    digest = hashlib.sha256(plan.schedule.to_json().encode())
    for program in plan.programs:
        digest.update(repr(program).encode())
    return digest.hexdigest()[:16]
