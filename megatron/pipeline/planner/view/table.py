"""Tables as plain text: columns under their heads."""

from __future__ import annotations

from collections.abc import Sequence


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: int = 0) -> str:
    """Columns under their heads: the first and the last ``words`` ones to the left, numbers to the right."""
    lines = (heads, *rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = {0, *range(len(heads) - words, len(heads))}

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column in left else text.rjust(widths[column])

    return "\n".join("  ".join(map(cell, range(len(heads)), line)).rstrip() for line in lines)
