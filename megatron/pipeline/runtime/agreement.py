"""All ranks run one plan: every rank plans for itself, so before a plan runs, all compare what they have.

Ranks that differ (another release on one node, another file, another machine's rounding) would wait for a message that is never
sent, or train wrong numbers. Here they end with an error that names them, and what differs.
"""

from __future__ import annotations

import hashlib
import platform
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata

import torch
from megatron.pipeline.patches import compat

from megatron.pipeline.dist.device import this_device
from megatron.pipeline.planning.planned import Planned

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
    gathered = sent.new_empty(torch.distributed.get_world_size() * len(own))
    torch.distributed.all_gather_into_tensor(gathered, sent)
    if torch.equal(gathered, sent.repeat(torch.distributed.get_world_size())):
        return
    everyone: list[tuple[str, Identity]] = [(socket.gethostname(), mine)] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (socket.gethostname(), mine))
    raise RanksDiffer(differences([host for host, _ in everyone], [identity for _, identity in everyone]))


def differences(hosts: Sequence[str], identities: Sequence[Identity]) -> str:
    """Which ranks differ from most others, and in what, in words.

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
    """Of all that ranks must have in common: the order of all passes, and all programs."""
    digest = hashlib.sha256(plan.schedule.to_json().encode())
    for program in plan.programs:
        digest.update(repr(program).encode())
    return digest.hexdigest()[:16]
