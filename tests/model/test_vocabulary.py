"""The vocabulary in shards, all in one process: losses and gradients are the dense layer's, whatever the settings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model.vocabulary_case import Case


def check(case: Case, tolerance: float = 1e-5) -> None:
    expected = case.dense()
    for one_barrier in (False, True):
        for value, reference in zip(case.sharded(one_barrier), expected, strict=True):
            assert value.shape == reference.shape
            assert (value - reference).norm() <= tolerance * reference.norm() + 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"count": 1},
        {"mask_padding": True},
        {"size": 20, "stock_rows": 24, "count": 5},  # two shards without a row
        {"size": 17, "stock_rows": 40, "count": 5, "mask_padding": True},  # two shards with masked rows only
        {"z_loss": 1e-2},
        {"label_smoothing": 0.1},
        {"label_smoothing": 0.1, "z_loss": 1e-2, "mask_padding": True, "limit": 1},
        {"limit": 4 * 16 * 3},
        {"scale": 2.0**16},
    ],
    ids=str,
)
def test_is_the_dense_layer(options: dict[str, Any]) -> None:
    check(Case(**options))


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_size(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 150))
    check(
        Case(
            size=size,
            stock_rows=size + data.draw(st.integers(0, 50)),
            count=data.draw(st.integers(1, 9)),
            mask_padding=data.draw(st.booleans()),
            batch=data.draw(st.integers(1, 3)),
            sequence=data.draw(st.integers(1, 6)),
            label_smoothing=data.draw(st.sampled_from([0.0, 0.2])),
            z_loss=data.draw(st.sampled_from([0.0, 1e-3])),
            limit=data.draw(st.sampled_from([None, 1, 700, 10**6])),
        ),
    )
