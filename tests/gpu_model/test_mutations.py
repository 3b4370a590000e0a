"""Each wait that is taken out is reported: by a race, by a deadlock, or by the judge. All of them: minutes."""

from __future__ import annotations

import pytest
from pool import Pool, RankFailed

from gpu_model.mutations import MUTATIONS, RUNS, Mutation, mutated
from gpu_model.recorded import stuck
from gpu_model.test_trainer import races_and_trace
from gpu_model.trace import Item

QUICK = [one for one in MUTATIONS if one.where.partition(":")[2] in ("Transport.wait", "Store.finish_offload")]


def found(mutation: Mutation, flags: str) -> tuple[list[str], list[Item]]:
    """Races of a training, and its trace."""
    run = RUNS[mutation.run]
    with mutated(mutation):
        return races_and_trace(f"{flags} {run.flags}", run.around)


def reports(gpus: Pool, mutation: Mutation, data: str, iterations: int = 4) -> list[str]:
    """Of all ranks, and of the judge over them."""
    try:
        answers = gpus.run(RUNS[mutation.run].ranks, found, mutation, f"{data} --train-iters {iterations}")
    except RankFailed as failed:
        if "DEADLOCK" in str(failed):
            return [str(failed)]
        raise
    return [*(race for races, _ in answers for race in races), *stuck([trace for _, trace in answers])]


def title(mutation: Mutation) -> str:
    return f"{mutation.where} without {mutation.code.split('.')[-1].strip()}, {mutation.run}"


@pytest.mark.whole
def test_every_mutation_is_reported(gpus: Pool, data: str) -> None:
    missed = [title(one) for one in MUTATIONS if not reports(gpus, one, data)]
    print(f"{len(MUTATIONS) - len(missed)} of {len(MUTATIONS)} reported")
    assert not missed


def _mutate() -> None:
    for each in MUTATIONS:
        with mutated(each):
            pass


def test_every_mutation_has_its_code(pool: Pool) -> None:
    """In the product as it is today: most of them are tried in the whole matrix alone."""
    pool.run(1, _mutate)


@pytest.mark.parametrize("mutation", QUICK, ids=title)
def test_a_mutation_is_reported(gpus: Pool, data: str, mutation: Mutation) -> None:
    assert reports(gpus, mutation, data, iterations=3)
