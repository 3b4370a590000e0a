"""The CSV that ``torch.distributed.pipelining`` loads and runs: one line per rank, one cell per pass.

A cell is written ``2F0``: stage, kind, microbatch. ``F`` is the forward, ``I`` the backward for the input (our B), ``W`` the
backward for the weights and ``B`` both in one (our BW); an empty cell is a bubble. It is what torch's runtime calls the
``compute_only`` format (``_PipelineScheduleRuntime._load_csv`` and ``_Action`` in torch 2.13, ``schedules.py``): torch adds
sends and receives itself.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence

from megatron.pipeline.planner.combinations.needs import TORCH_CSV
from megatron.pipeline.planner.combinations.table import Facts
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement, from_rows
from megatron.pipeline.planner.schedule.core.schedule import Schedule

_LETTERS = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B"}
KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_ACTION = re.compile(r"([0-9]{1,9})([FIWB])([0-9]{1,9})")
_TOGETHER = re.compile(r"\((.*)\)(OVERLAP_F_B|BATCH)")
_JOINED = {"OVERLAP_F_B": "passes", "BATCH": "messages"}
_NOT_COMPUTED = re.compile(r"[0-9]+((WAIT_)?SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD)[0-9]*")


def to_csv(schedule: Schedule) -> str:
    """Write a schedule for torch: ``runtime._load_csv(path)`` reads it from a file.

    The order of every rank is kept. What is lost is the name, and which chunk a stage is on its rank: see ``from_csv``.

    Raises:
        ValueError: the schedule recomputes, offloads, or cuts microbatches into slices, none of which torch's format can say.
    """
    others = sorted({str(work.kind) for row in schedule.passes for work in row if work.kind not in _LETTERS})
    known = {"splits": schedule.splits, "vocab_parallel": schedule.vocabulary}
    Facts(known, torch_csv=True, pipeline_schedule=schedule.name, unwritten=" and ".join(others)).refuse(TORCH_CSV)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    for stages, passes in zip(schedule.placement.stages, schedule.passes, strict=True):
        writer.writerow(f"{stages[chunk]}{_LETTERS[kind]}{microbatch}" for kind, microbatch, chunk in passes)
    return text.getvalue()


def from_csv(text: str, name: str) -> Schedule:
    """Read what ``to_csv`` wrote, or torch's ``_dump_csv(path, format="compute_only")``, or a user by hand.

    Torch's overlapped pair, ``(0F1;3B0)OVERLAP_F_B``, is read as its passes one after the other. Every rank's stages are its
    chunks in ascending order, as they are in linear, interleaved and V placements. Nothing else is checked than that it can be
    read: see ``verify``.

    Args:
        text: one line per rank; empty cells and empty lines at the end are skipped.
        name: of the schedule, which the text does not tell.

    Raises:
        ValueError: a cell is not a pass, or stages are not where any placement has them.
    """
    cells = read_cells(text, _ACTION, _refusal)
    placement = placement_of(cells)
    rows = [tuple(Pass(KINDS[kind], number, placement.home(stage)[1]) for _, stage, kind, number in row) for row in cells]
    microbatches = 1 + max(work.microbatch for row in rows for work in row)
    return Schedule(name, placement, microbatches, tuple(rows))


Cell = tuple[str, int, str, int]  # where it stands, stage, letter of the kind, microbatch


def read_cells(text: str, action: re.Pattern[str], refusal: Callable[[str], str | None]) -> list[list[Cell]]:
    """Cells of every line that ``action`` matches; of an overlapped pair both, of a batch all, and no empty lines at the end.

    Args:
        refusal: why a text that it does not match cannot be read; None where it is left out.

    Raises:
        ValueError: not CSV, or the refusal; the message names line and cell.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[list[Cell]] = []
    try:
        for row in reader:
            rows.append([])
            for number, each in enumerate(map(str.strip, row), 1):
                where, together = f"line {reader.line_num}, cell {number}", _TOGETHER.fullmatch(each)
                for part in together[1].split(";") if together else [each] if each else []:
                    if match := action.fullmatch(part.strip()):
                        if together and (match[2] in KINDS) != (together[2] == "OVERLAP_F_B"):
                            raise ValueError(f"{where}: {together[2]} joins {_JOINED[together[2]]}, and {part.strip()} is none")
                        rows[-1].append((where, int(match[1]), match[2], int(match[3])))
                    elif why := refusal(part):
                        raise ValueError(f"{where}: {why}")
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: not CSV ({error})") from None
    while rows and not rows[-1]:
        rows.pop()
    return rows


def _refusal(part: str) -> str:
    if _NOT_COMPUTED.fullmatch(part):
        return f"{part!r} is no computation; leave communication out, as in torch's format compute_only"
    return f"{part[:40]!r} is not a pass: expected STAGE KIND MICROBATCH such as 2F0, with KIND one of {', '.join(KINDS)}"


def placement_of(cells: Sequence[Sequence[Cell]]) -> Placement:
    """The placement that the stages of every rank's passes tell, chunks in ascending order of their stages."""
    if not any(cells):
        raise ValueError("not a schedule: the CSV has no passes; expected one line per rank with cells such as 2F0")
    homes: dict[int, int] = {}
    for rank, row in enumerate(cells):
        if not row:
            raise ValueError(f"not a schedule: rank {rank} has no passes; every rank needs a line with those of its stages")
        for where, stage, _, _ in row:
            if homes.setdefault(stage, rank) != rank:
                raise ValueError(f"{where}: stage {stage} is on rank {rank} here and on rank {homes[stage]} before; keep one")
    return from_rows([sorted({stage for _, stage, _, _ in row}) for row in cells])
