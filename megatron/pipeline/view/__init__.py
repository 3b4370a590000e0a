"""Pictures of schedules and of measured runs: a timeline looks the same whether it was planned or recorded."""

from megatron.pipeline.view.picture import draw
from megatron.pipeline.view.text import render

__all__ = ["draw", "render"]
