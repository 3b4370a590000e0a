"""Our planner and the published one, head to head: the same costs, the same limits, both simulated by the same code.

    python benchmarks/published_planner.py --checkout PATH [--instances N] [--seeds N ...] [--few] [--cells] [--json FILE]

PATH is a checkout of github.com/sail-sg/zero-bubble-pipeline-parallelism, whose schedulers run as they are: the one of ZB on a
line, and on a V those of ZB-V, V-Half and V-Min, of which the shortest within the limits counts (V-Half and V-Min, which then
take minutes, only up to 1500 ranks times microbatches). On a line it knows the costs of every stage; on a V it plans for their
median, as its own trainer does, and the plan is simulated at the real costs. What it imports beside the standard library (torch,
pulp, Megatron-LM) is replaced by empty modules, for nothing in use calls it.

Without ``--cells`` the instances are random, from fixed seeds: the same everywhere.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from common import EQUAL, command_line, markdown

from megatron.pipeline import planning
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.core.passes import Kind, Order, Pass
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.optimum.bound import lower_bound
from megatron.pipeline.schedule.rules.verify import verify, verify_passes
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate

SMALL = 1500
PLACEMENTS = {"zb-auto": "line", "v-auto": "V"}
PACKAGE = "megatron.core.pipeline_parallel.zerobubble.scheduler"
# F, B, W and hop of a rank, in milliseconds: measured by Qi et al., "Zero Bubble Pipeline Parallelism", for 28.3B parameters
# (table 8), and by the fork's own run.
MEASURED = {"28B": (10.419, 10.207, 7.715, 0.408), "fork": (30.715, 31.308, 18.746, 0.473)}
RETAINED = 0.43  # of the activations, from B to W


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--checkout", type=Path, required=True, metavar="PATH", help="of zero-bubble-pipeline-parallelism")
    parser.add_argument("--instances", type=int, default=500, help="random instances of each seed (default: 500)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[20261123], help="of the random instances")
    parser.add_argument("--few", action="store_true", help="random instances with at most as many microbatches as ranks")
    parser.add_argument("--first", type=int, default=0, help="leave out so many instances")
    parser.add_argument("--cells", action="store_true", help="instead of random instances: measured costs, 17 limits from 1 to 3")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 24, 32], help="of --cells")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[48, 96, 128], help="of --cells")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every instance's numbers there, as they are found")
    parser.add_argument("--reuse", type=Path, metavar="FILE", help="of an earlier run: the published planner is not run again")
    options = parser.parse_args()
    cases = cells(options.ranks, options.microbatches) if options.cells else drawn(options.instances, options.seeds, options.few)
    published, results = Published(options.checkout), []
    earlier = json.loads(options.reuse.read_text()) if options.reuse else []
    for case, row in itertools.zip_longest(itertools.islice(cases, options.first, None), earlier):
        if case is None:
            break
        results.append(compared(case, published, row))
        print(results[-1].line, file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps([result.row for result in results], indent=1))
    print(table(results))


@dataclass(frozen=True)
class Case:
    """An instance for both planners.

    Attributes:
        name: of our family.
        kind: of costs, for the table.
        costs: of every stage.
        limit: memory of a rank, in microbatches of its activations.
    """

    name: str
    kind: str
    ranks: int
    microbatches: int
    costs: Costs
    limit: float


def drawn(count: int, seeds: list[int], few: bool) -> Iterator[Case]:
    """Random instances of every seed: line and V in turn, equal and uneven stages in turn; with ``few`` m is at most p."""
    generators = {seed: random.Random(seed) for seed in seeds}
    for (_, generator), number in itertools.product(generators.items(), range(count)):
        name, even = list(PLACEMENTS)[number % 2], number // 2 % 2 == 0
        ranks = generator.randint(2, 32)
        microbatches = generator.randint(-(-ranks // 2), ranks if few else 8 * ranks)
        home = families.placement(name, ranks)
        retained, hop = generator.choice((0.0, 1.0, generator.random())), generator.choice((0.0, generator.random() / 2))
        times = [tuple(3 ** generator.random() for _ in range(3)) for _ in range(home.last_stage + 1)]
        costs = shared([times[0]] * len(times) if even else times, home, retained, hop)
        limit = ranks * generator.uniform(1, 3)
        yield Case(name, "equal" if even else "uneven", ranks, microbatches, costs, limit)


def cells(ranks: list[int], microbatches: list[int]) -> Iterator[Case]:
    """Measured costs, at 17 limits from 1 to 3 times the memory of 1F1B."""
    for name, (kind, (*times, hop)), p, m in itertools.product(PLACEMENTS, MEASURED.items(), ranks, microbatches):
        home = families.placement(name, p)
        costs = shared([tuple(times)] * (home.last_stage + 1), home, RETAINED, hop / times[0])
        for eighths in range(8, 25):
            yield Case(name, kind, p, m, costs, p * eighths / 8)


def shared(times: list[tuple[float, ...]], home: Placement, retained: float, hop: float) -> Costs:
    """Costs of stages of which a rank's whole share takes these times; ``hop`` is a part of the mean F of a rank."""
    stages = tuple(StageCosts(f, b, w, 1.0, retained).share(home.chunks) for f, b, w in times)
    return Costs(stages, hop * statistics.fmean(stage.forward for stage in stages) * home.chunks)


