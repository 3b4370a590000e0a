"""Pictures of schedules and of measured runs: a timeline looks the same whether it was planned or recorded."""

from megatron.pipeline.view.page import Entry, write_page
from megatron.pipeline.view.picture import draw
from megatron.pipeline.view.plots import Point, draw_pareto
from megatron.pipeline.view.text import render

__all__ = ["Entry", "Point", "draw", "draw_pareto", "render", "write_page"]
