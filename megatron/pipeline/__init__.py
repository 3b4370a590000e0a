"""Pipeline schedules for today's megatron-core, without a fork.

    import megatron.pipeline

    megatron.pipeline.install("zb-h1")  # and any loop on megatron-core trains under it

The rooms, from the top: each imports only those below it (docs/architecture.md).

``cli``        the command ``mpipe``
``launch``     Megatron-LM's own scripts, unchanged, under our schedules
``tune``       the search for the fastest training
``trainer``    data, checkpoints and the loop of ``pretrain_gpt.py``
``session``    what programs share: planning from flags, start-up lines, reports, names of checkpoints
``flags``      Megatron-LM's flags and ours
``runtime``    how one rank runs its program, and optimizer steps before the gradient norm is known
``monitor``    times and bytes of passes, the position of each rank, and the watchdog
``model``      the GPT cut by a placement, with linears whose backward splits
``patches``    the short list of upstream symbols that are replaced, one file per upstream module
``backward``   backwards that leave weight gradients to W
``distributed`` devices, process groups, collectives
``planner``    plans schedules and predicts time and memory; never imports torch
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.pipeline.planner import Request
    from megatron.pipeline.runtime.every_batch import EveryBatch
    from megatron.pipeline.session.own_loop import OwnLoop

__all__ = ["EveryBatch", "install"]

__version__ = "0.2.0"


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "EveryBatch":
            from megatron.pipeline.runtime.every_batch import EveryBatch  # which imports torch

            return EveryBatch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def install(schedule: str | Request = "zb-h1", costs: str | Path | None = None, **options: Any) -> OwnLoop:
    """Run a loop on megatron-core under a schedule: call it once on every rank, before the model is built.

    It may come before or after the imports of megatron-core. Chunks are split as megatron-core's DistributedDataParallel wraps
    them, and ``get_forward_backward_func()`` returns the schedule's function. One chunk per rank needs nothing else.

    Args:
        schedule: its name, a ``planning.Request``, ``file:PATH``, or ``stock`` for megatron-core's own.
        costs: a file that ``mpipe costs -o`` has written. Without it F, B and W take the same time, and the W of frozen weights
            none.
        options: ``watchdog`` and ``watch``, of ``session.own_loop.OwnLoop``; and those of ``runtime.pipeline.Pipeline``, such as
            ``measure``.

    Raises:
        TypeError: ``schedule`` is neither, or ``Pipeline`` has no such option.
        ValueError: there is no such schedule, or the file cannot be read.
        RuntimeError: this release of megatron-core lacks what is relied on.
    """
    from megatron.pipeline.planner import Request
    from megatron.pipeline.session.own_loop import OwnLoop  # which imports torch

    if not isinstance(schedule, str | Request):
        raise TypeError(f'install({schedule!r}): give a schedule\'s name, such as "zb-h1", or a planning.Request')
    loop = OwnLoop(schedule, costs, **options)
    loop.install()
    return loop
