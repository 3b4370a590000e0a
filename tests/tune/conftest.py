"""Searches without processes of their own."""

from __future__ import annotations

import pytest
from tune.small import Here

from megatron.pipeline.tune import search


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are planned in this process."""
    monkeypatch.setattr(search, "_pool", lambda processes: Here())
