"""Values that a notebook shows as pictures, and the notebook of ``examples/``."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megatron.pipeline.planner import Kind, Pass, Request, Schedule, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import linear

NOTEBOOK = Path(__file__).parents[2] / "examples" / "schedules.ipynb"


def shown(cell: str, names: dict[str, Any]) -> Any:
    """The value of a cell's last line, as a notebook has it; None where that is no expression."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names) if isinstance(last, ast.Expr) else None


def test_the_cells_of_the_notebook_run_and_show_pictures(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    values = [shown("".join(cell["source"]), names) for cell in cells]
    pictures = [value._repr_svg_() for value in values if value is not None]
    assert len(pictures) == 2 and all(ElementTree.fromstring(picture).tag.endswith("svg") for picture in pictures)
    assert "<!-- zb-v -->" in pictures[0] and "<!-- gpipe, equal passes -->" in pictures[1]
    assert capsys.readouterr().out.count("%") == 5


def test_a_timeline_a_spread_vocabulary_and_slices_are_shown() -> None:
    for request in (Request("zb-h1", 2, 4, vocabulary=Vocabulary.TWO_BARRIERS), Request("seq-1f1b", 2, 4)):
        planned = request.plan()
        assert all("<svg" in str(one._repr_svg_()) for one in (planned, planned.schedule, planned.timeline))


def test_what_cannot_be_drawn_is_left_to_text() -> None:
    waiting = Schedule("stuck", linear(2), 1, ((Pass(Kind.BW, 0), Pass(Kind.F, 0)),) * 2)
    assert waiting._repr_svg_() is None
    assert Request("1f1b", 64, 256).plan()._repr_svg_() is None
