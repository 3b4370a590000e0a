"""Planning beside training: requests in, with costs or with loads, and plans out on all ranks, while iterations go on.

A plan takes from milliseconds to seconds, and the interpreter that trains has its passes to run: one rank has them made in a
process of its own (``planner/planning/aside.py``). Its users: searched orders in place of quick ones (here), measured costs in
place of equal ones (``replan.py``), and an order for every batch (``every_batch.py``).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch

from megatron.pipeline.distributed.groups import new_group
from megatron.pipeline.planner import Costs, PlanCache, Planned, PlannedBatch, PlanningProcess, Request, Schedule

_LOG = logging.getLogger(__name__)


class Coming:
    """Plans that rank 0 has asked its process for.

    Args:
        asked: by number of microbatches, on rank 0.
        world: a group of gloo with all ranks, so that no host waits for its device.
    """

    def __init__(self, asked: Mapping[int, Future[bytes]] | None, world: torch.distributed.ProcessGroup | None) -> None:
        self._asked, self._world = asked, world

    def take(self) -> dict[int, Planned] | Exception | None:
        """All of them, by number of microbatches, or why there are none; the same on all ranks. None while one is missing.

        A small collective over the world.
        """
        done = self._asked is not None and all(plan.done() for plan in self._asked.values())
        there = torch.tensor(done, dtype=torch.int32, device="cpu")
        torch.distributed.broadcast(there, src=0, group=self._world)
        if not there.item():
            return None
        found: list[Any] = [self._answers()]
        torch.distributed.broadcast_object_list(found, src=0, group=self._world)
        if isinstance(found[0], Exception):
            return found[0]
        return {microbatches: PlannedBatch.unpacked(message).planned for microbatches, message in found[0].items()}

    def _answers(self) -> dict[int, bytes] | Exception:
        try:
            return {microbatches: plan.result() for microbatches, plan in (self._asked or {}).items()}
        except Exception as error:  # the training goes on, and says so
            return error


class BackgroundPlanner:
    """The planner beside one pipeline. All ranks of the world call its methods in the same order, but for ``start``.

    Args:
        plans: what the pipeline runs.
    """

    def __init__(self, plans: PlanCache) -> None:
        self._plans = plans
        self._process = PlanningProcess()
        self._begun: set[int] = set()  # numbers of microbatches that have been searched for
        self._searches: deque[tuple[int, Planned, Coming]] = deque()  # under way, with the quick plans

    @cached_property
    def world(self) -> torch.distributed.ProcessGroup | None:
        return new_group(range(torch.distributed.get_world_size()), backend="gloo")

    def start(self, request: Request, any_order: bool = False, used: Schedule | None = None) -> Future[bytes]:
        """Start planning, for this rank alone: see ``PlanningProcess.plan``."""
        return self._process.plan(request, self._plans.posting, any_order, used)

    def ask(self, requests: Mapping[int, Request], used: Mapping[int, Schedule] | None = None) -> Coming:
        """Start planning for all ranks.

        Args:
            requests: by number of microbatches; another process can read them.
            used: schedules in use, which stay where they are allowed and as short.
        """
        asked = None
        if torch.distributed.get_rank() == 0:
            asked = {number: self.start(request, used=(used or {}).get(number)) for number, request in requests.items()}
        return Coming(asked, self.world)

    def again(self, costs: Costs, memory_limit: float | Sequence[float] | None) -> Coming:
        """Start planning at other costs, and within another limit, for every number of microbatches that is planned by now.

        A schedule in use stays where it fits into the limit and the family's new one is not shorter; copies to host memory are
        always planned anew. Nothing changes until ``PlanCache.adopt``.
        """
        return self.ask(self._plans.again(costs, memory_limit), {} if self._plans.offload else self._plans.planned)

    def search(self, microbatches: int) -> None:
        """Begin the search for a number of microbatches, once: a loop may come with another number in every step, and each runs a
        quick plan at first."""
        if microbatches not in self._begun:
            self._begun.add(microbatches)
            coming = self.ask({microbatches: self._plans.of_batch(microbatches)})
            self._searches.append((microbatches, self._plans.plan(microbatches), coming))

    def adopt_searched(self) -> None:
        """Adopt what the oldest search has found, if it is there. A small collective over the world while one is under way."""
        if not self._searches:
            return
        microbatches, quick, coming = self._searches[0]
        if (found := coming.take()) is None:
            return
        self._searches.popleft()
        if isinstance(found, Exception):
            _LOG.warning("%d microbatches keep the plan that was made without a search: %s", microbatches, found)
        elif self._plans.plan(microbatches) is quick:  # no other was adopted meanwhile
            self._plans.adopt(found)
