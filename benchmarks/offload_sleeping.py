"""Does offloading keep any rank waiting, and does it hold what was planned? Real ranks, stages that sleep, copies of a set speed.

Stages sleep instead of computing, and besides keep real tensors for their backwards, half of them until W, which are checked
when they are read. Copies take as long as the bandwidth says that makes k what is asked for: the time in which all activations go
to host memory and back, over that of F, B and W. They are planned to take a tenth longer, as measured ones are. Run it with one
process per rank:

    torchrun --nproc-per-node 4 benchmarks/offload_sleeping.py

Every round runs one iteration of each, so that whatever disturbs the machine disturbs all of them; reported are medians over the
rounds, of the time from the first pass on any rank to the last on any and of its ratio to the same schedule without offload. It
is divided by what the simulation says, for messages that take as long as one between two processes that slept before. One
iteration more counts what every rank holds; "apart" is how far the most of any rank is from its plan, on the rank where that is
furthest.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import Megatron, Ours, simulated, start
from sleep_stages import iteration
from sleeping import Sleeper

from megatron.pipeline.backward.weight_tasks import submit
from megatron.pipeline.record.recorder import Recorder
from megatron.pipeline.runtime.offload import probe
from megatron.pipeline.runtime.offload.copy_streams import Pairs, ThreadCopyStreams, Ticket
from megatron.pipeline.runtime.offload.offloading import Offloading, Settings
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import CopyCosts, uniform
from megatron.pipeline.schedule.core.passes import Offload
from megatron.pipeline.schedule.time.simulate import activation_peaks
from megatron.pipeline.schedule.transforms.offload import moved

SCHEDULES = "1f1b interleaved gis-h zb-auto".split()
UNTIL_W = 0.5  # of what F keeps


class DeviceCopyStreams(ThreadCopyStreams):
    """CopyStreams of a device that sleeps: what is copied has been computed by then."""

    def __init__(self, sleeper: Sleeper, bandwidth: float) -> None:
        super().__init__(bandwidth, bandwidth)
        self._sleeper = sleeper

    def to_host(self, pairs: Pairs) -> Ticket:
        self._sleeper.synchronize()
        return super().to_host(pairs)

    def to_device(self, pairs: Pairs) -> Ticket:
        self._sleeper.synchronize()
        return super().to_device(pairs)


class _Keep(torch.autograd.Function):
    """Keeps tensors of a number for its backward, the second of them until W."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, sizes: Sequence[int], number: int) -> torch.Tensor:
        ctx.number = number % 251
        ctx.save_for_backward(*(torch.full((size,), ctx.number, dtype=torch.uint8) for size in sizes))
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        kept = ctx.saved_tensors
        assert all(bool((one == ctx.number).all()) for one in kept), "what came back is not what was kept"
        submit(_KeptUntilW(kept[1]))
        return gradient.clone(), None, None


class _KeptUntilW:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.held = (tensor,)

    def prefetch(self) -> None:
        """Nothing has to come."""

    def run(self) -> None:
        """The stage itself sleeps."""


class Keeping:
    """A hook for the forwards of a stage."""

    def __init__(self, size: int) -> None:
        until_w = int(UNTIL_W * size)
        self._sizes = size - until_w, until_w
        self._numbers = itertools.count()

    def __call__(self, _stage: torch.nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = _Keep.apply(output, self._sizes, next(self._numbers))
        return kept


@dataclass
class Contender:
    """A schedule, with or without offload.

    Attributes:
        k: that of its copies; None without any.
        seconds: of every round.
        peaks: bytes that every rank was measured to hold at most.
    """

    ours: Ours
    k: float | None
    mode: Offload | None
    seconds: list[float]
    peaks: Sequence[int] = ()

    def record(self) -> None:
        """Count what is held in one more iteration."""
        recorders: list[Recorder] = []

        def record() -> Recorder:
            recorders.append(Recorder(one for stage in self.ours.model for one in stage.parameters()))
            return recorders[-1]

        self.ours.record = record
        torch.distributed.barrier()
        self.ours.iterate()
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, recorders[0].record().peak_activation_bytes)
        self.peaks = everyone


