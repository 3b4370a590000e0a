"""Few rows in which every two values of different columns meet, for tests of what would take days in all combinations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

Columns = Mapping[str, Sequence[str]]
Value = tuple[str, str]  # a column and one of its values
Row = dict[str, str]


def excluded(pair: Collection[Value], never: Collection[frozenset[Value]]) -> bool:
    return any(two <= set(pair) for two in never)


def pairs(columns: Columns, never: Collection[frozenset[Value]]) -> set[frozenset[Value]]:
    """All two values of different columns that may meet."""
    values = [(name, value) for name in columns for value in columns[name]]
    meeting = (frozenset(two) for two in combinations(values, 2) if two[0][0] != two[1][0])
    return {two for two in meeting if two not in never}


def rows(columns: Columns, never: Collection[frozenset[Value]]) -> list[Row]:
    """Rows that contain every pair but those of ``never``, always the same ones.

    Every row begins with a pair that is still missing and takes, column after column, the value that brings most missing pairs.

    Raises:
        ValueError: a pair is in no row because of pairs that never meet; it belongs to ``never``, too.
    """
    missing = pairs(columns, never)
    found: list[Row] = []
    while missing:
        row = dict(min(missing, key=sorted))
        for name in sorted(columns, key=lambda name: -len(columns[name])):
            allowed = [one for one in columns[name] if not excluded([*row.items(), (name, one)], never)]
            if name not in row:
                if not allowed:
                    raise ValueError(f"no {name} goes with {row}")
                row[name] = max(allowed, key=lambda one: _brings(row, (name, one), missing))
        missing -= {frozenset(two) for two in combinations(row.items(), 2)}
        found.append({name: row[name] for name in columns})
    return found


def covering(found: Sequence[Row], never: Collection[Value], costs: Sequence[float]) -> list[int]:
    """The numbers of a few cheap rows that together have every value that any row without one of ``never`` has."""
    possible = {number: set(row.items()) for number, row in enumerate(found) if not set(row.items()) & set(never)}
    every = set[Value]().union(*possible.values())
    missing, chosen = set(every), set[int]()
    while missing:
        best = max(possible, key=lambda number: len(possible[number] & missing) ** 2 / costs[number])
        chosen.add(best)
        missing -= possible[best]
    for number in sorted(chosen, key=lambda number: -costs[number]):  # one that later ones have made superfluous
        others = set[Value]().union(*(possible[other] for other in chosen - {number}))
        if others == every:
            chosen.remove(number)
    return sorted(chosen)


def _brings(row: Row, value: Value, missing: Collection[frozenset[Value]]) -> int:
    return sum(frozenset((value, other)) in missing for other in row.items())
