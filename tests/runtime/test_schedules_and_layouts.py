"""Every schedule with every setting of a training trains as megatron-core's own 1F1B does.

Some 20 rows of settings contain every pair of them, and schedules that are alike are trained on a few rows, which have every
setting that they can be trained with (layouts.py); every schedule on all rows, with more numbers of microbatches and more
iterations, with ``make test-all``.

With the same placement losses and gradient norms are equal bit for bit; with another one every gradient is, so that without
clipping every loss is, and the norm, which sums in another order, up to its last bits. Slices change sums inside attention.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
import tiny_gpt
from marked import rest
from pool import Pool
from runtime import layouts
from runtime.layouts import ALIKE, COLUMNS, INTERLEAVED, LINEAR, NEVER, ROWS, SCHEDULES

from megatron.pipeline.cli import main

ITERATIONS = 2  # what a schedule does wrong in one it does in the first, or where it goes on from one
PLAIN = {name: values[0] for name, values in COLUMNS.items()}


def train(pool: Pool, schedule: str, row: layouts.Row, iterations: int) -> list[tiny_gpt.Step]:
    """Losses and norms on the rank that has the loss; ranks that are not needed for the model are data parallel."""
    layers = 8 if row["pp"] == "4" else 4  # one for each chunk
    settings = f"--num-layers {layers} --clip-grad 0 --lr 1e-3 {layouts.flags(row)}"
    sizes = {"pp": int(row["pp"])} | {f"{kind[0]}p": 2 for kind in ("tensor", "context") if row["parallel"] == kind}
    options = {**sizes, "microbatches": int(row["microbatches"]), "iterations": iterations}
    run = pool.once if schedule == "stock" else pool.run
    found = run(layouts.ranks(row), tiny_gpt.train, schedule, **options, flags=tuple(settings.split()))
    return next(steps for steps in reversed(found) if steps[0][0] is not None)


def check(pool: Pool, schedule: str, row: layouts.Row, iterations: int) -> None:
    ours, expected = (train(pool, name, row, iterations) for name in (schedule, "stock"))
    losses, norms = zip(*ours, strict=True)
    stock_losses, stock_norms = zip(*expected, strict=True)
    assert len(set(losses)) == iterations, "the loss changes"
    if schedule in LINEAR:
        assert ours == expected
    elif schedule == "seq-1f1b" or row["clip"] != "0":
        assert losses == pytest.approx(stock_losses, rel=1e-5)
    else:
        assert losses == stock_losses
        assert norms == pytest.approx(stock_norms, rel=1e-6)


def test_every_pair_of_settings_is_in_a_row() -> None:
    """And with schedules that are alike every setting that they can be trained with."""
    every = {
        frozenset([(a, one), (b, other)]) for a, b in combinations(COLUMNS, 2) for one, other in product(COLUMNS[a], COLUMNS[b])
    }
    assert {frozenset(two) for row in ROWS for two in combinations(row.items(), 2)} == every - NEVER
    cases = layouts.cases()
    assert sorted(schedule for alike in ALIKE for schedule in alike) == sorted(SCHEDULES) == sorted({name for _, name in cases})
    trained = {(alike, value) for number, name in cases for alike in ALIKE if name in alike for value in ROWS[number].items()}
    values = {(name, value) for name in COLUMNS for value in COLUMNS[name]}
    refused = {(alike, value) for alike in ALIKE for schedule in alike for value in layouts.never_with(schedule)}
    refused |= {(("seq-1f1b",), value) for two in NEVER if ("slices", "yes") in two for value in two - {("slices", "yes")}}
    assert trained == set(product(ALIKE, values)) - refused
    assert {number for number, _ in cases} == set(range(len(ROWS)))
    assert len(refused) < 0.1 * len(trained)


def case(row: int, schedule: str) -> Any:
    """Pipelines are trained first; of schedules with several chunks those that split backwards, others with two or four ranks."""
    others = (*INTERLEAVED, "1f1b-v", "dualpipe-v")
    pp = ROWS[row]["pp"]
    daily = pp == "4" or (pp == "2" and (schedule not in others or layouts.ranks(ROWS[row]) == 2))
    return (pytest.param if daily else rest)(row, schedule, id=f"{layouts.name(ROWS[row])}-{schedule}")


@pytest.mark.parametrize(("row", "schedule"), [case(*one) for one in layouts.cases()])
def test_every_schedule_and_setting(pool: Pool, row: int, schedule: str) -> None:
    check(pool, schedule, ROWS[row], ITERATIONS)


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches"), [rest("gis", "2", "3"), rest("zb-v", "2", "3"), rest("seq-1f1b", "2", "2")]
)
def test_twenty_iterations(pool: Pool, schedule: str, pp: str, microbatches: str) -> None:
    """Of every placement, and of slices."""
    check(pool, schedule, PLAIN | {"pp": pp, "microbatches": microbatches}, 20)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("schedule", "row", "microbatches"),
    [
        (schedule, row, str(microbatches))
        for schedule, row, microbatches in product(SCHEDULES, range(len(ROWS)), range(1, 10))
        if not layouts.never_with(schedule) & set(ROWS[row].items())
    ],
)
def test_whole_matrix(pool: Pool, schedule: str, row: int, microbatches: str) -> None:
    check(pool, schedule, ROWS[row] | {"microbatches": microbatches}, iterations=10)


def test_interleaved_equals_megatrons_own(pool: Pool) -> None:
    """The same placement, so clipping included: and a schedule that groups microbatches differently."""
    pp, layers, iterations = 4, 8, 2
    flags = ("--num-layers", str(layers), "--num-virtual-stages-per-pipeline-rank", "2", "--overlap-grad-reduce")
    found = [
        pool.run(pp, tiny_gpt.train, schedule, pp=pp, microbatches=2 * pp, flags=flags, iterations=iterations)
        for schedule in ("stock", "interleaved", "gis-h")
    ]
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.parametrize(("pp", "layers", "microbatches", "group"), [rest(2, 4, 5, 3), (4, 8, 6, 6)])
def test_groups_that_are_larger_than_the_pipeline(pool: Pool, pp: int, layers: int, microbatches: int, group: int) -> None:
    """With them megatron-core's own takes numbers of microbatches that are no multiple of the ranks."""
    flags = f"--num-layers {layers} --num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage"
    options: dict[str, Any] = {"pp": pp, "microbatches": microbatches, "iterations": 2, "flags": (*flags.split(), str(group))}
    stock, ours = (pool.run(pp, tiny_gpt.train, schedule, **options) for schedule in ("stock", "interleaved"))
    assert ours == stock


def test_recomputed_passes(pool: Pool, tmp_path: Any) -> None:
    """R runs a forward again, on the same data and with the same masks."""
    path = tmp_path / "recomputed.json"
    assert main(f"plan --schedule zb-v --pp 2 --microbatches 5 --recompute all --json -o {path}".split()) == 0
    row = PLAIN | {"dropout": "0.1"}
    check(pool, f"file:{path}", row, 3)
