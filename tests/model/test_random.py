"""Weights depend on the layer, dropout masks on iteration, microbatch and layer: not on rank, order or recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_gpt
import torch
from pool import Pool

UNTIED = ("--untie-embeddings-and-output-weights",)


def weights(pp: int, tp: int = 1, vpp: int = 1) -> dict[str, float]:
    """The sum of every parameter on this rank, by its global name."""
    flags = (*UNTIED, "--num-virtual-stages-per-pipeline-rank", str(vpp)) if vpp > 1 else UNTIED
    run = tiny_gpt.Run("1f1b" if vpp == 1 else "stock", pp=pp, tp=tp, flags=flags)
    return sums(run.chunks)


def sums(chunks: Any) -> dict[str, float]:
    """Of every parameter, by its global name."""
    found: dict[str, float] = {}
    for chunk in chunks:
        for tensor in chunk.module.sharded_state_dict(metadata={"dp_cp_group": torch.distributed.group.WORLD}).values():
            if isinstance(getattr(tensor, "data", None), torch.Tensor):
                found[f"{tensor.key}{tensor.global_offset}"] = tensor.data.double().sum().item()
    return found


def merged(results: list[dict[str, float]]) -> dict[str, float]:
    return {name: value for result in results for name, value in result.items()}


@pytest.mark.parametrize(("ranks", "pp", "vpp"), [(4, 4, 1), (2, 2, 2)])
def test_weights_do_not_depend_on_the_placement(pool: Pool, ranks: int, pp: int, vpp: int) -> None:
    expected = merged(pool.run(1, weights, 1))
    assert len(expected) > 10
    assert len(set(expected.values())) > 10, "layers differ from each other"
    assert merged(pool.run(ranks, weights, pp, 1, vpp)) == expected


def losses(flags: tuple[str, ...], seed_iteration: int = 0) -> list[float | None]:
    run = tiny_gpt.Run("zb-h1", pp=1, flags=flags)
    return [run.step(iteration + seed_iteration)[0] for iteration in range(3)]


def test_recomputation_draws_the_same_masks(pool: Pool) -> None:
    """With wrong masks in the recomputed forward, gradients and so the next losses would differ."""
    dropout = ("--hidden-dropout", "0.2", "--attention-dropout", "0.2")
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "2")
    assert pool.run(1, losses, dropout + recompute) == pool.run(1, losses, dropout)


def test_masks_do_not_depend_on_which_stages_have_layers(pool: Pool) -> None:
    """The embedding has dropout too."""
    dropout = ("--hidden-dropout", "0.2", "--attention-dropout", "0.2", "--pipeline-model-parallel-layout")
    found = [
        pool.run(2, tiny_gpt.train, schedule, pp=2, iterations=3, flags=(*dropout, layout))[1]
        for schedule in ("zb-h1", "stock")
        for layout in ("Ett|ttL", "E|ttttL")
    ]
    assert [[loss for loss, _ in steps] for steps in found] == [[loss for loss, _ in found[0]]] * 4


def test_masks_depend_on_the_iteration(pool: Pool) -> None:
    flags = ("--hidden-dropout", "0.2", "--lr", "1e-30")
    same_tokens = pool.run(1, repeated_tokens, flags)[0]
    assert len(set(same_tokens)) == len(same_tokens)


def repeated_tokens(flags: tuple[str, ...]) -> list[float | None]:
    """Losses on the same tokens and weights in different iterations."""
    run = tiny_gpt.Run("zb-h1", pp=1, flags=flags)
    tokens = run._tokens
    run._tokens = lambda _: tokens(0)  # type: ignore
    return [run.step(iteration)[0] for iteration in range(3)]
