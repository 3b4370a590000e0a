"""``scripts/compare.py``: what its table says of two runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compare", Path(__file__).parents[2] / "scripts" / "compare.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("losses", "norms", "expected"),
    [
        ((2.0, 1.5), (0.5, 0.25), "bit-identical"),
        ((2.0, 1.5), (0.5, 0.2500001), "loss bit-identical, norm within 4e-07"),
        ((2.0, 1.5000001), (0.5, 0.25), "loss within 7e-08, norm bit-identical"),
    ],
)
def test_differences(compare: ModuleType, losses: tuple[float, ...], norms: tuple[float, ...], expected: str) -> None:
    def run(losses: tuple[float, ...], norms: tuple[float, ...]) -> object:
        records = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(losses, norms, strict=True)]
        return compare.Run("any", records, Path())

    assert compare.difference(run(losses, norms), run((2.0, 1.5), (0.5, 0.25))) == expected
