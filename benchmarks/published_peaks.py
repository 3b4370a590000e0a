"""What torch allocates at most in Megatron-LM's functional tests, beside what is predicted of their flags as they are written.

    python benchmarks/published_peaks.py FOLDER            prints the table of docs/model.md, and every case that is off by more
    python benchmarks/published_peaks.py FOLDER --write    writes that table into docs/model.md

FOLDER has files ``peaks_*.json``: a list of {"case", "gpu", "world", "measured", "allocated", "args"}: a test, its GPU, how many
ranks, bytes at most and after the first steps, of the last rank, and its flags without dashes, true for a switch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import command_line, markdown
from published_figures import ROOT

from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.costmodel.device import named, shipped
from megatron.pipeline.costmodel.memory import RankMemory, predict

PAGE = ROOT / "docs" / "model.md"
NEAR, APART = 0.06, 0.1
MOST_REPLICAS = 64  # times the ranks that a file says
HEAD = ["GPU", "cases", "accepted as written", "median error", "nine of ten within", f"within {NEAR:.0%}", "inversions"]


class Case(NamedTuple):
    """A test, with what is predicted in bytes; None and the refusal where nothing is."""

    name: str
    gpu: str
    measured: float
    predicted: float | None
    words: str = ""

    @property
    def error(self) -> float:
        assert self.predicted is not None
        return self.predicted / self.measured - 1


def cases(folder: Path) -> list[Case]:
    return [case_of(row) for path in sorted(folder.glob("peaks_*.json")) for row in json.loads(path.read_text(encoding="utf-8"))]


def case_of(row: Mapping[str, Any]) -> Case:
    """Predict a test.

    Where its ranks cannot be those of the file, since the layout needs more or since they would hold more state than was
    allocated, it has that power of two of times as many with which the state is nearest to what was allocated.
    """
    flags = [word for name, value in row["args"].items() if value not in (False, None) for word in _words(name, value)]
    own, words = row["world"], ""
    found: list[tuple[float, float]] = []
    world = own
    while world <= own * MOST_REPLICAS and not (found and found[-1][0] < row["allocated"]):
        try:
            rank = last_rank(flags, world, row["gpu"])
            found.append((rank.state, rank.allocated))
        except ValueError as error:
            words = str(error)
            if not re.match(r"\d+ ranks cannot", words):
                break
        world *= 2
    nearest = min(found, key=lambda each: abs(each[0] + rank.workspaces - row["allocated"]))[1] if found else None
    return Case(row["case"], row["gpu"], row["measured"], nearest, "" if found else words)


def _words(name: str, value: Any) -> list[str]:
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]


def last_rank(flags: Sequence[str], world: int, gpu: str) -> RankMemory:
    training = predicted([*flags, "--pipeline-schedule", "stock"], world_size=world)
    device = named(next((name for name in shipped() if name.startswith(gpu) and not name.endswith("40GB")), "H100-80GB"))
    return predict(training.args, training.schedule, training.layers, device)[-1]


def row_of(name: str, found: Sequence[Case]) -> list[str]:
    known = [case for case in found if case.predicted is not None]
    errors = sorted(abs(case.error) for case in known)
    by_size = sorted(known, key=lambda case: case.measured)
    pairs = [(a, b) for a, b in combinations(by_size, 2) if b.measured > (1 + APART) * a.measured]
    inverted = sum(a.measured * (1 + a.error) > b.measured * (1 + b.error) for a, b in pairs)
    return [
        name,
        str(len(found)),
        str(len(known)),
        f"{median(errors):.1%}",
        f"{errors[int(0.9 * len(errors))]:.1%}",
        f"{sum(error <= NEAR for error in errors) / len(errors):.0%}",
        f"{inverted} of {len(pairs)} pairs",
    ]


def table(found: Sequence[Case]) -> str:
    gpus = list(dict.fromkeys(case.gpu for case in found))
    rows = [row_of(gpu, [case for case in found if case.gpu == gpu]) for gpu in gpus]
    return markdown(HEAD, rows)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true", help="write the table into docs/model.md")
    options = parser.parse_args()
    found = cases(options.folder)
    print(table(found))
    for case in found:
        if case.predicted is None or abs(case.error) > NEAR:
            print(f"{case.gpu} {case.name}: {case.words or f'{case.error:+.1%}'}")
    if options.write:
        text = PAGE.read_text(encoding="utf-8")
        text = re.sub(rf"^\| {HEAD[0]} \| {HEAD[1]} \| {HEAD[2]} .*\n(?:\|.*\n)+", lambda _: table(found), text, flags=re.M)
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
