"""Draw the predicted memory of ranks under megatron-core's 1F1B and under the schedules of some files of ``configs/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from common import command_line

matplotlib.use("Agg")
from matplotlib import pyplot

from megatron.pipeline.cli.memory import STOCK_1F1B, Prediction, predicted, schedule_name
from megatron.pipeline.costmodel.memory import GIB, OVERHEAD

ROOT = Path(__file__).parents[1]
MODELS = ("zero_bubble/6.2B", "vocabulary_parallelism/7B", "pipe_offload/10.5B", "llama3/8B")
PARTS = (
    ("weights, gradients, optimizer", "#4c78a8", lambda rank: rank.state),
    ("activations", "#f58518", lambda rank: rank.activations),
    ("other", "#bab0ac", lambda rank: rank.temporary + OVERHEAD),
)


def draw(path: Path) -> None:
    figure, rows = pyplot.subplots(len(MODELS), 2, figsize=(11, 2.3 * len(MODELS)), sharey="row", layout="constrained")
    for (left, right), name in zip(rows, MODELS, strict=True):
        flags = ["--config", str(ROOT / "configs" / f"{name}.yaml")]
        _bars(left, predicted(flags, changes=STOCK_1F1B), f"{name}: stock")
        own = predicted(flags)
        _bars(right, own, schedule_name(own.args))
        left.set_ylabel("memory (GiB)")
    rows[-1][0].set_xlabel("rank")
    rows[-1][1].set_xlabel("rank")
    rows[0][0].legend(fontsize=7, loc="upper right", framealpha=1)
    figure.savefig(path, dpi=110)


def _bars(axes: Any, prediction: Prediction, title: str) -> None:
    below = [0.0] * len(prediction.ranks)
    for label, colour, part in PARTS:
        heights = [part(rank) / GIB for rank in prediction.ranks]
        axes.bar(range(len(heights)), heights, bottom=below, label=label, color=colour)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_title(title, fontsize=9)
    axes.set_xticks(range(len(below)))


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("picture", nargs="?", type=Path, default=ROOT / "docs" / "images" / "memory.png")
    draw(parser.parse_args().picture)
