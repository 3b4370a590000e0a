"""Optima that CP-SAT has proven, stored so that plans are compared with them in no time: ``python tests/schedule/optima.py``.

That command proves the ``optima`` again. The other entries of ``optima.json`` do not change: what was proven of braids, loads,
joined passes and offload by models that were part of these tests until 2026-11-28.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from schedule.exact import optimum

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.problem import Problem

STORED = Path(__file__).with_name("optima.json")
SECONDS = 60  # of search for each


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
        return planning.Request(
            self.name, self.ranks, self.microbatches, costs, memory_limit=self.limit, objective="span"
        ).problem()


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


def proven(case: Case) -> float:
    """The optimum.

    Raises:
        AssertionError: it is not proven within ``SECONDS``.
    """
    problem = case.problem()
    found = optimum(problem, seconds=SECONDS, hint=planning.solve(case.name, problem))
    assert found.proven, f"{case}: between {found.bound} and {found.value}"
    return found.value


def stored(what: str = "optima") -> Any:
    """The optima by case; or those of braids, loads, joined passes, or the least peaks of ranks that offload."""
    return json.loads(STORED.read_text())[what]


def main() -> None:
    now: dict[str, Any] = {"proven": f"{datetime.now(UTC):%Y-%m-%d}", "solver": f"ortools {metadata.version('ortools')}"}
    now |= {"optima": {str(case): proven(case) for case in CASES}}
    STORED.write_text(json.dumps(json.loads(STORED.read_text()) | now, indent=1) + "\n")


if __name__ == "__main__":
    main()
