"""``--post-validation`` in the loop of Megatron-LM's scripts: no bit is another one, whatever comes between two iterations."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from launch.launched import SIZES, STAND_IN, launch, rank
from launch.test_upstream import ON_UPSTREAM, UPSTREAM, needs_upstream
from marked import rest, whole

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
    ("iterations", "ranks"),
    [(8, 2), rest(8, 4), pytest.param(200, 4, marks=[pytest.mark.whole, pytest.mark.timeout(3000)])],
)
@pytest.mark.parametrize(
    ("schedule", "precision"),
    [
        ("zb-v", f"--clip-grad 1.2 {FP16}"),
        rest("zb-v", "--clip-grad 0.62"),
        rest("zb-h2 --untie-embeddings-and-output-weights", "--clip-grad 0.62"),
        whole("zb-h2 --untie-embeddings-and-output-weights", f"--clip-grad 1.2 {FP16}"),
    ],
)
def test_no_bit_differs_from_synchronous_steps(
    tmp_path: Path, schedule: str, precision: str, iterations: int, ranks: int
) -> None:
    flags = f"--pipeline-schedule {schedule} {precision} --train-iters {iterations} --lr-warmup-iters {iterations // 2} "
    flags += f"--save-interval {iterations // 2}"
    plain, expected = train(tmp_path / "plain", flags, ranks)
    ahead, found = train(tmp_path / "ahead", f"{flags} {AHEAD}", ranks)
    for name in ("iteration", "loss", "grad_norm"):
        assert [step[name] for step in ahead] == [step[name] for step in plain], name
    assert len(found) == len(expected) == 2 * ranks and len(leaves(found)) == len(leaves(expected)) > 400
    assert all(map(same, leaves(found), leaves(expected)))
    kinds = Counter(step["optimizer_step"] for step in ahead)
    assert kinds["ahead"] and kinds["undone"] and kinds["synchronous"], kinds
    assert ("fp16" in precision) is any(step["grad_norm"] is None for step in ahead)


def told_to_stop_in_iteration_7(number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """A rank of a launch of which one gets a SIGTERM."""
    from megatron.pipeline.runtime.iteration import Iteration

    run = Iteration.run
    count: Counter[str] = Counter()

    def counting(iteration: Iteration, call: Any) -> Any:
        count["trained"] += not call.forward_only
        if number == 2 and count["trained"] == 7 and not call.forward_only:
            os.kill(os.getpid(), signal.SIGTERM)
        return run(iteration, call)

    with patch.object(Iteration, "run", counting):
        rank(number, ranks, port, output, arguments)


def logged(folder: Path) -> list[str]:
    """What Megatron-LM logs of iterations and evaluations, but for times."""
    kinds = r"iteration +\d+/ +\d+ \|.*number of nan iterations: +\d+ \||validation loss at .*?PPL: \S+"
    kept = [line[0] for line in re.finditer(kinds, (folder / "output").read_text())]  # other ranks write into the same lines
    return [re.sub(r"elapsed time per iteration \(ms\): [\d.]+ \|", "", line) for line in kept]


@needs_upstream
@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "flags", [f"--pipeline-schedule zb-v {FP16}", "--pipeline-schedule zb-h2 --untie-embeddings-and-output-weights"]
)
def test_evaluations_checkpoints_and_signals_of_upstreams_own_script(tmp_path: Path, flags: str) -> None:
    common = ON_UPSTREAM.replace("--eval-iters 0 --eval-interval 100 --clip-grad 0 --train-iters 5", "")
    common = f"{SIZES} {common} {flags} --pipeline-model-parallel-size 4 --clip-grad 2.25 --train-iters 12 --eval-iters 1 "
    common += "--eval-interval 5 --log-interval 1 --lr-warmup-iters 4 --save-interval 4 "
    launch(tmp_path / "plain", UPSTREAM, f"{common} --save {tmp_path}/alone", 4, "--core pip", patience=3000)
    cut = f"{common} {AHEAD} --save {tmp_path}/saved"
    launch(tmp_path / "cut", UPSTREAM, cut, 4, "--core pip", told_to_stop_in_iteration_7, patience=3000)
    assert "exiting program after receiving SIGTERM" in (tmp_path / "cut" / "output").read_text()
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "7"
    launch(tmp_path / "rest", UPSTREAM, f"{cut} --load {tmp_path}/saved", 4, "--core pip", patience=3000)
    expected, found = logged(tmp_path / "plain"), [*logged(tmp_path / "cut"), *logged(tmp_path / "rest")]
    [at] = [number for number, line in enumerate(found) if re.match(r"iteration +9/", line)]
    for lines in (expected, found):  # after every start Megatron-LM's second line is of the first two iterations
        lines[at] = re.sub(r" lm loss: \S+ \|| number of skipped iterations: +\d+ \|", "", lines[at])
    assert len(expected) > 14 and found == expected
    kinds: Counter[str] = Counter()
    for run in ("cut", "rest"):
        kinds.update(json.loads(line)["optimizer_step"] for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines())
    assert kinds["ahead"] and kinds["undone"]
