"""Process groups in addition to those of megatron-core's parallel_state, and barriers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from megatron.pipeline.distributed.device import this_device

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_OF_A_FILE = ("cga_cluster_size", "max_ctas", "min_ctas", "net_name")  # what upstream sets of NCCL's configuration


def new_group(ranks: Sequence[int], **options: Any) -> torch.distributed.ProcessGroup | None:
    """A group of these ranks, while other ranks make other groups.

    Collective over the world, like ``torch.distributed.new_group``, but every rank names only the group that it is a member
    of (or an empty one). An all-gather of these lists tells every rank which groups to make. Its timeout is the world's:
    torch's default, 10 minutes with NCCL, would end a run that waits longer on purpose.

    Args:
        ranks: global ranks, this one among them, the same on all of them; empty for none.
        options: of ``torch.distributed.new_group``.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, tuple(ranks))
    world: Any = torch.distributed.group.WORLD
    timeout, mine = world._get_backend(this_device()).options._timeout, None
    for wanted in sorted(set(filter(None, everyone))):
        group = torch.distributed.new_group(list(wanted), timeout=timeout, **options)
        if wanted == tuple(ranks):
            mine = group
    return mine


def like(group: torch.distributed.ProcessGroup, high_priority: bool = False, max_ctas: int | None = None) -> dict[str, Any]:
    """Options of a new group with the backend of another, and what was given to that one for NCCL: by
    ``--nccl-communicator-config-path``, or ``--high-priority-stream-groups``.

    Args:
        high_priority: with NCCL its kernels go before others.
        max_ctas: with NCCL the most thread blocks of a kernel, which wait on as many SMs for other ranks; None: as ``group``
            has it, else as ``few_ctas`` says for its ranks.
    """
    backend = torch.distributed.get_backend(group)
    if backend != "nccl":
        return {"backend": backend}
    theirs: Any = group._get_backend(this_device()).options
    options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority or theirs.is_high_priority_stream)
    found: dict[str, Any] = {name: getattr(theirs.config, name, None) for name in _OF_A_FILE}
    given = {name: value for name, value in found.items() if value != getattr(options.config, name, None)}
    few = max(few_ctas(torch.distributed.get_process_group_ranks(group)), given.get("min_ctas", 0))
    for name, value in ({"max_ctas": few} | given | ({} if max_ctas is None else {"max_ctas": max_ctas})).items():
        setattr(options.config, name, value)
    if given and torch.distributed.get_rank() == 0:
        _LOG.info("groups beside the pipeline's have the settings of NCCL that it was given: %s", given)
    return {"backend": backend, "pg_options": options}


def few_ctas(ranks: Sequence[int]) -> int:
    """Thread blocks with which messages between global ranks end behind a pass, and leave passes their SMs: NVLink moves 64 MB
    through 4 in about a millisecond, and network cards want 8.

    A node has the ranks that torchrun starts there, else one for every GPU.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.cuda.device_count() or 1
    return 4 if len({rank // per_node for rank in ranks}) == 1 else 8


def barrier() -> None:
    """Wait for all ranks of the world.

    With NCCL it says which device it means. Otherwise a first barrier would guess one, the rank modulo the node's GPUs, and make
    a communicator there: another GPU than the rank's on a node with fewer ranks than GPUs.
    """
    on_gpu = torch.distributed.get_backend() == "nccl"
    torch.distributed.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)


def done_by_rank_0(action: Callable[[], _T]) -> _T:
    """Return on every rank the result of a function that rank 0 alone calls; a collective over the world.

    Raises:
        Exception: on every rank the one that the function raised.
    """
    outcome: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome[0] = action()
        except Exception as error:
            outcome[1] = error
    torch.distributed.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise failure
    return result  # type: ignore[no-any-return]


def connect(group: torch.distributed.ProcessGroup | None) -> None:
    """Make the communicator of a group's collectives now, where NCCL would make it at the first one. Collective over the group.

    Making it blocks the host until all members come, and takes device memory: within an iteration that could be a deadlock, and
    memory that the plan does not know.
    """
    if group is not None and torch.distributed.get_backend(group) == "nccl":
        torch.distributed.all_reduce(torch.zeros(1, device=this_device()), group=group)


@contextmanager
def memory_noted(purpose: str) -> Iterator[None]:
    """Log on rank 0 the device memory that is taken in here outside of torch's allocator, as NCCL does for communicators.

    Limits of memory do not know it. What other processes take of the same device meanwhile counts, too. Without NCCL nothing is
    logged.
    """
    if torch.distributed.get_backend() != "nccl":
        yield
        return
    before = _outside_of_allocator()
    yield
    taken = max(0, _outside_of_allocator() - before)
    if torch.distributed.get_rank() == 0:
        _LOG.info("%s take %.0f MiB of device memory on rank 0", purpose, taken / 2**20)


def warn_of_eager_groups() -> None:
    """Warn on rank 0 where NCCL has one communicator for all messages of a group and not one for each pair of ranks.

    It does where ``init_process_group`` was called with ``device_id``. What a rank exchanges with one neighbour then waits for
    what it exchanges with the other: results are the same, and passes wait longer than planned.
    """
    world: Any = torch.distributed.group.WORLD
    if torch.distributed.get_backend() == "nccl" and world.bound_device_id is not None and torch.distributed.get_rank() == 0:
        _LOG.warning(
            "torch.distributed was initialised with device_id, so messages to both neighbours share an NCCL communicator and "
            "wait for each other: call init_process_group without device_id"
        )


def _outside_of_allocator() -> int:
    """Bytes of this device that are in use and not torch's allocator's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()
