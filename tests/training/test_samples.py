"""The order of samples: which rank takes which, after any number of consumed samples."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.trainer.data import forward_step, masked_loss, reading, sequential

small = st.integers(1, 4)


def test_the_model_has_the_mask_too() -> None:
    """For the losses of further tokens (MTP), which it computes itself."""
    batch = {name: torch.zeros(1, 4) for name in ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")}
    given: dict[str, object] = {}
    forward_step(iter([batch]), lambda *_, **kwargs: given.update(kwargs))  # type: ignore[arg-type]
    assert torch.equal(given["loss_mask"], batch["loss_mask"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("vocab_parallel", "reset", "needed"),
    [("off", False, [False, False, True]), ("2", False, [True, False, True]), ("off", True, [True, True, True])],
)
def test_which_chunks_need_data(vocab_parallel: str, reset: bool, needed: list[bool]) -> None:
    """With shards of the vocabulary on all ranks, the first chunk of each needs the tokens and the labels."""
    chunks: Any = [SimpleNamespace(pre_process=False, post_process=last) for last in (False, False, True)]
    assert reading(Settings.of(Namespace(vocab_parallel=vocab_parallel, reset_attention_mask=reset)), chunks) == needed


@given(ranks=small, micro_batch=small, consumed=st.integers(0, 30), total=st.integers(0, 60))
def test_every_sample_once_in_order(ranks: int, micro_batch: int, consumed: int, total: int) -> None:
    total += consumed + ranks * micro_batch
    samplers = [sequential(total, consumed, micro_batch, rank, ranks) for rank in range(ranks)]
    order = [index for step in zip(*samplers, strict=True) for microbatch in step for index in microbatch]
    assert order == list(range(consumed, consumed + len(order)))
    assert total - consumed - len(order) < ranks * micro_batch


@given(ranks=small, micro_batch=small, steps=st.integers(0, 5))
def test_a_restart_changes_nothing(ranks: int, micro_batch: int, steps: int) -> None:
    total = 6 * ranks * micro_batch
    whole = list(sequential(total, 0, micro_batch, 0, ranks))
    assert whole[steps:] == list(sequential(total, steps * ranks * micro_batch, micro_batch, 0, ranks))


def test_too_few_samples() -> None:
    with pytest.raises(ValueError, match="8 of 10 samples are consumed: 4 more are needed"):
        sequential(10, 8, 2, 0, 2)


def test_masked_loss() -> None:
    losses, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    loss, tokens, report = masked_loss(mask, losses)
    assert (loss.item(), tokens.item(), report["lm loss"].tolist()) == (13.0, 3, [13.0, 3.0])
    assert tokens.dtype == torch.int
