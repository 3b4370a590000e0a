"""The CSV of ``torch.distributed.pipelining`` with communication: ``_dump_csv(path, format="compute_comms")`` in torch 2.13.

Besides passes a line has ``2SEND_F0`` (stage 2 sends its activation of microbatch 0 to stage 3), ``3RECV_F0`` (stage 3 receives
it), ``SEND_B`` and ``RECV_B`` for gradients, and what FSDP does with weights (``UNSHARD``, ``RESHARD``, ``REDUCE_GRAD``, and
``WAIT_REDUCE_GRAD`` from 2.15 on), which takes part in no message between stages and is skipped. Torch's runtime posts each
where it stands and by itself (``_batch_p2p`` for one action), and waits for a receive directly before the pass that needs it. It
waits for a send at ``2WAIT_SEND_F0`` or ``WAIT_SEND_B``, which schedules of 2.15 may have, or at the end of the step.

``(2SEND_F1;2RECV_B0)BATCH``, which torch's files do not have, is one ``batch_isend_irecv``, as its 1F1B posts them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.lower.program import Compute, Message, Receive, Send, Wait
from megatron.pipeline.planner.schedule.lower.torch_csv import KINDS, Cell, placement_of, read_cells
from megatron.pipeline.planner.schedule.lower.traffic import Row, Start, Step, Traffic

_ACTIONS = (*KINDS, "SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")
_ACTION = re.compile(rf"([0-9]{{1,9}})({'|'.join(_ACTIONS)})([0-9]{{1,9}})")
_WEIGHTS = re.compile(r"[0-9]+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)[0-9]*")
_FLOWS = {"F": Flow.ACTIVATION, "B": Flow.GRADIENT}
_NEEDED = {"I": "F", "B": "F", "W": "I"}  # on the same stage
_MAKERS = {"F": ("F",), "B": ("B", "I")}  # of what is sent


def has_messages(text: str) -> bool:
    return re.search("SEND_|RECV_", text) is not None


def without_weights(text: str) -> str:
    """A CSV with empty cells in the place of what FSDP does with weights."""
    return _WEIGHTS.sub("", text)


def from_comms_csv(text: str, name: str) -> Traffic:
    """Read passes and communication of every rank, one line each.

    Raises:
        ValueError: a cell cannot be read, is there twice, or stands before what it needs on its own rank; the message names line
            and cell. A message that only one of its ranks has is no error here: it hangs.
    """
    cells = read_cells(text, _ACTION, _refusal)
    passes = [[cell for cell in row if cell[2] in KINDS] for row in cells]
    placement = placement_of(passes)
    rows = tuple(tuple(_CommsReader(placement, rank).steps(row)) for rank, row in enumerate(cells))
    return Traffic(name, placement, 1 + max(cell[3] for row in passes for cell in row), rows)


def _refusal(part: str) -> str | None:
    if _WEIGHTS.fullmatch(part):
        return None
    return (
        f"{part[:40]!r} is neither a pass nor communication: expected STAGE ACTION MICROBATCH such as 2F0 or 2SEND_F0, with "
        f"ACTION one of {', '.join(_ACTIONS)}"
    )


class _CommsReader:
    def __init__(self, placement: Placement, rank: int) -> None:
        self._placement, self._rank = placement, rank
        self._seen: set[str] = set()

    def steps(self, cells: list[Cell]) -> Iterator[Step]:
        for cell, (following, *_) in zip(cells, [*cells[1:], ("",)], strict=True):
            where, stage, action, microbatch = cell
            text = f"{stage}{action}{microbatch}"
            if text in self._seen:
                raise ValueError(f"{where}: {text} is there twice; remove one")
            if stage > self._placement.last_stage or self._home(stage) != self._rank:
                raise ValueError(f"{where}: {text}: rank {self._rank} does not hold stage {stage}")
            if action in KINDS:
                yield from self._passes(cell)
            elif action.startswith("WAIT"):
                self._check(cell, stage, action.removeprefix("WAIT_"))
                yield Wait(Message(_FLOWS[action[-1]], microbatch, stage))
            else:
                yield self._post(cell)
                if following != where:
                    yield Start()
            self._seen.add(text)

    def _passes(self, cell: Cell) -> Row:
        _, stage, action, microbatch = cell
        if action in _NEEDED:
            self._check(cell, stage, _NEEDED[action])
        compute = Compute(Pass(KINDS[action], microbatch, self._placement.home(stage)[1]))
        letter, source = ("F", stage - 1) if KINDS[action] is Kind.F else ("B", stage + 1)
        if action == "W" or not 0 <= source <= self._placement.last_stage:
            return (compute,)
        if self._home(source) == self._rank:
            self._check(cell, source, *_MAKERS[letter])
            return (compute,)
        self._check(cell, stage, f"RECV_{letter}")
        return Wait(Message(_FLOWS[letter], microbatch, source)), compute

    def _post(self, cell: Cell) -> Send | Receive:
        where, stage, action, microbatch = cell
        letter, sends = action[-1], action.startswith("SEND")
        text = f"{stage}{action}{microbatch}"
        other = stage + (1 if sends == (letter == "F") else -1)
        if not 0 <= other <= self._placement.last_stage:
            raise ValueError(f"{where}: {text}: there is no stage {other}")
        if self._home(other) == self._rank:
            raise ValueError(f"{where}: {text}: stage {other} is on the same rank, which hands tensors over without a message")
        if sends:
            self._check(cell, stage, *_MAKERS[letter])
        message = Message(_FLOWS[letter], microbatch, stage if sends else other)
        return Send(message, self._home(other)) if sends else Receive(message, self._home(other))

    def _check(self, cell: Cell, stage: int, *one_of: str) -> None:
        where, own, action, microbatch = cell
        needed = [f"{stage}{each}{microbatch}" for each in one_of]
        if self._seen.isdisjoint(needed):
            raise ValueError(f"{where}: {own}{action}{microbatch} needs {' or '.join(needed)} before it on this line")

    def _home(self, stage: int) -> int:
        return self._placement.home(stage)[0]
