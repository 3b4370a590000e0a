"""Searched orders of passes take the place of quick ones while training goes on.

A search takes up to a second where stages differ, and a loop may come with another number of microbatches in every step: each
runs a quick plan at first. The first rank of the world searches in a process of its own and sends what it finds to all.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

import torch

from megatron.pipeline.distributed.groups import new_group, once_rank_0_has
from megatron.pipeline.planner.planning.aside import PlannedBatch, PlanningProcess
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.planning.planned import Planned
from megatron.pipeline.planner.schedule.lower.posting import Posting

_LOG = logging.getLogger(__name__)


class LaterPlans:
    """Plans that come later. All ranks of the world call its methods in the same order.

    Args:
        plans: quick ones, by the number of microbatches.
    """

    def __init__(self, plans: PlanCache, posting: Posting) -> None:
        self._plans, self._posting = plans, posting
        self._process = PlanningProcess()
        self._world: torch.distributed.ProcessGroup | None = None
        self._begun: set[int] = set()
        # By number of microbatches, in the order of their search: the quick plan, and on the first rank what will come.
        self._missing: dict[int, tuple[Planned, Future[bytes] | None]] = {}

    def search(self, microbatches: int) -> None:
        """Begin the search for a number of microbatches, once."""
        if microbatches not in self._begun:
            self._begun.add(microbatches)
            here = torch.distributed.get_rank() == 0
            coming = self._process.plan(self._plans.of_batch(microbatches), self._posting, False) if here else None
            self._missing[microbatches] = self._plans.plan(microbatches), coming

    def take(self) -> None:
        """Take the next plan if it is there. A small collective over the world for as long as one is missing."""
        if not self._missing:
            return
        microbatches, (quick, coming) = next(iter(self._missing.items()))
        try:
            self._world = self._world or new_group(range(torch.distributed.get_world_size()), backend="gloo")
            message = once_rank_0_has(coming, self._world)
        except (ValueError, ChildProcessError) as error:
            _LOG.warning("%d microbatches keep the plan that was made without a search: %s", microbatches, error)
        else:
            if message is None:
                return
            if self._plans.plan(microbatches) is quick:  # no other was adopted meanwhile
                self._plans.made[microbatches, False] = PlannedBatch.unpacked(message).planned
        del self._missing[microbatches]
