"""Check that no room has more lines of code than scripts/lines.json says; docstrings, comments and blank lines do not count.

python scripts/check_lines.py            the rooms that have more; exit code 1 if there are any
python scripts/check_lines.py --write    write today's lines into the file: the commit says why a number grew
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "scripts" / "lines.json"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def rooms() -> dict[str, Path]:
    """The folders that are counted, by name: every room of the package, and what lies beside it."""
    package = ROOT / "megatron" / "pipeline"
    folders = [*sorted((package / "planner").iterdir()), *sorted(package.iterdir())]
    found = {str(each.relative_to(package)): each for each in folders if any(each.glob("**/*.py")) and each.name != "planner"}
    return found | {name: ROOT / name for name in ("patches", "benchmarks", "scripts", "tests")}


def lines_of_code(path: Path) -> int:
    """Lines of a Python file on which there is code."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(lines.difference(_docstrings(ast.parse(path.read_bytes()))))


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def counted() -> dict[str, int]:
    return {name: sum(map(lines_of_code, folder.rglob("*.py"))) for name, folder in rooms().items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write today's lines into the file")
    write = parser.parse_args().write
    found = counted()
    if write:
        rounded = {name: -(-count // 20) * 20 for name, count in found.items()}  # so that a line or two need no new number
        BUDGET.write_text(json.dumps(rounded, indent=1) + "\n", encoding="utf-8")
    budget = json.loads(BUDGET.read_text(encoding="utf-8"))
    over = {name: count for name, count in found.items() if count > budget.get(name, 0)}
    for name, count in over.items():
        print(f"{name} has {count} lines of code, {count - budget.get(name, 0)} more than its budget: take some out, or change")
        print(f"scripts/lines.json (python scripts/check_lines.py --write) and say in the commit why {name} grew")
    print(f"{sum(found[name] for name in found if name not in ('benchmarks', 'scripts', 'tests'))} lines of code in the package")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
