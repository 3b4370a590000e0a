"""``--post-validation`` in the loop of Megatron-LM's scripts: no bit is another one, whatever comes between two iterations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from launch.launched import SIZES, STAND_IN, launch
from marked import rest

AHEAD = "--post-validation --post-validation-when always"
FP16 = "--fp16 --initial-loss-scale 1048576 --hysteresis 1 --loss-scale-window 2"


def train(folder: Path, flags: str, ranks: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """On pipeline ranks: the metrics of all iterations, and every rank's state at each checkpoint."""
    folder.mkdir()
    launch(folder, STAND_IN, f"{SIZES} --pipeline-model-parallel-size {ranks} --save {folder} {flags}", ranks, patience=3000)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return metrics, [torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))]


def leaves(state: Any) -> list[Any]:
    """Tensors and numbers of a nest of lists and dicts."""
    if isinstance(state, (list, tuple, dict)):
        return [leaf for item in (state.values() if isinstance(state, dict) else state) for leaf in leaves(item)]
    return [state]


def same(one: Any, other: Any) -> bool:
    return bool(torch.equal(one, other) if torch.is_tensor(one) else one == other or (one is None and other is None))


@pytest.mark.parametrize(
    ("schedule", "precision", "ranks"),
    [
        ("zb-v", f"--clip-grad 1.2 {FP16}", 2),
        rest("zb-v", "--clip-grad 0.62", 4),
        rest("zb-h2 --untie-embeddings-and-output-weights", "--clip-grad 0.62", 2),
    ],
)
def test_no_bit_differs_from_synchronous_steps(tmp_path: Path, schedule: str, precision: str, ranks: int) -> None:
    flags = f"--pipeline-schedule {schedule} {precision} --train-iters 8 --lr-warmup-iters 4 --save-interval 4"
    plain, expected = train(tmp_path / "plain", flags, ranks)
    ahead, found = train(tmp_path / "ahead", f"{flags} {AHEAD}", ranks)
    for name in ("iteration", "loss", "grad_norm"):
        assert [step[name] for step in ahead] == [step[name] for step in plain], name
    assert len(found) == len(expected) == 2 * ranks and len(leaves(found)) == len(leaves(expected)) > 400
    assert all(map(same, leaves(found), leaves(expected)))
    kinds = Counter(step["optimizer_step"] for step in ahead)
    assert kinds["ahead"] and kinds["undone"] and kinds["synchronous"], kinds
    assert ("fp16" in precision) is any(step["grad_norm"] is None for step in ahead)
