"""How good and how fast are the planner's schedules? Prints Markdown tables, which benchmarks/README.md sums up.

    python benchmarks/planner.py [--quick] [--json FILE]

The instances are drawn from fixed seeds, so that spans and gaps are the same everywhere; seconds are CPU seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import EQUAL, command_line, markdown

from megatron.pipeline import planning
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.schedule.core.problem import Problem
from megatron.pipeline.schedule.lower.lower import lower
from megatron.pipeline.schedule.optimum.bound import lower_bound
from megatron.pipeline.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.schedule.search import seeds
from megatron.pipeline.schedule.search.instance import Instance, Seed
from megatron.pipeline.schedule.time.simulate import simulate

Row = dict[str, Any]

COSTS = {"1/1/1": (1, 1, 1), "1/1.2/0.8": (1, 1.2, 0.8), "1/1.4/0.9": (1, 1.4, 0.9)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller instances: less than a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every instance's numbers there")
    parser.add_argument("--measure", nargs=4, metavar=("NAME", "P", "M", "V"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, *sizes = options.measure
        print(json.dumps(measure(name, *map(int, sizes))))
        return
    results: dict[str, list[Row]] = {}
    for part in (greedy_and_ours, named_memories, speed):
        begin = time.perf_counter()
        results[part.__name__] = part(options.quick)
        print(f"\n<!-- {part.__name__}: {time.perf_counter() - begin:.0f} seconds -->\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def gap(value: float, bound: float) -> float:
    """How far above the bound, as a share of it; sums of floats stray in the last bits."""
    return 0.0 if value <= bound * EQUAL else value / bound - 1


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


# --- the greedy and ours ----------------------------------------------------------------------------------------------


def random_costs(generator: random.Random, placement: Placement) -> Costs:
    """Stages whose F, B and W all lie within a factor 2, and a hop of up to half an average F of a rank."""
    stages = tuple(
        StageCosts(*(generator.uniform(1, 2) for _ in range(3))).share(placement.chunks) for _ in range(placement.last_stage + 1)
    )
    forward = statistics.fmean(stage.forward for stage in stages) * placement.chunks
    return Costs(stages, generator.uniform(0, forward / 2))


def random_set(count: int) -> list[tuple[str, Problem]]:
    """The fixed random instances, zb-auto on a line and v-auto on a V in turn; limits are 1 to 3 times the memory of 1F1B,
    and on a V from V-Min's to twice that of 1F1B."""
    generator = random.Random(20250101)
    found = []
    for number in range(count):
        name = ("zb-auto", "v-auto")[number % 2]
        ranks, microbatches = generator.randint(2, 16), generator.randint(1, 64)
        least, most = (ranks, 3 * ranks) if name == "zb-auto" else ((ranks + 4) // 3, 2 * ranks)
        costs = random_costs(generator, families.placement(name, ranks))
        limit = generator.uniform(least, most)
        found.append((name, planning.Request(name, ranks, microbatches, costs, memory_limit=limit).problem()))
    return found


def greedy(problem: Problem) -> float:
    """What plain list scheduling takes: B before F before W, the oldest microbatch first, within the limits.

    No look-ahead but one: what the oldest microbatch needs stays free, without which it would get stuck.
    """
    instance = Instance(problem)
    assert problem.limits is not None
    plan = instance.construct(Seed(seeds.greedy(instance)), np.array(problem.limits))
    assert plan is not None, "there is room for one microbatch"
    return plan.value


def greedy_and_ours(quick: bool) -> list[Row]:
    rows: list[Row] = []
    for name, problem in random_set(12 if quick else 200):
        schedule = planning.solve(name, problem)
        verify(schedule, problem.costs, problem.limits)
        ours, plain, bound = problem.value(simulate(schedule, problem.costs)), greedy(problem), lower_bound(problem)
        sizes = {"p": problem.ranks, "m": problem.microbatches, "limit": max(problem.limits or ())}
        rows.append({"name": name, **sizes, "ours": ours, "greedy": plain, "bound": bound})
    print(f"### The planner against a greedy, on {len(rows)} random instances\n")

    def summary(title: str, chosen: list[Row]) -> list[object]:
        gaps = [[gap(row[which], row["bound"]) for row in chosen] for which in ("greedy", "ours")]
        means = [statistics.fmean(values) for values in gaps]
        shorter = sum(row["ours"] * EQUAL < row["greedy"] for row in chosen)
        longer = sum(row["ours"] > row["greedy"] * EQUAL for row in chosen)
        at_bound = sum(row["ours"] <= row["bound"] * EQUAL for row in chosen)
        removed = 1 - means[1] / means[0] if means[0] else 0.0
        counts = (len(chosen), shorter, len(chosen) - shorter - longer, longer, at_bound)
        return [title, *counts, *map(percent, means), percent(max(gaps[1])), f"{100 * removed:.0f} %"]

    kinds = [summary(f"`{name}`", [row for row in rows if row["name"] == name]) for name in ("zb-auto", "v-auto")]
    columns = ("", "instances", "shorter", "equal", "longer", "at the bound", "greedy's gap", "our gap", "our largest", "removed")
    print(markdown(columns, [*kinds, summary("all", rows)]))
    return rows


# --- named memories ---------------------------------------------------------------------------------------------------

NAMED = (("zb-auto", 1), ("zb-auto", 2), ("zb-v", None), ("v-half", None), ("v-min", None), ("1f1b-v", None))


def named_memories(quick: bool) -> list[Row]:
    generator = random.Random(20250102)
    rows: list[Row] = []
    shapes = [(4, 12)] if quick else [(3, 16), (4, 12), (5, 26), (6, 18), (8, 24), (12, 36)]
    for (name, times), (p, m) in itertools.product(NAMED, shapes):
        home = families.placement(name, p)
        cases = [(text, uniform(home, *costs, 0.05)) for text, costs in COSTS.items()]
        cases += [("uneven", random_costs(generator, home)) for _ in range(2)]
        for kind, costs in cases:
            problem = planning.Request(name, p, m, costs, memory_limit=times and times * p).problem()
            if name == "1f1b-v":
                problem = replace(problem, fused=frozenset(range(2 * p)))
            above = gap(simulate(planning.solve(name, problem), costs).span, lower_bound(problem))
            rows.append({"name": f"{name}, {times}x" if times else name, "p": p, "m": m, "costs": kind, "gap": above})
    print("### Gap to the lower bound at the memory of the named schedules, m >= 3p, costs within a factor 2\n")
    lines = []
    for name, uneven in itertools.product(dict.fromkeys(row["name"] for row in rows), (False, True)):
        chosen = [row for row in rows if row["name"] == name and (row["costs"] == "uneven") == uneven]
        gaps = [float(row["gap"]) for row in chosen]
        worst = chosen[gaps.index(max(gaps))]
        near = sum(above <= 0.01 for above in gaps) / len(gaps)
        stages = "uneven, hop to F/2" if uneven else "equal, hop 0.05"
        where = f"p={worst['p']} m={worst['m']} {worst['costs']}"
        numbers = (f"{100 * near:.0f} %", percent(statistics.fmean(gaps)), percent(max(gaps)))
        lines.append((f"`{name}`", stages, len(chosen), *numbers, where))
    print(markdown(("memory of", "stages", "instances", "gap at most 1 %", "mean gap", "largest gap", "where"), lines))
    return rows


# --- speed ------------------------------------------------------------------------------------------------------------


def measure(name: str, ranks: int, microbatches: int, chunks: int) -> Row:
    """CPU seconds and memory of the first plan of this process, at F, B, W, hop of 1, 1.2, 0.8, 0.05.

    Loading what is compiled (or compiling it) counts, for every user waits for it; importing the planner does not.
    """
    costs = uniform(families.placement(name, ranks, chunks), 1, 1.2, 0.8, 0.05)
    problem = planning.Request(name, ranks, microbatches, costs, chunks).problem()
    moments = [time.process_time()]

    def lap() -> float:
        moments.append(time.process_time())
        return moments[-1] - moments[-2]

    schedule = planning.solve(name, problem)
    planned = lap()
    verify(schedule, costs, problem.limits)
    verified = lap()
    verify_programs(schedule, lower(schedule, costs))
    lowered = lap()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB, where the system counts KiB, as Linux does
    above = gap(simulate(schedule, costs).span, lower_bound(problem))
    sizes = {"name": name, "p": ranks, "m": microbatches, "v": chunks, "passes": sum(map(len, schedule.passes))}
    return {**sizes, "plan": planned, "verify": verified, "programs": lowered, "MiB": memory, "gap": above}


def speed(quick: bool) -> list[Row]:
    jobs = [("zb-auto", 16, 128, 1), *((name, 16, 128, 2) for name in ("v-auto", "zb-v", "v-half", "v-min"))]
    if not quick:
        jobs += [(name, 64, 512, 2) for name in ("zb-auto", "v-auto", "v-min")]
        jobs += [(name, p, 2 * p, v) for name, v in (("zb-auto", 1), ("v-auto", 2)) for p in (4, 16, 64, 256)]
    for name, chunks in (("zb-auto", 1), ("v-auto", 2)):
        in_new_process(name, 4, 9, chunks)  # compiles, if nothing is
    rows = [in_new_process(*job) for job in jobs]
    print("### CPU seconds and memory, each plan the first of its process\n")
    lines = [
        (
            f"`{row['name']}`", row["p"], row["m"], row["v"], row["passes"], f"{row['plan']:.2f}", f"{row['verify']:.2f}",
            f"{row['plan'] + row['verify']:.2f}", f"{row['programs']:.2f}", f"{row['MiB']:.0f}", percent(row["gap"]),
        )
        for row in rows
    ]  # fmt: skip
    columns = ("", "p", "m", "v", "passes", "plan, s", "verify, s", "both, s", "programs made and verified, s", "MiB", "gap")
    print(markdown(columns, lines))
    if not quick:
        with tempfile.TemporaryDirectory() as empty:
            compiled = in_new_process("v-auto", 4, 9, 2, NUMBA_CACHE_DIR=empty)["plan"]
        print(f"Numba compiles once per installation, which takes {compiled:.0f} CPU seconds.")
        rows.append({"name": "first compilation", "plan": compiled})
    return rows


def in_new_process(name: str, ranks: int, microbatches: int, chunks: int, **environment: str) -> Row:
    command = [sys.executable, __file__, "--measure", name, str(ranks), str(microbatches), str(chunks)]
    one_core = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env={**os.environ, **one_core}, check=True, capture_output=True, text=True)
    found: Row = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
