"""Does a rehearsal predict what an iteration takes? Trainings whose passes sleep, side by side and rehearsed.

    python benchmarks/rehearsal.py --cases 20
    python benchmarks/rehearsal.py --ranks 2 --only 1f1b

4 ranks, or as many as are given, share this machine's cores. Every pass of a small GPT ends with a sleep, which needs no core: so
ranks run side by side as if each had a device, and the makespan of an iteration can be measured. The same training is rehearsed,
with its passes one at a time. The table compares the two: the prediction over the measured median. Needs a machine that does
nothing else; 45 seconds a case.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from common import command_line, print_table, rehearsed, torchrun

from megatron.pipeline.schedule.core.passes import Pass
from megatron.pipeline.schedule.core.timeline import Timeline

ITERATIONS = 6
MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-3 --mock-data "
    "--tokenizer-type ByteLevelTokenizer --num-workers 0 --eval-iters 0 --log-interval 1 --attention-dropout 0 "
    f"--hidden-dropout 0 --lr-warmup-iters 1 --train-iters {ITERATIONS}"
)
CASES = [
    "stock",
    "stock --num-virtual-stages-per-pipeline-rank 2",
    "1f1b",
    "interleaved",
    "gis",
    "gis-h",
    "zb-h1",
    "zb-h2",
    "zb-auto --pipeline-memory-limit 1.5",
    "zb-v",
    "v-half",
    "v-min",
    "v-auto --pipeline-memory-limit 0.75",
    "1f1b-v",
    "dualpipe-v",
    "zb-v --vocab-parallel 2",
    "v-half --vocab-parallel 1",
    "1f1b --vocab-parallel interlaced",
    "gis-h --offload full --offload-min-size 1KiB --offload-cpu-bandwidth 1e-2",
    "zb-h1 --global-batch-size 10",
]
SLEEPS = {"F": 0.04, "B": 0.05, "W": 0.03, "BW": 0.08, "S": 0.012, "T": 0.012, "IF": 0.004, "IB": 0.004}  # of a rank's share


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first ones")
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4), help="of the pipeline")
    parser.add_argument("--only", nargs="+", help="those that begin so")
    parser.add_argument("--rounds", type=int, default=1, help="of both, in turn")
    parser.add_argument("--rehearsals", action="store_true", help="rehearsals alone: do two of one case say the same?")
    given, rows = parser.parse_args(), []
    for case in [one for one in CASES[: given.cases] if one.startswith(tuple(given.only or [""]))]:
        measured, predicted = [], []
        for _ in range(given.rounds):
            measured += [] if given.rehearsals else _measured(case, given.ranks)
            found = rehearsed(given.ranks, __file__, f"{_flags(case, given.ranks)} --exit-interval 5")
            predicted.append(float(found["passes_seconds"]))
        said, spread = median(predicted), max(predicted) / min(predicted) - 1
        taken = [f"{1e3 * median(measured):.1f}", f"{1e3 * said:.1f}", f"{said / median(measured):.3f}"] if measured else []
        rows.append([case, *(taken or ["-", f"{1e3 * said:.1f}", "-"]), f"{spread:.1%}"])
        print(*rows[-1], sep="  ", flush=True)
    print_table("iterations of 8 microbatches", ["training", "measured ms", "predicted ms", "ratio", "between rounds"], rows)


def _measured(case: str, ranks: int) -> list[float]:
    """Makespans of the iterations after those that warm up, with the ranks side by side."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun(ranks, __file__, f"{_flags(case, ranks)} --pipeline-trace {folder}")
        paths = sorted(Path(folder).glob("iteration_*.json"))[2:]
        return [Timeline.from_json(path.read_text()).makespan for path in paths]


def _flags(case: str, ranks: int) -> str:
    return f"{MODEL} --pipeline-model-parallel-size {ranks} --global-batch-size 16 --pipeline-schedule {case}"


def train(argv: list[str]) -> int:
    """One rank of a training whose passes sleep before they end."""
    from megatron.pipeline import patches

    patches.install()
    import torch

    from megatron.pipeline.record.recorder import Recorder
    from megatron.pipeline.runtime.pipeline import Pipeline
    from megatron.pipeline.trainer import program

    measure, prepare, forward_backward = Recorder.measure, program.prepare, Pipeline.forward_backward
    chunks = 1

    def prepared(*given: Any) -> Any:
        nonlocal chunks
        args, tokenizer, pipeline = prepare(*given)
        chunks = pipeline.placement.chunks
        return args, tokenizer, pipeline

    @contextmanager
    def sleeping(self: Recorder, work: Pass) -> Iterator[None]:
        with measure(self, work):
            yield
            time.sleep(SLEEPS[str(work.kind)] / (1 if work.kind.is_of_vocabulary else chunks))

    def together(self: Pipeline, **keywords: Any) -> list[Any]:
        """Rank 0 has written the trace of the iteration before; the others wait for it, which is no part of a makespan."""
        torch.distributed.barrier()
        return forward_backward(self, **keywords)

    Recorder.measure, program.prepare = sleeping, prepared  # type: ignore[assignment, method-assign]
    Pipeline.forward_backward = together  # type: ignore[method-assign]
    return program.main(argv)


if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(train(sys.argv[1:]))
    main()
