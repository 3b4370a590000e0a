"""Pictures of schedules and of measured runs: a timeline looks the same whether it was planned or recorded."""

# ruff: noqa: F401 - the face of the planner has the others

from megatron.pipeline.planner.view.chrome_trace import to_trace
from megatron.pipeline.planner.view.consecutive import joined, recorded
from megatron.pipeline.planner.view.copies import copies_in_words
from megatron.pipeline.planner.view.notebook import svg
from megatron.pipeline.planner.view.page import Entry, write_page
from megatron.pipeline.planner.view.picture import Profile, draw
from megatron.pipeline.planner.view.plots import PlottedTraining, Point, draw_pareto, draw_throughput, pareto
from megatron.pipeline.planner.view.table import plain_table
from megatron.pipeline.planner.view.text import render

__all__ = ["Entry", "Point", "draw", "draw_pareto", "render", "write_page"]
