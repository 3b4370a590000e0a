"""A kind of pass is added in four places: its row, its cost, its handler and its colour. The rest follows from the row.

The toy is a collective in the middle of F, on a lane of its own: F runs in two parts, and the second one waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from megatron.pipeline import planning
from megatron.pipeline.record.recorder import Unmeasured
from megatron.pipeline.runtime.executor import Executor, Handlers, Job
from megatron.pipeline.runtime.p2p import Tensors
from megatron.pipeline.runtime.wiring import wiring
from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.core.kinds import AnyKind, Lane, Row
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.schedule.core.timeline import Timeline
from megatron.pipeline.schedule.lower.lower import lower
from megatron.pipeline.schedule.lower.posting import Posting
from megatron.pipeline.schedule.lower.program import Compute, Copy, Message, Program, Send, Wait
from megatron.pipeline.schedule.rules.verify import verify, verify_programs
from megatron.pipeline.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.view import draw, render, style
from megatron.pipeline.view.chrome_trace import to_trace

RANKS, MICROBATCHES = 2, 4


class Toy(AnyKind):
    """1: its row. A kind of the package has its row in ``Kind``."""

    C = "C", Row(
        meaning="collective in the middle of a forward",
        needs=(), seconds="collective", lane=Lane.COLLECTIVE, inside="F", in_order=("C",), forward=True, optional=True,
    )  # fmt: skip


C = cast("Kind", Toy.C)


@dataclass(frozen=True)
class ToyCosts(StageCosts):
    """2: its cost. That of a kind of the package is a field of ``StageCosts``."""

    collective: float = 0.0


class Sleeping:
    """3: its handler. Passes sleep, and so does the collective, in a thread of its own."""

    def __init__(self, costs: ToyCosts, unit: float) -> None:
        self._costs, self._unit = costs, unit
        self._lane = ThreadPoolExecutor(1)
        self._running: dict[Pass, Future[None]] = {}
        self.ran: dict[Pass, tuple[float, float]] = {}
        self.handlers = Handlers(dict.fromkeys((Kind.F, Kind.B, Kind.W), self.compute), {C: self})

    def compute(self, job: Job) -> Mapping[int, Tensors]:
        kind = job.work.kind
        self._sleep(job.work, self._costs.seconds(kind) / (2 if kind is Kind.F else 1))
        return {peer: [torch.ones(1)] for peer in job.peers}

    def start(self, work: Pass) -> None:
        self._running[work] = self._lane.submit(self._sleep, work, self._costs.seconds(work.kind))

    def finish(self, work: Pass) -> None:
        self._running.pop(work).result()

    def _sleep(self, work: Pass, seconds: float) -> None:
        start = time.monotonic()
        time.sleep(seconds * self._unit)
        self.ran[work] = start, time.monotonic()


@pytest.fixture(autouse=True)
def colour(monkeypatch: pytest.MonkeyPatch) -> str:
    """4: its colour. That of a kind of the package stands in ``COLOURS``."""
    monkeypatch.setitem(style.COLOURS, C, "#117733")
    return "#117733"


COSTS = Costs((ToyCosts(2.0, 1.0, 2.0, collective=1.5),) * RANKS, hop=0.1)


def divided(schedule: Schedule) -> Schedule:
    """Every F in two parts around a C; a W that came before the F comes between them, so that it hides the collective."""
    rows = []
    for passes in schedule.passes:
        row: list[Pass] = []
        for work in passes:
            if work.kind is not Kind.F:
                row.append(work)
                continue
            between = [row.pop()] if row and row[-1].kind is Kind.W else []
            row += [work, work._replace(kind=C), *between, work._replace(part=1)]
        rows.append(tuple(row))
    return replace(schedule, passes=tuple(rows))


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    plain = tuple(StageCosts(cost.forward, cost.backward, cost.weight) for cost in COSTS.stages)
    return divided(planning.plan("zb-h1", RANKS, MICROBATCHES, replace(COSTS, stages=plain)))


def test_it_is_planned_verified_and_read_back(schedule: Schedule) -> None:
    verify(schedule, COSTS, 2.5)
    assert {"F0.0", "C0.0", "F0.0:1"} <= set(map(str, schedule.passes[0]))
    assert Schedule.from_json(schedule.to_json(), (*Kind, *Toy)) == schedule
    with pytest.raises(ValueError, match=r"'C0\.0' is not a pass"):
        Schedule.from_json(schedule.to_json())


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("F1.0 C1.0", "C1.0 F1.0", "rank 0: C1.0 runs before F1.0"),
        ("C1.0 F1.0:1", "F1.0:1 C1.0", "rank 0: F1.0:1 runs before C1.0"),
        ("C1.0 F1.0:1", "C1.0", "rank 0: F1.0:1 is missing"),
        ("C1.0 ", "", "rank 0: F1.0:1 runs before C1.0"),
        ("B0.0", "B0.0 B0.0:1", "rank 0: B0.0:1 is a part of a pass, and no pass runs between its parts; remove it"),
    ],
)
def test_its_rules_are_checked(schedule: Schedule, old: str, new: str, problem: str) -> None:
    text = " ".join(map(str, schedule.passes[0]))
    assert old in text
    row = tuple(Pass.parse(one, (*Kind, *Toy)) for one in text.replace(old, new).split())
    with pytest.raises(ScheduleError, match=problem):
        verify(replace(schedule, passes=(row, *schedule.passes[1:])))


def test_it_is_lowered(schedule: Schedule) -> None:
    programs = lower(schedule, COSTS)
    for posting in Posting:
        verify_programs(schedule, programs, posting)
    for program in programs:
        at = {(type(operation), operation[0]): place for place, operation in enumerate(program) if operation}
        for microbatch in range(MICROBATCHES):
            first, last, own = Pass(Kind.F, microbatch), Pass(Kind.F, microbatch, 0, 1), Pass(C, microbatch)
            places = [at[each] for each in ((Compute, first), (Copy, own), (Wait, own), (Compute, last))]
            assert places == sorted(places)
            # The rank waits as late as it can.
            assert not any(isinstance(operation, Compute) for operation in program[places[2] : places[3]])
    late = [list(program) for program in programs]
    late[0].append(late[0].pop(next(place for place, one in enumerate(late[0]) if isinstance(one, Wait))))
    with pytest.raises(
        ScheduleError, match=r"C0\.0 needs, in this order: Compute F0\.0, Copy C0\.0, Wait C0\.0, Compute F0\.0:1"
    ):
        verify_programs(schedule, tuple(map(tuple, late)))


def test_it_is_simulated(schedule: Schedule) -> None:
    timeline = simulate(schedule, COSTS)
    for row, lane in zip(timeline.ranks, timeline.copies, strict=True):
        at = {work: (start, end) for work, start, end in row}
        assert [work.microbatch for work, _, _ in lane] == list(range(MICROBATCHES))
        for work, start, end in lane:
            first, last = work._replace(kind=Kind.F), work._replace(kind=Kind.F, part=1)
            assert end == pytest.approx(start + 1.5) and start >= at[first][1] and end <= at[last][0] + 1e-9
            assert at[first][1] - at[first][0] == pytest.approx(1.0)
    # Hidden behind W where there is one: the two collectives before the first B are not, on the first rank.
    free = simulate(schedule, Costs((ToyCosts(2.0, 1.0, 2.0),) * RANKS, hop=0.1))
    assert free.makespan < timeline.makespan < free.makespan + MICROBATCHES * 1.5
    assert max(activation_peaks(schedule, COSTS)) == 2.5  # a W is later, by half a forward


def test_it_is_drawn(schedule: Schedule, colour: str, tmp_path: Path) -> None:
    timeline = simulate(schedule, COSTS)
    text = render(timeline, width=120)
    assert len(text.splitlines()) == 2 * RANKS and " C " in text and "C0" in text
    draw({"toy": timeline}, tmp_path / "toy.svg")
    drawn = (tmp_path / "toy.svg").read_text(encoding="utf-8")
    assert colour.lower() in drawn and Toy.C.row.meaning in drawn.replace("&#x20;", " ")
    draw({"toy": timeline}, tmp_path / "toy.png")
    assert (tmp_path / "toy.png").stat().st_size > 1000
    assert sum(event.get("cat") == "C" for event in to_trace(timeline)["traceEvents"]) == RANKS * MICROBATCHES


class Mailboxes:
    """Messages between threads, as ``Transport`` carries them between processes."""

    def __init__(self, rank: int, boxes: Mapping[tuple[int, Message], queue.Queue[Tensors]]) -> None:
        self._rank, self._boxes = rank, boxes

    def receive(self, message: Message, peer: int) -> None:
        """A mailbox is there from the start."""

    def wait(self, message: Message) -> Tensors:
        return self._boxes[self._rank, message].get(timeout=60)

    def send(self, message: Message, peer: int, tensors: Tensors, when_sent: Any) -> None:
        self._boxes[peer, message].put(tensors)
        when_sent()

    def unsent(self) -> tuple[()]:
        return ()

    def start(self) -> None: ...

    def sweep(self) -> None: ...

    def finish(self, message: Message, peer: int) -> None: ...


def run(programs: tuple[Program, ...], schedule: Schedule, unit: float) -> list[dict[Pass, tuple[float, float]]]:
    """One iteration with a thread for every rank: when every pass ran."""
    boxes = {
        (operation.peer, operation.message): queue.Queue[Tensors]()
        for program in programs
        for operation in program
        if isinstance(operation, Send)
    }
    ranks = [Sleeping(cast("ToyCosts", cost), unit) for cost in COSTS.stages]

    def iterate(rank: int) -> None:
        program, transport = programs[rank], cast("Any", Mailboxes(rank, boxes))
        wires = wiring(program, rank, schedule.placement)
        executor = Executor(program, wires, ranks[rank].handlers, transport, Unmeasured())
        executor.begin()
        executor.finish()

    threads = [threading.Thread(target=iterate, args=(rank,)) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [rank.ran for rank in ranks]


def test_it_is_executed_with_sleeping_stages(schedule: Schedule) -> None:
    unit = 0.02
    simulated: Timeline = simulate(schedule, replace(COSTS, hop=0.0))
    ran = run(lower(schedule, COSTS), schedule, unit)
    for times, passes in zip(ran, schedule.passes, strict=True):
        assert set(times) == set(passes)
        computed = [work for work in passes if work.kind is not C]
        assert sorted(computed, key=lambda work: times[work]) == computed
        for work in passes:
            if work.kind is C:
                assert times[work._replace(kind=Kind.F)][1] <= times[work][0]
                assert times[work][1] <= times[work._replace(kind=Kind.F, part=1)][0]
        # What a collective is hidden behind runs at the same time.
        hidden = [(work, passes[at + 1]) for at, work in enumerate(passes) if work.kind is C and passes[at + 1].kind is Kind.W]
        assert hidden and any(times[weight][0] < times[work][1] for work, weight in hidden)
    spans = [max(end for _, end in times.values()) for times in ran], [min(start for start, _ in times.values()) for times in ran]
    assert max(spans[0]) - min(spans[1]) >= 0.99 * simulated.makespan * unit