class Published:
    """The published schedulers.

    Args:
        checkout: where they are.
    """

    def __init__(self, checkout: Path) -> None:
        folder = checkout / PACKAGE.replace(".", "/")
        stubs = {name: ModuleType(name) for name in ("torch", "pulp", "megatron.training")}
        vars(stubs["torch"])["Tensor"] = object
        vars(stubs["pulp"])["value"] = float
        with mock.patch.dict(sys.modules, stubs):
            self._graph, self._zb, self._zbv, self._greedy = (
                _loaded(f"{PACKAGE}.{name}", folder / f"{name}.py") for name in ("graph", "zb", "zbv", "zbv_greedy")
            )

    def best(self, case: Case) -> tuple[float | None, float | None, float]:
        """Span and peak of the shortest of their plans within the limit, None if there is none, and seconds to plan."""
        begin = time.perf_counter()
        plans = list(self._plans(case))
        seconds = time.perf_counter() - begin
        found = []
        for plan in plans:
            verify_passes(plan)  # not the order of microbatches, which its scheduler of a line does not keep in rare cases
            if (peak := max(activation_peaks(plan, case.costs))) <= case.limit * EQUAL:
                found.append((simulate(plan, case.costs).span, peak))
        return *min(found, default=(None, None)), seconds

    def _plans(self, case: Case) -> Iterator[Schedule]:
        """What they plan; those that stop with an error are left out."""
        makers: list[Callable[[Case], Any]] = [self._line] if case.name == "zb-auto" else [self._zb_v]
        if case.name == "v-auto" and case.ranks * case.microbatches <= SMALL:
            makers += [partial(self._v_within, memory) for memory in ("half", "min")]
        for make in makers:
            with contextlib.suppress(AssertionError, ValueError, IndexError), contextlib.redirect_stdout(io.StringIO()):
                placement = families.placement(case.name, case.ranks)
                yield Schedule("published", placement, case.microbatches, _read(make(case)))

    def _line(self, case: Case) -> Any:
        stages = case.costs.stages
        return self._zb.create_schedule(
            self._graph.GraphConfig(
                mem_f=[stage.activation for stage in stages],
                mem_b=[stage.retained - stage.activation for stage in stages],
                mem_w=[-(stage.activation + (stage.retained - stage.activation)) for stage in stages],  # their sum must be 0
                max_mem=[case.limit * EQUAL] * case.ranks,
                cost_f=[stage.forward for stage in stages],
                cost_b=[stage.backward for stage in stages],
                cost_w=[stage.weight for stage in stages],
                cost_comm=float(case.costs.hop),
                n_stages=case.ranks,
                n_micro=case.microbatches,
            )
        )

    def _zb_v(self, case: Case) -> Any:
        stage = case.costs.stages[0]
        memory = stage.activation, stage.retained - stage.activation, -stage.retained
        graph = self._zbv.PipelineGraph(case.ranks, case.microbatches, *_medians(case.costs), *memory, max_mem=case.limit * EQUAL)
        return graph.create_schedule(self._chunks(case))

    def _v_within(self, memory: str, case: Case) -> Any:
        graph = self._greedy.PipelineGraph(case.ranks, case.microbatches, memory, *_medians(case.costs))
        return graph.create_schedule(self._chunks(case))

    def _chunks(self, case: Case) -> Any:
        each = [1.0] * case.ranks
        return self._graph.GraphConfig([], [], [], None, each, each, each, 0.0, 1, 2, case.ranks, case.microbatches)


def _medians(costs: Costs) -> tuple[float, ...]:
    """F, B, W and hop."""
    names = ("forward", "backward", "weight")
    return *(statistics.median(getattr(stage, name) for stage in costs.stages) for name in names), float(costs.hop)


