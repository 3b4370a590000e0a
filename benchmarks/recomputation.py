"""What plans gain that count recomputation. Prints a Markdown table, whose last row docs/planner.md quotes.

    python benchmarks/recomputation.py [--instances 100] [--first 0]

Each random instance is planned twice within one memory limit: as if nothing were made again, and for what training pays, where a
backward takes the seconds of R more, F keeps little, and what B makes it holds until W. Both plans are timed at the latter costs.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from dataclasses import replace

from common import EQUAL, command_line, markdown

from megatron.pipeline import planning
from megatron.pipeline.planning.request import Request
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=100, help="by default 100")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first instance")
    options = parser.parse_args()
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for seed in range(options.first, options.first + options.instances):
        request, some = instance(random.Random(seed))
        label = f"{request.schedule}, {'some' if some else 'all'} stages"
        gain = shorter_by(request)
        for group in (label, "all"):
            groups[group].append(gain)
    rows = []
    for label in [*sorted(set(groups) - {"all"}), "all"]:
        gains = groups[label]
        shorter, longer = (sum(sign * gain > EQUAL - 1 for gain in gains) for sign in (1, -1))
        mean, most = (f"{100 * value:.1f} %" for value in (statistics.fmean(gains), max(gains)))
        rows.append([label, len(gains), shorter, len(gains) - shorter - longer, longer, mean, most])
    print(markdown(["", "instances", "shorter", "equal", "longer", "mean", "most"], rows))


def instance(rng: random.Random) -> tuple[Request, bool]:
    """A request with the costs of passes and of R apart, and whether some stages alone make activations again."""
    name, ranks = rng.choice(["zb-auto", "v-auto"]), rng.choice([2, 3, 4, 6, 8])
    microbatches, chunks = rng.randint(ranks, 4 * ranks), families.named(name).chunks
    some, uneven = rng.random() < 0.5, rng.random() < 0.5
    base = [rng.uniform(1, 3) for _ in range(3)]
    kept, retained = rng.choice([0.03, 0.06, 0.1]), rng.choice([0.6, 0.9, 1.0])
    stages = []
    for _ in range(ranks * chunks):
        forward, backward, weight = (seconds * (rng.uniform(0.8, 1.25) if uneven else 1) for seconds in base)
        again = not some or rng.random() < 0.5
        more = {"recompute": forward, "checkpoint": kept} if again else {"recompute": 0.0, "checkpoint": 1.0}
        stages.append(StageCosts(forward, backward, weight, 1.0, retained, **more).share(chunks))
    costs = Costs(tuple(stages), rng.uniform(0, 0.3))
    limit = max(1.0, ranks * rng.choice([0.5, 0.75, 1, 1.25, 1.5, 2]))
    return Request(name, ranks, microbatches, costs, memory_limit=limit), some


def shorter_by(request: Request) -> float:
    """The share of its span by which a plan is shorter that counts what is made again.

    Raises:
        AssertionError: a plan holds more than the limit.
    """
    assert isinstance(request.costs, Costs) and request.lowest_limit is not None
    trained, spans = request.costs.remade(), []
    for costs in (request.costs, trained):
        schedule = planning.solve(request.schedule, replace(request, costs=costs).problem())
        assert max(activation_peaks(schedule, trained)) <= request.lowest_limit * EQUAL
        spans.append(simulate(schedule, trained).span)
    return 1 - spans[1] / spans[0]


if __name__ == "__main__":
    main()
