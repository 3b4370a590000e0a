"""Pictures of schedules and of measured runs: a timeline looks the same whether it was planned or recorded."""

from megatron.pipeline.planner.view.page import Entry, write_page
from megatron.pipeline.planner.view.picture import draw
from megatron.pipeline.planner.view.plots import Point, draw_pareto
from megatron.pipeline.planner.view.text import render

__all__ = ["Entry", "Point", "draw", "draw_pareto", "render", "write_page"]
