"""What DDP does while passes run: where reductions and gathers begin, on this rank; their costs; and sums in one order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.iteration import Iteration


class Buckets(NamedTuple):
    """Of one training iteration of a rank.

    Attributes:
        reduced: of each chunk, how many groups of buckets were being reduced when the last pass ended.
        early: of them, how many when the last pass began.
        groups: of each chunk, how many there are.
        ahead: how many were being gathered when the first pass began.
        in_order: whether gathers began in the order in which passes asked for what they bring.
    """

    reduced: list[int]
    early: list[int]
    groups: list[int]
    ahead: int
    in_order: bool


def costs(name: str, ranks: int) -> Costs:
    """Of passes, with long reductions and gathers."""
    given = uniform(families.placement(name, ranks), forward=1, backward=1, weight=1)
    stages = tuple(replace(stage, reduce=4.0, step=0.2, gather=2.0) for stage in given.stages)
    return replace(given, stages=stages, norm=0.1)


@contextmanager
def noted() -> Iterator[list[Buckets]]:
    """The training iterations that run within."""
    found: list[Buckets] = []
    events: list[tuple[str, Any]] = []

    def telling(name: str, original: Callable[..., Any], after: str = "") -> Callable[..., Any]:
        def told(self: Any, *given: Any, **options: Any) -> Any:
            events.append((name, self))
            result = original(self, *given, **options)
            if after:
                events.append((after, self))
            return result

        return told

    run = Iteration.run

    def running(iteration: Iteration, call: Any) -> Any:
        result = run(iteration, call)
        if not call.forward_only:
            found.append(_summary(events, [chunk.bucket_groups + chunk.expert_parallel_bucket_groups for chunk in call.chunks]))
        events.clear()  # the optimizer's step begins the gathers for the next one
        return result

    with ExitStack() as stack:
        for owner, method, names in (
            (Group, "start_grad_sync", ("reduce",)),
            (Group, "start_param_sync", ("gather",)),
            (Group, "finish_param_sync", ("take",)),
            (Executor, "_compute", ("begin", "end")),
        ):
            name, *after = names
            stack.enter_context(patch.object(owner, method, telling(name, getattr(owner, method), *after)))
        stack.enter_context(patch.object(Iteration, "run", running))
        yield found


def _summary(events: list[tuple[str, Any]], chunks: list[list[Any]]) -> Buckets:
    names = [name for name, _ in events]
    begins, last = names.index("begin"), len(names) - 1 - names[::-1].index("begin")
    ends = len(names) - 1 - names[::-1].index("end")

    def of(name: str, until: int) -> list[Any]:
        return list(dict.fromkeys(one for what, one in events[:until] if what == name))

    reduced, early = of("reduce", ends), of("reduce", last)
    gathered, taken = of("gather", len(events)), of("take", len(events))
    return Buckets(
        [sum(group in reduced for group in groups) for groups in chunks],
        [sum(group in early for group in groups) for groups in chunks],
        [len(groups) for groups in chunks],
        len(of("gather", begins)),
        gathered == taken,
    )
