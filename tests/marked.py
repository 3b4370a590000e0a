"""Rows of parameters that not every run of the tests has."""

from __future__ import annotations

from typing import Any

import pytest


def rest(*values: Any, id: str | None = None) -> Any:
    """A row that ``make test`` leaves to ``make test-rest``."""
    return pytest.param(*values, marks=pytest.mark.rest, id=id)


def whole(*values: Any, id: str | None = None) -> Any:
    """A row of which others have every setting: for ``make test-all`` alone."""
    return pytest.param(*values, marks=pytest.mark.whole, id=id)
