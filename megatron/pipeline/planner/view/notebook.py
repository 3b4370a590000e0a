"""Pictures in the cells of a notebook, which asks a value for its ``_repr_svg_``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.pipeline.planner.schedule.core.costs import EQUAL_SHARDS, uniform
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timeline
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.view.picture import draw

MOST = 20_000  # passes: a browser takes long to show more


def svg(shown: Schedule | Timeline, title: str = "", splits: int = 1) -> str | None:
    """Picture of a timeline, or of a schedule with F, B and W of equal length; None where it would have over ``MOST`` passes, the
    passes wait for each other, or matplotlib is missing, so that the notebook prints text.
    """
    try:
        if isinstance(shown, Schedule):
            splits, title = shown.splits, title or f"{shown.name}, equal passes"
            shown = simulate(shown, uniform(shown.placement, vocabulary=EQUAL_SHARDS if shown.vocabulary else None))
        if sum(map(len, shown.ranks)) > MOST:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "picture.svg")
            draw({title: shown}, path, splits={title: splits})
            return path.read_text(encoding="utf-8")
    except (ModuleNotFoundError, ValueError):
        return None
