"""Are CUDA graphs by slot right, and what do they save? A rank's passes of a stack of linears, as they are and replayed.

    python benchmarks/slot_graphs.py --hidden 1024 --tokens 1024    # needs a GPU

F, B and W of each slot are captured once, in a pool of the slot's own, and then replayed in the order of the plan's first rank.
Gradients have to be the same bit for bit. Without Transformer Engine, whose layers ``--cuda-graph-impl`` captures: here torch
captures those of megatron-core. Reserved memory has both kinds of pools.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from common import command_line, in_rounds, print_table, save
from one_device import DEVICE, DTYPES, device_name, one_rank, timed
from split_backward import build

from megatron.pipeline.backward.weight_tasks import WeightTask, deferring
from megatron.pipeline.planner import Request
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass

SCHEDULES = ("zb-h1", "zb-v")
MIB = 2**20


class Slot:
    """A microbatch's F, B and W of a chunk, until another one comes.

    Args:
        like: an input.
        captured: whether they are graphs, and inputs are copied to where these read them.
    """

    def __init__(self, chunk: torch.nn.Module, like: torch.Tensor, captured: bool) -> None:
        self._chunk, self._graphs = chunk, dict[Kind, Any]()
        self._input, self._gradient = torch.empty_like(like).requires_grad_(), torch.empty_like(like)
        self._output: Any = None
        self._made: Any = None
        self._tasks: list[WeightTask] = []
        if captured:  # nothing else is in the pool, and what F and B make stays in it while this slot is there
            pool = torch.cuda.graph_pool_handle()
            for kind, work in ((Kind.F, self._forward), (Kind.B, self._backward), (Kind.W, self._weights)):
                self._graphs[kind] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graphs[kind], pool=pool):
                    work()

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self._input.copy_(given)
        self._run(Kind.F, self._forward)
        return self._output  # type: ignore[no-any-return]

    def backward(self, given: torch.Tensor) -> torch.Tensor:
        self._gradient.copy_(given)
        self._run(Kind.B, self._backward)
        return self._made  # type: ignore[no-any-return]

    def weights(self) -> None:
        self._run(Kind.W, self._weights)

    def _run(self, kind: Kind, work: Any) -> None:
        self._graphs[kind].replay() if self._graphs else work()

    def _forward(self) -> None:
        self._output = self._chunk(self._input)

    def _backward(self) -> None:
        with deferring(self._tasks):
            [self._made] = torch.autograd.grad(self._output, self._input, self._gradient)

    def _weights(self) -> None:
        with torch.no_grad():
            for task in self._tasks:
                task.run()
        if not self._graphs:
            self._tasks.clear()


class FirstRank:
    """The first rank of a plan, with its chunks."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        plan = Request(name, ranks=options.ranks, microbatches=options.microbatches).plan()
        self.passes: tuple[Pass, ...] = tuple(plan.schedule.passes[0])
        self.slots = plan.slots()[0]
        self.chunks = [build(options, split=True) for _ in self.slots]
        shape = options.tokens, 1, options.hidden
        generator = torch.Generator(DEVICE).manual_seed(1)
        self._given = torch.randn(2, *shape, generator=generator, dtype=DTYPES[options.dtype], device=DEVICE)

    def made(self, captured: bool) -> list[list[Slot]]:
        """All slots, by chunk."""
        found = []
        for chunk, row in zip(self.chunks, self.slots, strict=True):
            found.append([Slot(chunk, self._given[0], captured) for _ in range(1 + max(row))])
        return found

    def iteration(self, slots: list[list[Slot]]) -> None:
        for work in self.passes:
            slot = slots[work.chunk][self.slots[work.chunk][work.microbatch]]
            scale = 1 / (1 + work.microbatch)
            if work.kind is Kind.F:
                slot.forward(self._given[0] * scale)
            if work.kind in (Kind.B, Kind.BW):
                slot.backward(self._given[1] * scale)
            if work.kind in (Kind.W, Kind.BW):
                slot.weights()

    def gradients(self) -> Iterator[torch.Tensor]:
        """Those of all weights, which are then zeros."""
        for chunk in self.chunks:
            for weight in chunk.parameters():
                yield weight.main_grad.clone()  # type: ignore[attr-defined]
            chunk.zero_grad_buffer()


def measured(name: str, options: argparse.Namespace) -> tuple[list[str], dict[str, list[float]]]:
    """A row of the table, and the seconds of every round.

    Raises:
        SystemExit: graphs make other gradients.
    """
    rank, reserved = FirstRank(name, options), torch.cuda.memory_reserved
    eager = rank.made(captured=False)
    for _ in range(2):  # libraries choose and allocate
        rank.iteration(eager)
    list(rank.gradients())
    rank.iteration(eager)
    expected = list(rank.gradients())
    before = reserved()
    graphed = rank.made(captured=True)
    torch.cuda.synchronize()
    pools = reserved() - before
    list(rank.gradients())  # a capture computes nothing
    rank.iteration(graphed)
    furthest = max(float((one - other).abs().max()) for one, other in zip(rank.gradients(), expected, strict=True))
    if furthest:
        raise SystemExit(f"{name}: gradients of graphs differ from those without by up to {furthest:g}")
    ways = {"eager": eager, "graphs": graphed}
    runs = {way: lambda slots=slots: timed(lambda: rank.iteration(slots))[0] for way, slots in ways.items()}
    seconds = in_rounds(runs, options.rounds)
    eager_ms, graphs_ms = (1000 * statistics.median(seconds[way]) for way in ways)
    count = sum(map(len, graphed))
    row = [name, str(count), f"{eager_ms:.2f}", f"{graphs_ms:.2f}", f"{before / MIB:.0f}", f"{pools / MIB:.0f}"]
    return row, {f"{name} {way}": rounds for way, rounds in seconds.items()}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16, help="linears of a chunk")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", metavar="FILE", help="append the seconds of every round, as JSON")
    options = parser.parse_args()
    if DEVICE != "cuda":
        print("skipped: CUDA graphs need a GPU")
        return

    one_rank()
    title = f"{options.layers} linears a chunk, {options.hidden} x {options.hidden}, {options.tokens} tokens, {options.dtype}"
    rows, seconds = [], dict[str, list[float]]()
    for name in SCHEDULES:
        row, of_rounds = measured(name, options)
        rows.append(row)
        seconds |= of_rounds
    save(options.save, f"CUDA graphs by slot: {title}, {device_name()}", seconds)
    columns = ("rank 0 of", "slots", "eager ms", "graphs ms", "reserved MiB", "of graphs MiB")
    print_table(f"{title}, {device_name()}, {options.rounds} rounds", columns, rows, width=110)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
