"""The rooms of the package: what their table says is what import-linter checks, and planning starts without torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import check_lines
import pytest
import room_tests

ROOT = Path(__file__).parent.parent
PIPELINE = ROOT / "megatron" / "pipeline"


def layers(contract: str) -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [found] = [one for one in contracts if one["id"] == contract]
    return [name for layer in found["layers"] for name in layer.split(" | ")]


def test_the_table_of_rooms_is_the_contract() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    rooms = re.findall(r"^\| `([\w/]+)/` ", section, re.MULTILINE)
    assert rooms == [*layers("rooms"), *(f"planner/{name}" for name in layers("planner"))]
    [packages] = re.findall(r"The packages of `planner/schedule/` follow the same order: (.+)\.", section)
    assert re.findall(r"`(\w+)`", packages) == layers("schedule")


def test_the_front_page_names_the_rooms() -> None:
    assert re.findall(r"^``(\w+)`` ", (PIPELINE / "__init__.py").read_text(), re.MULTILINE) == layers("rooms")


def test_the_page_of_the_planner_names_all_of_its_face() -> None:
    """A newcomer learns it from there, name by name, and there is no more of it than one page."""
    face = ast.parse((PIPELINE / "planner" / "__init__.py").read_text())
    names = [name.asname or name.name for node in face.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(names) == sorted(re.findall(r"``(\w+)``", ast.get_docstring(face) or ""))
    assert len(names) <= 78


def test_only_code_counts_as_a_line(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        '"""A file.\n\nSaid at length.\n"""\n\n# why\nx = (\n    1,  # one\n)\n\n\ndef f():\n    """Of."""\n    return x\n'
    )
    assert len(check_lines.lines_of_code(file)) == 5
    assert list(check_lines.functions(file)) == [(2, 0)]


def test_a_budget_is_named_when_it_is_exceeded_and_only_ever_lowered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rooms = {*layers("rooms"), *(f"planner/{name}" for name in layers("planner"))} - {"planner"}
    today = dict.fromkeys([*rooms, "package", "words of docs"], 100)
    assert set(json.loads(check_lines.BUDGET.read_text())) >= today.keys()
    monkeypatch.setattr(check_lines, "counted", lambda: today)
    monkeypatch.setattr(check_lines, "BUDGET", tmp_path / "lines.json")
    budget = today | {"runtime": 97, "package": 99, "words of docs": 90, "model": 300}
    check_lines.BUDGET.write_text(json.dumps(budget))
    for arguments in [], ["--write"]:
        monkeypatch.setattr(sys, "argv", ["check_lines.py", *arguments])
        assert check_lines.main() == 1
        printed = capsys.readouterr().out
        assert "runtime: 100 lines of code, 3 more" in printed
        assert "package: 100 lines of code, 1 more" in printed
        assert "words of docs: 100, 10 more" in printed
    assert json.loads(check_lines.BUDGET.read_text()) == budget | {"model": 100}
    check_lines.BUDGET.write_text(json.dumps(today))
    assert check_lines.main() == 0


def definitions() -> Iterator[tuple[Path, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in [*PIPELINE.rglob("*.py"), *(ROOT / "patches").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield path, node


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    """Said of something else, they need the name above to be read."""
    words = ("What ", "Whether ", "How ", "Which ", "Where ", "Of ")
    assert [(path, text) for path, node in definitions() if (text := ast.get_docstring(node) or "").startswith(words)] == []


def test_a_class_has_a_name_of_its_own() -> None:
    """So that a search for it answers with one file; an underscore does not tell two apart."""
    homes = Counter(node.name.lstrip("_") for _, node in definitions() if isinstance(node, ast.ClassDef))
    assert [name for name, count in homes.items() if count > 1] == []


def test_every_folder_is_in_a_contract() -> None:
    """import-linter sees packages alone: a folder without ``__init__.py`` would escape it."""

    def packages(folder: Path) -> set[str]:
        return {part.name for part in folder.iterdir() if part.is_dir() and any(part.glob("*.py"))}

    assert packages(PIPELINE) | {"patches"} == set(layers("rooms"))
    assert packages(PIPELINE / "planner") == set(layers("planner"))
    assert packages(PIPELINE / "planner" / "schedule") == set(layers("schedule"))
    modules = [path for path in PIPELINE.rglob("*.py") if "__pycache__" not in path.parts]
    assert not {path.parent for path in modules if not (path.parent / "__init__.py").exists()}


@pytest.mark.parametrize("room", ["cli", "planner"])
def test_no_module_of_a_room_imports_torch(room: str) -> None:
    """At import time: a command of ``cli`` may import torch when it runs."""
    code = (
        f"import importlib, pkgutil, sys, megatron.pipeline.{room} as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "        assert 'torch' not in sys.modules, module.name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_tests_of_a_room_are_those_that_import_it_but_for_ranks_of_higher_ones() -> None:
    planner, runtime = (set(room_tests.tests_of(room)) for room in ("planner", "runtime"))
    assert planner >= {*ROOT.glob("tests/schedule/test_*.py"), *ROOT.glob("tests/view/test_*.py"), ROOT / "tests/cli/test_cli.py"}
    assert not planner & {*ROOT.glob("tests/launch/test_launch.py"), *ROOT.glob("tests/tune/test_search.py")}
    assert runtime >= set(ROOT.glob("tests/runtime/test_*.py")) and ROOT / "tests/cli/test_cli.py" not in runtime
