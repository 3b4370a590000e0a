"""Each wait that is taken out is reported: by a race, by a deadlock, or by the judge. All of them: minutes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from pool import Pool, RankFailed

from gpu_model.mutations import MUTATIONS, RUNS, Mutation, mutated
from gpu_model.recorded import recording, stuck
from gpu_model.test_trainer import races
from gpu_model.trace import Item

QUICK = [one for one in MUTATIONS if one.where.partition(":")[2] in ("Transport.wait", "Store.finish_offload")]


def found(mutation: Mutation | None, name: str, flags: str) -> tuple[list[str], list[Item]]:
    """Races of a training, and its trace."""
    run = RUNS[name]
    with mutated(mutation) if mutation else nullcontext(), run.around(), recording() as trace:
        return races(f"{flags} {run.flags}"), trace


def reports(gpus: Pool, mutation: Mutation | None, name: str, data: str, iterations: int = 4) -> list[str]:
    """Of all ranks, and of the judge over them."""
    try:
        answers = gpus.run(RUNS[name].ranks, found, mutation, name, f"{data} --train-iters {iterations}")
    except RankFailed as failed:
        if "DEADLOCK" in str(failed):
            return [str(failed)]
        raise
    return [*(race for races, _ in answers for race in races), *stuck([trace for _, trace in answers])]


def title(mutation: Mutation) -> str:
    return f"{mutation.where} without {mutation.line.split('.')[-1].strip()}, {mutation.run}"


@pytest.mark.whole
def test_every_mutation_is_reported(gpus: Pool, data: str) -> None:
    missed = [title(one) for one in MUTATIONS if not reports(gpus, one, one.run, data)]
    print(f"{len(MUTATIONS) - len(missed)} of {len(MUTATIONS)} reported")
    assert not missed


@pytest.mark.parametrize("mutation", QUICK, ids=title)
def test_a_mutation_is_reported(gpus: Pool, data: str, mutation: Mutation) -> None:
    assert reports(gpus, mutation, mutation.run, data, iterations=3)


@pytest.mark.whole
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_reported_without_one(gpus: Pool, data: str, name: str) -> None:
    assert reports(gpus, None, name, data) == []
