"""Check that no room has more lines of code, and no page more words, than scripts/lines.json says.

    python scripts/check_lines.py            what has more; exit code 1 if anything has
    python scripts/check_lines.py --write    lower the file's numbers to today's; it never raises one

Docstrings, comments and blank lines do not count. ``package`` is the sum of all rooms: it falls, or a commit of its own raises it
by hand and says who asked for it. So do the lines of the longest function, and the parameters of the one with the most.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "scripts" / "lines.json"
BESIDE = ("patches", "benchmarks", "scripts", "tests")  # of them the package has patches alone
WORDS = {"words of docs": "docs/**/*.md", "words of README": "README.md"}
LONGEST, MOST = "lines of the longest function", "parameters of the function with the most"
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
    return found | {name: ROOT / name for name in BESIDE}


@cache
def lines_of_code(path: Path) -> set[int]:
    """Lines of a Python file on which there is code."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type not in _NO_CODE]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return lines.difference(_docstrings(ast.parse(path.read_bytes())))


def functions(path: Path) -> Iterator[tuple[int, int]]:
    """Lines of code and parameters, but self, of the functions of a Python file."""
    lines = lines_of_code(path)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))), len({*names} - {"self", "cls"})


def _docstrings(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def counted() -> dict[str, int]:
    """Lines of code by room, their sum in the package, its longest function, and words of pages."""
    found = {name: sum(len(lines_of_code(path)) for path in folder.rglob("*.py")) for name, folder in rooms().items()}
    own = [name for name in found if name not in BESIDE[1:]]
    package = sum(found[name] for name in own)
    files = [path for name in own for path in rooms()[name].rglob("*.py")]
    lines, parameters = zip(*(each for path in files for each in functions(path)), strict=True)
    words = {name: sum(len(path.read_text(encoding="utf-8").split()) for path in ROOT.glob(at)) for name, at in WORDS.items()}
    return {"package": package} | found | {LONGEST: max(lines), MOST: max(parameters)} | words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the file's numbers to today's")
    write = parser.parse_args().write
    found, budget = counted(), json.loads(BUDGET.read_text(encoding="utf-8"))
    if write:
        rounded = {name: count if name in (LONGEST, MOST) else -(-count // 20) * 20 for name, count in found.items()}
        budget = {name: min(count, budget.get(name, count)) for name, count in rounded.items()}
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n", encoding="utf-8")
    over = {name: count for name, count in found.items() if count > budget.get(name, 0)}
    for name, count in over.items():
        unit = "" if " of " in name else " lines of code"
        print(f"{name}: {count}{unit}, {count - budget.get(name, 0)} more than the budget: take some out, or raise it in")
        print("scripts/lines.json, in a commit of its own that says who asked for it")
    print(f"{found['package']} lines of code in the package")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