class Workbench:
    """Makes contenders that keep ``size`` bytes of a microbatch on every rank."""

    def __init__(self, sleeper: Sleeper, megatron: Megatron, milliseconds: Sequence[float], size: int) -> None:
        self._sleeper, self._megatron, self._size = sleeper, megatron, size
        self._seconds = [value / 1000 for value in milliseconds]
        self._offloadings: dict[float, Offloading] = {}  # by k

    def contender(self, name: str, k: float | None = None, mode: Offload | None = None) -> Contender:
        placement = families.placement(name.partition("@")[0], self._megatron.ranks)
        hop = self._megatron.times.hop
        forward, backward, weight = self._seconds
        costs = uniform(placement, forward, backward, weight, hop, self._size, UNTIL_W * self._size)
        offload = None
        if k is not None and mode is not None:
            a_byte = probe.MARGIN / self._bandwidth(k)
            costs = replace(costs, copies=CopyCosts(a_byte, a_byte))
            offload = mode, self._offloading(k)
        ours = Ours(name, self._megatron, costs=costs, offload=offload)
        for stage in ours.model:
            stage.register_forward_hook(Keeping(self._size // placement.chunks))
        return Contender(ours, k, mode, [])

    def _bandwidth(self, k: float) -> float:
        """Bytes a second, of either direction."""
        return 2 * self._size / (k * sum(self._seconds))

    def _offloading(self, k: float) -> Offloading:
        if k not in self._offloadings:
            made = self._offloadings[k] = Offloading(Settings(bandwidth=self._bandwidth(k)), torch.device("cpu"))
            made.copy_streams = DeviceCopyStreams(self._sleeper, self._bandwidth(k))
        return self._offloadings[k]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES, metavar="NAME[@MEMORY]", help="see Ours in contenders.py")
    parser.add_argument("--k", nargs="*", type=float, default=(0.5, 1.0, 2.0))
    parser.add_argument("--kib", type=int, default=1024, help="that a rank keeps of a microbatch")
    add_flags(parser.add_argument)
    options = parser.parse_args()

    sleeper, megatron = start(options.microbatches, options.milliseconds)
    bench = Workbench(sleeper, megatron, options.milliseconds, 1024 * options.kib)
    contenders = []
    for name in options.schedules:
        contenders.append(bench.contender(name))
        contenders += [bench.contender(name, k, mode) for k in options.k for mode in Offload]

    found = in_rounds({number: partial(iteration, one.ours, sleeper) for number, one in enumerate(contenders)}, options.rounds)
    for one, seconds in zip(contenders, found.values(), strict=True):
        one.seconds = seconds
        one.record()

    if torch.distributed.get_rank() == 0:
        _print(megatron.title(options, f"{options.kib} KiB a microbatch and rank"), contenders)
    torch.distributed.destroy_process_group()


def _print(title: str, contenders: Sequence[Contender]) -> None:
    columns = ["schedule", "offload", "k", "moved", "ms", "best", "simulated ms", "ms / simulated", "to off", "best to off"]
    rows, plain = [], contenders[0]
    for one in contenders:
        if one.mode is None:
            plain = one
        schedule, costs = one.ours.schedule, one.ours.costs
        allocated = schedule.microbatches * sum(stage.activation for stage in costs.stages)
        expected = simulated(one.ours).makespan
        planned = activation_peaks(schedule, costs)
        apart = max((peak / plan - 1 for peak, plan in zip(one.peaks, planned, strict=True)), key=abs)
        cells = [
            one.ours.name,
            str(one.mode or "off"),
            "" if one.k is None else f"{one.k:g}",
            f"{sum(moved(schedule, costs)) / allocated:.1%}",
            f"{1e3 * statistics.median(one.seconds):.1f}",
            f"{1e3 * min(one.seconds):.1f}",
            f"{1e3 * expected:.1f}",
            f"{statistics.median(one.seconds) / expected:.4f}",
            f"{statistics.median(mine / off for mine, off in zip(one.seconds, plain.seconds, strict=True)):.4f}",
            f"{min(one.seconds) / min(plain.seconds):.4f}",
            f"{max(one.peaks) / 1024:.0f}",
            f"{max(planned) / 1024:.0f}",
            f"{apart:+.2%}",
        ]
        rows.append(cells)
    print_table(title, [*columns, "peak KiB", "planned", "apart"], rows, left=2, width=150)


if __name__ == "__main__":
    main()
