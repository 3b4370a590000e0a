"""Reports of the loss function, from the rank with the last stage of a V to the last rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from session import tied_ends
from torch.utils._pytree import tree_map

FORMS: list[list[Any]] = [
    [{"loss": torch.tensor([1.5, 2**53 + 1], dtype=torch.float64), "tokens": torch.tensor([2**62 + 1, 3])}],
    [{"loss": torch.tensor([2.5, -1.0], dtype=torch.float64), "tokens": torch.tensor([5, 6])}],  # of the same form
    [(torch.arange(7, dtype=torch.bfloat16).view(7, 1), "a word", 3, torch.empty(0)), None],
    [],
    [{"log_probs": torch.rand(3, 5), "kept": torch.tensor([True, False])}] * 3,
    [{"log_probs": torch.nested.nested_tensor([torch.rand(length) for length in (3, 1, 4)], layout=torch.jagged)}] * 2,
]


def bits(reports: list[Any]) -> Any:
    def of(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        return leaf.dtype, [row.tolist() for row in leaf.unbind()] if leaf.is_nested else leaf.tolist()

    return tree_map(of, reports)


def test_what_is_reported_arrives_with_its_bits(pool: Pool) -> None:
    home, *between, last = pool.run(4, tied_ends.brought, FORMS)
    assert between == [[[]] * len(FORMS)] * 2
    for sent, own, arrived in zip(FORMS, home, last, strict=True):
        assert bits(own) == bits(sent) == bits(arrived)


def test_a_loop_sees_the_ends_of_a_v_where_they_are(pool: Pool) -> None:
    for rank, (told, layers) in enumerate(pool.run(4, tied_ends.ends, "zb-v")):
        # By chunk: the first, the last, by both of megatron-core's ways to ask.
        assert told == [(rank == 0, False)] * 2 + [(False, rank == 0)] * 2
        # Without a chunk: reports are on the last rank, as ever, and on the one with the last stage.
        assert layers == [[2 * rank, 2 * rank + 1], [14 - 2 * rank, 15 - 2 * rank]]
    for rank, (told, layers) in enumerate(pool.run(4, tied_ends.ends, "interleaved")):
        assert told == [(rank == 0, False)] * 2 + [(False, rank == 3)] * 2
        assert layers == [[2 * rank, 2 * rank + 1], [8 + 2 * rank, 9 + 2 * rank]]


def test_layers_of_a_layout_stay_in_its_stages(pool: Pool) -> None:
    found = pool.run(4, tied_ends.ends, "zb-v", "Et|tt|tt|ttt|tt|tt|tt|ttL")
    assert [layers for _, layers in found] == [
        [[0], [14, 15]], [[1, 2], [12, 13]], [[3, 4], [10, 11]], [[5, 6, 7], [8, 9]]
    ]  # fmt: skip


def test_tied_ends_on_two_ranks_that_megatron_core_has_no_group_for_are_refused(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(tied_ends.turned().to_json(), encoding="utf-8")
    found = pool.run(4, tied_ends.ends_refused, f"file:{path}")
    assert found[1] == found[3] == ""
    assert "output layer on rank 2, and the model ties it to the embedding on rank 0" in found[0] and found[2] == found[0]


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_tied_ends_train_as_under_stock(pool: Pool, schedule: str) -> None:
    stock, ours = pool.each(4, tied_ends.tied, ("stock", schedule))
    assert [losses for losses, _ in ours[-1]] == [losses for losses, _ in stock[-1]]
    assert [norm for _, norm in ours[-1]] == pytest.approx([norm for _, norm in stock[-1]], rel=1e-6)


def test_a_load_by_megatron_bridge_reaches_both_ends(pool: Pool) -> None:
    both, one = (pool.run(4, tied_ends.tied, "zb-v", False, by_bridge) for by_bridge in (False, True))
    assert one == both


def test_tied_ends_that_differ_are_refused_on_every_rank(pool: Pool) -> None:
    messages = pool.run(4, tied_ends.tied, "zb-v", True)
    assert len(set(messages)) == 1 and "tied to the embedding, and their weights differ" in messages[0]
