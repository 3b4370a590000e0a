"""The rows of what does not go together: they are of settings that there are, and each is said where both features are given."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.importers.upstream import table
from megatron.pipeline.planner.combinations import rows
from megatron.pipeline.planner.combinations.table import _WORDS, Combination, Facts, _parts, _several

TOPICS = {name: topic for name, topic in vars(rows).items() if name.isupper() and name[0] != "_" and name != "RECIPES"}
# Of a planner's command or a call, and what upstream computes.
BESIDE_FLAGS = set(
    "asked_splits attention balance expert_gtp_weight_remat_size fixed_chunks grad_bytes group gtp_weight_remat_size "
    "host_memory_limit lengths order param_bytes pipeline_packing replica_link variable_seq_lengths vocab_cost".split()
)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_row_is_of_settings_that_there_are(topic: str) -> None:
    """One that is misspelt would be neither on nor off, and never refused."""
    known = set(of_flags(parse([]), launch=True, stages=3)) | BESIDE_FLAGS | {word.removeprefix("no ") for word in _WORDS}
    for row in table("upstream"):
        known |= {row.get("dest", ""), *(name[2:].replace("-", "_") for name in row["names"])}
    features = {feature for row in TOPICS[topic] for one in (row.one, row.other) for feature in _several(one)}
    assert {_parts(feature)[1] for feature in features} <= known


def given(features: str, on: bool = True) -> dict[str, Any]:
    """The first of several features, given or not."""
    no, name, relation, wanted = _parts(_several(features)[0])
    value: Any = float(wanted) + 1 if relation == ">" else wanted or 2
    return {name: value if on is not bool(no) else False}


WITHOUT_CONDITION = [
    row for topic in TOPICS.values() for row in topic if row.when is Combination._field_defaults["when"] and row.one != row.other
]


@pytest.mark.parametrize("row", dict.fromkeys(WITHOUT_CONDITION), ids=lambda row: row.name)
def test_a_row_is_said_where_both_features_are_given_and_nowhere_else(row: Combination) -> None:
    """But those with a condition, which have tests of their own."""
    release = {"core": f"{row.since or '0.16'}.0"} if row.since or row.mended else {}
    for one, other in ((True, True), (True, False), (False, True)):
        facts = Facts(given(row.one, one) | given(row.other, other) | release)
        assert len(list(facts.found([row]))) == (one and other)
