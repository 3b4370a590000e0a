"""What the host does for one pass, in microseconds of processor time, and whose it is. Stages compute nothing.

    torchrun --nproc-per-node 8 benchmarks/pass_overhead.py --schedule zb-v --microbatches 16

Counted is the time that a rank's main thread runs on a core, not the time it waits. Reported are means per pass of one
iteration, the median over iterations, on the rank where the executor takes longest.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import contenders
import torch
from common import command_line, print_table
from contenders import Ours, start
from megatron.core.pipeline_parallel import schedules
from sleeping import Sleeper

from megatron.pipeline.runtime.executor import Executor

EXECUTOR, STEPS, STAGES, BACKEND = "executor and its transport", "megatron-core's steps", "stages", "gloo"


class Account:
    """Splits the processor time of a thread: every moment belongs to the innermost part that has been entered."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._parts: list[str] = ["around"]
        self._since = time.thread_time()

    def count(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function whose time belongs to a part."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._book()
            self._parts.append(name)
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._parts.pop()

        return counted

    def _book(self) -> None:
        now = time.thread_time()
        self.seconds[self._parts[-1]] += now - self._since
        self._since = now

    def count_methods(self, name: str, owner: Any, methods: str) -> None:
        for method in methods.split():
            setattr(owner, method, self.count(name, getattr(owner, method)))


class _Request:
    """A request of a backend whose waiting is counted."""

    def __init__(self, account: Account, request: Any) -> None:
        self.wait = account.count(BACKEND, request.wait)


def split(account: Account) -> None:
    """Have an account split the time of the executor and of what it calls."""
    account.count_methods(EXECUTOR, Executor, "begin finish")
    contenders.STEPS = tuple(account.count(STEPS, step) for step in contenders.STEPS)
    account.count_methods(STEPS, schedules, "deallocate_output_tensor")
    account.count_methods(STAGES, Sleeper, "occupy _begin")
    for name in ("send", "recv"):
        post = account.count(BACKEND, getattr(torch.distributed.ProcessGroup, name))
        setattr(torch.distributed.ProcessGroup, name, lambda *args, _post=post: _Request(account, _post(*args)))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedule", default="zb-v")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=0.0, help="of F, B and W: caches are cold then")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()

    _, megatron = start(options.microbatches, [options.milliseconds] * 3)
    megatron.times.hop = 0.0  # the plan is the same on every machine
    contender = Ours(options.schedule, megatron)
    contender.iterate()  # connects the ranks
    account = Account()
    split(account)
    rounds = []
    for _ in range(options.rounds):
        gc.collect()
        torch.distributed.barrier()
        account.seconds.clear()
        gc.disable()
        contender.iterate()
        gc.enable()
        rounds.append(dict(account.seconds))

    passes = len(contender.schedule.passes[torch.distributed.get_rank()])
    mine = {part: 1e6 * statistics.median(one.get(part, 0.0) for one in rounds) / passes for part in rounds[0]}
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    if torch.distributed.get_rank() == 0:
        worst = max(everyone, key=lambda parts: parts[EXECUTOR])
        title = f"{options.schedule}, {len(everyone)} ranks, {options.microbatches} microbatches: us per pass"
        means = {part: statistics.mean(parts[part] for parts in everyone) for part in (EXECUTOR, BACKEND, STEPS, STAGES)}
        rows = [[part, f"{worst[part]:.0f}", f"{mean:.0f}"] for part, mean in means.items()]
        print_table(title, ("part", "worst rank", "mean of ranks"), rows, width=100)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
