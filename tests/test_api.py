"""docs/api.md lists the public names: those in ``__all__`` of the modules that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text()


def listed() -> dict[str, set[str]]:
    """From a module to the names under its heading: all that stand before the colon of a line."""
    modules = {}
    for section in PAGE.split("### ")[1:]:
        module, lines = re.fullmatch(r"`([\w.]+)`\n(.*?)(?:\n## .*)?", section, re.DOTALL).groups()  # type: ignore[union-attr]
        modules[module] = {
            name for line in re.findall(r"^- (.+?): ", lines, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
        }
    return modules


def exported(module: str) -> set[str]:
    path = ROOT / module.replace(".", "/").replace("megatron/pipeline/patches", "patches")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(file.read_text())
    [names] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__"
    ]
    return set(ast.literal_eval(names))


@pytest.mark.parametrize("module", listed())
def test_the_page_has_what_a_module_exports(module: str) -> None:
    assert listed()[module] == exported(module)


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) < 700 and len(listed()) >= 15


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "megatron" / "pipeline" / "py.typed").exists() and '"py.typed"' in (ROOT / "setup.py").read_text()
