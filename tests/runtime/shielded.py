"""Costs at which plans hide the collectives of B behind weight gradients, on every stage."""

from __future__ import annotations

import json
from pathlib import Path

# Seconds: B and W are shorter together where B computes part of W behind its collectives.
_STAGE = {"forward": 3.0, "backward": 4.0, "weight": 3.0, "behind": 1.0, "saved": 1.5}


def costs(folder: Path, stages: int) -> str:
    """Flags."""
    file = folder / f"costs{stages}.json"
    file.write_text(json.dumps({"hop": 0.01, "unit": "microbatches", "stages": [_STAGE] * stages}))
    return f"--pipeline-costs {file}"
