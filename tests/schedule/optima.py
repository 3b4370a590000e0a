"""Optima that a constraint model for OR-Tools CP-SAT has proven, in ``optima.json``, so that plans are compared with them.

They do not change: the model was part of these tests until 2026-11-28, and ended by itself for each of them.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.problem import Problem


class Case(NamedTuple):
    """A family, its sizes, a memory limit in microbatches, and the seconds of F, B and W."""

    name: str
    ranks: int
    microbatches: int
    limit: float | None
    costs: tuple[float, float, float]

    def __str__(self) -> str:
        return f"{self.name} p={self.ranks} m={self.microbatches} limit={self.limit} costs={','.join(map(str, self.costs))}"

    def problem(self) -> Problem:
        costs = uniform(families.placement(self.name, self.ranks), *self.costs)
        return planning.Request(self.name, self.ranks, self.microbatches, costs, memory_limit=self.limit).problem()


CASES = [
    Case(*sizes, costs)
    for sizes, costs in product(
        [
            ("zb-auto", 3, 6, 3), ("zb-auto", 3, 5, 2), ("zb-auto", 4, 5, 6), ("v-half", 3, 4, None), ("v-half", 4, 5, None),
            ("v-min", 3, 5, None), ("v-min", 4, 4, None), ("v-auto", 4, 4, 2.5), ("zb-v", 2, 4, None),
        ],
        [(1, 1, 1), (1, 1.2, 0.8), (1, 1.4, 0.9)],
    )
]  # fmt: skip


def stored(what: str = "optima") -> Any:
    """The optima by case; or those of braids, loads, joined passes, or the least peaks of ranks that offload."""
    return json.loads(Path(__file__).with_name("optima.json").read_text())[what]
