"""Every layout of stages that megatron-core allows trains: with empty stages, and with an embedding or an output layer alone."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_gpt
from marked import rest
from pool import Pool

UNTIED = "--untie-embeddings-and-output-weights"
BOTH_OVERLAPS = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"
FURTHER_TOKEN = f"{UNTIED} --mtp-num-layers 1 --position-embedding-type rope"
CHUNKS = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "interleaved": 2, "gis": 2, "zb-v": 2, "v-half": 2}
SETTINGS = (
    UNTIED, BOTH_OVERLAPS, f"{UNTIED} {BOTH_OVERLAPS}", "--vocab-parallel 2", f"{UNTIED} --vocab-parallel 1 {BOTH_OVERLAPS}",
    FURTHER_TOKEN, "--hidden-dropout 0.1 --attention-dropout 0.1", f"{UNTIED} --calculate-per-token-loss --bf16",
    f"{UNTIED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
)  # fmt: skip


def check(pool: Pool, ranks: int, schedule: str, layout: str, flags: str) -> None:
    """Losses are those of the same stages on one rank, without clipping; a spread vocabulary sums in another order."""
    pp = (layout.count("|") + 1) // CHUNKS[schedule]
    whole = train(pool, ranks // pp, "1f1b", layout.replace("|", ""), re.sub("--vocab-parallel .", "", flags), 1)
    ours = train(pool, ranks, schedule, layout, flags, pp)
    losses, norms = zip(*ours, strict=True)
    expected, their_norms = zip(*whole, strict=True)
    assert losses == (pytest.approx(expected, rel=1e-5) if "vocab" in flags else expected)
    assert norms == pytest.approx(their_norms, rel=1e-4 if "vocab" in flags else 1e-6)


def train(pool: Pool, ranks: int, schedule: str, layout: str, flags: str, pp: int) -> list[tiny_gpt.Step]:
    """Losses and norms on the rank that has the loss; ranks that the pipeline does not need are data parallel."""
    given = f"--num-layers {layout.count('t')} --pipeline-model-parallel-layout {layout} --clip-grad 0 {flags}"
    options: dict[str, Any] = {"pp": pp, "iterations": 2, "microbatches": 5, "flags": tuple(given.split())}
    found = pool.run(ranks, tiny_gpt.train, schedule, **options)
    return next(steps for steps in reversed(found) if steps[0][0] is not None)


def drawn(seed: int) -> tuple[int, str, str, str]:
    """Ranks, schedule, layout and flags; layers lie anywhere, so that stages are empty, at the ends, too."""
    draw = random.Random(seed)
    schedule, pp = draw.choice(list(CHUNKS)), draw.choice((2, 3, 4))
    flags = draw.choice(SETTINGS)
    stages = [""] * pp * CHUNKS[schedule]
    for stage in draw.choices(range(len(stages)), k=draw.randint(1, 4)):
        stages[stage] += "t"
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * ("mtp" in flags) + "L"
    return 4 if pp == 2 else pp, schedule, "|".join(stages), flags


def cases(seeds: range, *marks: Any) -> Iterator[Any]:
    for seed in seeds:
        ranks, schedule, layout, flags = drawn(seed)
        yield pytest.param(ranks, schedule, layout, flags, marks=marks, id=f"{ranks} {schedule} {layout} {flags}")


@pytest.mark.parametrize(
    ("ranks", "schedule", "layout", "flags"),
    [
        rest(3, "zb-h1", "Et||L", UNTIED),
        (4, "zb-h1", "E|t||L", f"{UNTIED} --vocab-parallel 2"),
        rest(2, "zb-v", "Et||t|L", UNTIED),
        (4, "zb-v", "Et||t|L", f"{UNTIED} {BOTH_OVERLAPS}"),
        (4, "gis", "E|||tL", f"{UNTIED} {BOTH_OVERLAPS}"),
        (4, "zb-v", "E||t||t|||mL", FURTHER_TOKEN),
        *cases(range(2)),
        *cases(range(2, 6), pytest.mark.rest),
        *cases(range(6, 100), pytest.mark.whole),
    ],
)
def test_layouts_train_as_one_stage(pool: Pool, ranks: int, schedule: str, layout: str, flags: str) -> None:
    check(pool, ranks, schedule, layout, flags)
