"""What the device model's ranks do (``gpu_model``), on GPUs and over NCCL: messages, vocabulary, hops, the training program."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import tiny_gpt
from gpu_model.mutations import RUNS
from gpu_model.test_messages import pinged
from gpu_model.test_training import TRAININGS
from pool import Pool
from training import short_runs


def _needs(ranks: int) -> pytest.MarkDecorator:
    return pytest.mark.cuda(devices=ranks)


@pytest.mark.parametrize("posting", ["single", "batched"])
@pytest.mark.parametrize(("ranks", "schedule", "flags"), [pytest.param(*one, marks=_needs(one[0])) for one in TRAININGS])
def test_losses_are_those_of_stock(nccl: Pool, ranks: int, schedule: str, flags: str, posting: str) -> None:
    tp = 2 if "tensor" in flags else 1
    given = flags.replace("--tensor-model-parallel-size 2", "")
    own: list[str] = [flag for flag in ("--sequence-parallel", "--untie-embeddings-and-output-weights") if flag in given.split()]
    own += given.split() if "distributed" in given else []
    ours = nccl.run(ranks, tiny_gpt.train, schedule, pp=2, tp=tp, iterations=3, flags=(*given.split(), "--pipeline-p2p", posting))
    stock = nccl.run(ranks, tiny_gpt.train, "stock", pp=2, tp=tp, iterations=3, flags=tuple(own))
    losses, expected = ([loss for steps in found for loss, _ in steps if loss is not None] for found in (ours, stock))
    assert losses == pytest.approx(expected, rel=1e-4)
    norms, wanted = ([norm for steps in found for _, norm in steps] for found in (ours, stock))
    assert norms == pytest.approx(wanted, rel=1e-3)


@_needs(2)
@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if run.ranks == 2 and run.around is nullcontext])
def test_the_training_program_ends(nccl: Pool, data: str, name: str) -> None:
    assert nccl.run(2, short_runs.train, f"{data} {RUNS[name].flags}") == ["", ""]


@_needs(2)
def test_a_hop_is_measured(nccl: Pool) -> None:
    measured, nothing = nccl.run(2, pinged)
    assert len(measured) == 5 and all(seconds > 0 for seconds in measured) and nothing == []
