"""Each wait that is taken out is reported: by a race, or by a deadlock. Part of ``make test-all``: minutes."""

from __future__ import annotations

import pytest
from pool import Pool, RankFailed

from gpu_model.mutations import MUTATIONS, RUNS, Mutation, mutated
from gpu_model.test_trainer import races

pytestmark = pytest.mark.whole


def found(mutation: Mutation, flags: str) -> list[str]:
    with mutated(mutation):
        return races(flags)


def title(mutation: Mutation) -> str:
    return f"{mutation.where} without {mutation.line.split('.')[-1].strip()}, {mutation.run}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=title)
def test_every_mutation_is_reported(gpus: Pool, data: str, mutation: Mutation) -> None:
    ranks, flags = RUNS[mutation.run]
    try:
        reports = gpus.run(ranks, found, mutation, f"{data} --train-iters 4 {flags}")
    except RankFailed as failed:
        reports = [[str(failed)]] if "DEADLOCK" in str(failed) else []
    assert any(reports), "nothing was found"


@pytest.mark.parametrize("run", sorted({mutation.run for mutation in MUTATIONS}))
def test_nothing_is_reported_without_one(gpus: Pool, data: str, run: str) -> None:
    ranks, flags = RUNS[run]
    assert gpus.run(ranks, races, f"{data} --train-iters 4 {flags}") == [[]] * ranks