def _loaded(name: str, file: Path) -> ModuleType:
    """A module from a file, which later modules can import by its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader, f"no {file}"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(rows: Any) -> Order:
    """The published planner's order as ours: it counts the chunks of B from the end of the model, and of W as it likes."""
    ranks = len(rows)
    return tuple(
        tuple(Pass(Kind(node.type.value), node.microbatch, node.layer_group_idx // ranks) for node in row) for row in rows
    )


@dataclass(frozen=True)
class Result:
    """Spans, peaks in microbatches and seconds to plan, ours and theirs; None where it has no plan."""

    case: Case
    ours: float
    theirs: float | None
    bound: float
    work: float
    peaks: tuple[float, float | None]
    seconds: tuple[float, float]

    @property
    def behind(self) -> float:
        """Points of bubble that ours is behind; negative where it is ahead."""
        return 0.0 if self.theirs is None else 100 * (self.work / self.theirs - self.work / self.ours)

    @property
    def outcome(self) -> str:
        if self.theirs is None or self.ours * EQUAL < self.theirs:
            return "shorter"
        return "equal" if self.ours <= self.theirs * EQUAL else "longer"

    @property
    def row(self) -> dict[str, Any]:
        case = self.case
        sizes = {"name": case.name, "kind": case.kind, "p": case.ranks, "m": case.microbatches, "times": case.limit / case.ranks}
        spans = {"ours": self.ours, "theirs": self.theirs, "bound": self.bound, "work": self.work}
        return {**sizes, **spans, "peaks": self.peaks, "seconds": self.seconds, "outcome": self.outcome, "behind": self.behind}

    @property
    def line(self) -> str:
        case = self.case
        spans = self.ours, self.theirs, self.bound
        bubbles = [f"{100 * (1 - self.work / span):6.2f}%" if span else "  none " for span in spans]
        sizes = f"{case.name:8}{case.kind:7} p={case.ranks:<3} m={case.microbatches:<4} {case.limit / case.ranks:5.3f}"
        seconds = " ".join(f"{each:6.2f}s" for each in self.seconds)
        return f"{sizes} {' '.join(bubbles)} {self.outcome:8} {self.behind:+.3f} {seconds}"


def compared(case: Case, published: Published, row: dict[str, Any] | None) -> Result:
    """Both planners on one instance; every plan in use obeys our rules and the limit.

    Args:
        row: of an earlier run, whose figures of the published planner are taken.
    """
    begin = time.perf_counter()
    problem = planning.Request(case.name, case.ranks, case.microbatches, case.costs, memory_limit=case.limit).problem()
    ours = planning.solve(case.name, problem)
    seconds = time.perf_counter() - begin
    verify(ours, case.costs, problem.limits)
    theirs, peak, their_seconds = (row["theirs"], row["peaks"][1], row["seconds"][1]) if row else published.best(case)
    stages = problem.placement.stages
    work = case.microbatches * max(sum(case.costs.stages[stage].total for stage in rank) for rank in stages)
    peaks = max(activation_peaks(ours, case.costs)), peak
    return Result(case, simulate(ours, case.costs).span, theirs, lower_bound(problem), work, peaks, (seconds, their_seconds))


def table(results: list[Result]) -> str:
    """Wins, ties and losses by placement and kind of costs, and all together."""
    keys = sorted({(result.case.name, result.case.kind) for result in results}, reverse=True)
    groups = [(key, [result for result in results if (result.case.name, result.case.kind) == key]) for key in keys]
    lines = [_line(f"{PLACEMENTS[name]}, {kind}", chosen) for (name, kind), chosen in groups]
    columns = ("", "instances", "shorter", "equal", "longer", "no plan", "worst loss", "mean gain", "over the limit", "our gap")
    return markdown(columns, [*lines, _line("all", results)])


def _line(title: str, chosen: list[Result]) -> list[object]:
    outcomes = [result.outcome for result in chosen]
    met = [result for result in chosen if result.theirs is not None]
    worst = max((result.behind for result in met), default=0.0)
    gain = statistics.fmean(-result.behind for result in met) if met else 0.0
    gaps = [max(0.0, result.ours / result.bound - 1) for result in chosen]
    over = sum(result.peaks[0] > result.case.limit * EQUAL for result in chosen)
    counts = [outcomes.count(outcome) for outcome in ("shorter", "equal", "longer")]
    points = (f"{max(0.0, worst):.3f}", f"{gain:.2f}")
    return [title, len(chosen), *counts, len(chosen) - len(met), *points, over, f"{100 * statistics.fmean(gaps):.2f} %"]


if __name__ == "__main__":
    main()
