"""What does stepping ahead save? Runs of sleeping stages, with the optimizer step of megatron-core and with post-validation.

Both step a real optimizer of megatron-core (float32, Adam, with clipping) after every iteration. The synchronous one waits for
the gradient norm of all stages, so an iteration takes its schedule's makespan; post-validation does not, so iterations
interlock, and a run of N takes N spans and one fill. Each is planned for what it takes. Run with one process per rank:

    torchrun --nproc-per-node 4 benchmarks/post_validation.py --picture post_validation.png

Every round runs one run of each, so that whatever disturbs the machine disturbs all of them; reported are medians over the
rounds. "ms per iteration" is from the end of the first iteration to the end of the last, on the rank where that is longest;
"run" is from the first pass to the last, over what it should be; "with hops" compares with a simulation whose messages take
as long as one between two processes that slept before.
"""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import Megatron, Ours, simulated, start
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from sleeping import Sleeper

from megatron.pipeline.optimizer.step_ahead import StepAhead, snapshot_of
from megatron.pipeline.runtime.iteration import ValidationResult
from megatron.pipeline.schedule.core.problem import Objective
from megatron.pipeline.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.view import draw
from megatron.pipeline.view.consecutive import Consecutive, Iteration

SCHEDULES = "1f1b zb-h1 zb-h2 zb-v v-half".split()


@dataclass(frozen=True)
class Measured:
    """One run, in seconds.

    Attributes:
        period: of an iteration.
        total: from the first pass to the last.
    """

    period: float
    total: float


class Run:
    """Iterations of one schedule, each with an optimizer step."""

    def __init__(self, name: str, ahead: bool, megatron: Megatron, sleeper: Sleeper, iterations: int) -> None:
        self.name, self.ahead, self._sleeper, self._iterations = name, ahead, sleeper, iterations
        self._ours = Ours(name, megatron, Objective.SPAN if ahead else Objective.MAKESPAN)
        self.schedule = self._ours.schedule
        adam = torch.optim.Adam([stage.weight for stage in self._ours.model], lr=1e-3)
        part = FP32Optimizer(adam, OptimizerConfig(clip_grad=1e9), lambda *_: None)
        part.grad_stats_parallel_group, part.tp_group = torch.distributed.group.WORLD, megatron.alone
        self._optimizer = ChainedOptimizer([part])
        self._snapshot = snapshot_of(self._optimizer)
        self.timelines: list[Timeline] = []  # of the last run

    def measure(self) -> Measured:
        """Run all iterations; what was measured, on all ranks together."""
        self._sleeper.passes.clear()
        gc.collect()
        torch.distributed.barrier()
        gc.disable()  # as timeit does
        step: StepAhead | None = None

        def resolve() -> ValidationResult:
            assert step is not None
            assert not step.resolve().rolled_back
            self._optimizer.zero_grad()
            return ValidationResult.ACCEPTED

        for _ in range(self._iterations):
            self._ours.iterate(resolve if step else None)
            self._sleeper.synchronize()  # gradients are there
            if self.ahead:
                step = StepAhead(self._optimizer, self._snapshot)
            else:
                self._optimizer.step()
                self._optimizer.zero_grad()
        if step:
            step.resolve()
        gc.enable()
        return self._gather()

    def expected(self, free: bool = True) -> tuple[float, float]:
        """What an iteration should take, and what comes once for the whole run; see ``simulated``."""
        timeline = simulated(self._ours, free)
        return (timeline.span, timeline.makespan - timeline.span) if self.ahead else (timeline.makespan, 0.0)

    def _gather(self) -> Measured:
        rank, passes = torch.distributed.get_rank(), self._sleeper.passes
        works = self.schedule.passes[rank]
        rows: list[list[Timed]] = [
            [Timed(work, *interval) for work, interval in zip(works, passes[first : first + len(works)], strict=True)]
            for first in range(0, len(passes), len(works))
        ]
        everyone: list[list[list[Timed]]] = [[]] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, rows)
        self.timelines = [Timeline(tuple(map(tuple, ranks))) for ranks in zip(*everyone, strict=True)]
        ends = [[row[-1].end for row in rows] for rows in everyone]
        period = max(end[-1] - end[0] for end in ends) / (self._iterations - 1)
        return Measured(period, max(end[-1] for end in ends) - min(rows[0][0].start for rows in everyone))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES, metavar="NAME[@MEMORY]", help="see Ours in contenders.py")
    parser.add_argument("--iterations", type=int, default=8)
    add_flags(parser.add_argument, rounds=3)
    parser.add_argument("--picture", metavar="FILE", help="draw three iterations of the last schedule's last run, both ways")
    options = parser.parse_args()

    sleeper, megatron = start(options.microbatches, options.milliseconds)
    runs = [Run(name, ahead, megatron, sleeper, options.iterations) for name in options.schedules for ahead in (False, True)]
    found = list(in_rounds({run: run.measure for run in runs}, options.rounds).values())

    if torch.distributed.get_rank() == 0:
        _print(megatron.title(options, f"{options.iterations} iterations"), runs, found, options.iterations)
        if options.picture:
            _draw(runs[-2:], options.picture)
    torch.distributed.destroy_process_group()


def _print(title: str, runs: list[Run], found: list[list[Measured]], iterations: int) -> None:
    columns = ["schedule", "optimizer", "simulated ms", "ms per iteration", "measured / simulated", "with hops"]
    rows = []
    for place, (run, measured) in enumerate(zip(runs, found, strict=True)):
        period, once = run.expected()
        seconds = statistics.median(one.period for one in measured)
        total = statistics.median(one.total for one in measured) / (iterations * period + once)
        waiting = statistics.median(one.period for one in found[place - place % 2])
        kind = "post-validation" if run.ahead else "synchronous"
        with_hops, _ = run.expected(free=False)
        ratios = (seconds / period, seconds / with_hops, total, waiting / seconds)
        rows.append([run.name, kind, f"{1e3 * period:.1f}", f"{1e3 * seconds:.1f}", *(f"{ratio:.4f}" for ratio in ratios)])
    print_table(title, [*columns, "run / (N periods + fill)", "speed-up"], rows, left=2)


def _draw(runs: list[Run], path: str) -> None:
    """The last three iterations of each run, one panel under the other."""
    joined = {}
    for run in runs:
        title = f"{run.name}, {'post-validation' if run.ahead else 'synchronous optimizer'}"
        last = list(enumerate(run.timelines, 1))[-3:]
        joined[title] = Consecutive(tuple(Iteration(number, run.name, timeline) for number, timeline in last))
    draw({title: one.timeline for title, one in joined.items()}, path, unit="s", consecutive=joined)


if __name__ == "__main__":
    main()
