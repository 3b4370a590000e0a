"""Costs as a person or a program has written them, read and checked: the fields of ``Costs``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.pipeline.planner.schedule.core import link_costs
from megatron.pipeline.planner.schedule.core.link_costs import LinkCosts
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.stage_costs import (
    COST_FIELDS,
    PARTS,
    CopyCosts,
    CostOf,
    MemoryUnit,
    StageCosts,
    VocabularyCosts,
)

# The range keeps sums and ratios of costs, over any number of passes, within what a float can hold.
COST_RANGE = "0 or between 1e-100 and 1e100"
MOST_RANKS = 4096  # of a pipeline
MOST_LAYERS = 1000  # of a rank: a braid is computed layer by layer
_MAY_FOLLOW = {field.name for field in fields(StageCosts) if field.default is None}  # from other costs, where they are None
_SHARED = {field.name: field.default or 0.0 for field in COST_FIELDS if field.of is CostOf.ALL}


def read(data: object, cut: bool) -> dict[str, Any]:
    """The arguments of ``Costs`` from the object that ``Costs.from_json`` reads.

    Args:
        cut: whether a stage may have a part of a layer, as a chunk of a rank that has 5 layers and 2 chunks.

    Raises:
        ValueError: a field is missing, unknown, no number, or a number out of range; the stage is named.
    """
    rows = data.get("stages") if isinstance(data, dict) else None
    many = {"stages", "loads", "links"}
    known = {"unit", "vocabulary", "copies", *many, *_SHARED, "at_once", "pattern", "of"}  # of: of which training
    if not isinstance(data, dict) or not isinstance(rows, list) or not rows or not data.keys() <= known:
        raise ValueError('not costs: expected {"hop": .., "stages": [{"forward": .., "backward": .., "weight": ..}, ..]}')
    stages = []
    for index, row in enumerate(rows):
        _check_row(f"stage {index}", row, cut)
        given: dict[str, Any] = {name: value if value is None else float(value) for name, value in row.items()}
        stages.append(StageCosts(**{"retained": given.get("activation", 1.0), "recompute": given["forward"], **given}))
    shared = {name: data.get(name, default) for name, default in _SHARED.items()}
    for name, value in shared.items():
        _check_number(name, value)
    unit = data.get("unit")
    if unit not in (None, *MemoryUnit):
        raise ValueError(f"unit: expected {' or '.join(MemoryUnit)}, what memory is counted in, got {unit!r}")
    if (at_once := data.get("at_once", False)) not in (False, True):
        raise ValueError(f"at_once: expected true or false, whether ranks step all weights in one piece, got {at_once!r}")
    pattern = data.get("pattern", "")
    if not isinstance(pattern, str) or (pattern and len(pattern.split("/")[0]) + 2 != len(stages)):
        raise ValueError(f"pattern: expected a letter for each of {len(stages)} stages but the ends, got {pattern!r}")
    numbers = {name: float(value) for name, value in shared.items()} | {"at_once": bool(at_once), "pattern": pattern}
    loads = _loads(data.get("loads", []))
    lists = {"stages": tuple(stages), "loads": loads, "links": _links(data.get("links", {}))}
    return lists | {"unit": unit and MemoryUnit(unit)} | numbers | _shared(data)


def is_cost(value: object) -> bool:
    """Tell whether what a user gives can be seconds or bytes: a number in ``COST_RANGE``."""
    return isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or 1e-100 <= value <= 1e100)


def is_layers(number: float, cut: bool = False) -> bool:
    """Tell whether there can be this number of layers."""
    return 0 < number <= MOST_LAYERS and (cut or number == int(number))


def _check_row(where: str, row: object, cut: bool) -> None:
    allowed = [field.name for field in fields(StageCosts)]
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected the costs of the stage by name, got {row!r}")
    missing = [name for name in allowed[:3] if name not in row]
    unknown = [name for name in row if name not in allowed]
    if missing or unknown:
        problem = f"missing {', '.join(missing)}" if missing else f"unknown cost {unknown[0]!r}"
        raise ValueError(f"{where}: {problem}; costs of a stage are {', '.join(allowed)}")
    parts = [name for name in PARTS if row.get(name) is not None]
    if parts and len(parts) < len(PARTS):
        left_out = ", ".join(name for name in PARTS if name not in parts)
        change = "give all parts of the layers (0 for what there is none of), or none"
        raise ValueError(f"{where}: {', '.join(parts)} without {left_out}: {change}")
    for name, value in row.items():
        if not (value is None and name in _MAY_FOLLOW):
            _check_number(f"{where}: {name}", value)
    layers = row.get("layers")  # none on a stage that has the embedding or the output layer alone
    if layers and not is_layers(layers, cut):
        raise ValueError(f"{where}: layers must be a whole number from 0 to {MOST_LAYERS}, got {layers!r}")


def _loads(rows: object) -> tuple[Load, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(Load._fields) for row in rows):
        raise ValueError(f"loads: expected [{', '.join(Load._fields)}] for every microbatch, got {rows!r:.40}")
    for value in (value for row in rows for value in row):
        _check_number("loads", value)
    return tuple(Load(*map(float, row)) for row in rows)


def _links(data: object) -> tuple[LinkCosts, ...]:
    if not isinstance(data, dict):
        raise ValueError(f'links: expected seconds by link, such as {{"2-3": 0.06}}, got {data!r:.40}')
    named: list[tuple[str, float, float]] = []
    for name, value in data.items():
        given = value if isinstance(value, list) else [value]
        if not 1 <= len(given) <= 2:
            raise ValueError(f"link {name}: expected seconds, or [seconds, latency], got {value!r:.40}")
        for number in given:
            _check_number(f"link {name}", number)
        named.append((name, given[-1], given[0] if len(given) > 1 else 0.0))
    return link_costs.read_all(named)


def _shared(data: dict[str, Any]) -> dict[str, Any]:
    """The costs that are not of one stage."""
    costs: dict[str, Any] = {}
    for what, kind in (("vocabulary", VocabularyCosts), ("copies", CopyCosts)):
        row, allowed = data.get(what, {}), [field.name for field in fields(kind)]
        if not isinstance(row, dict) or not row.keys() <= set(allowed):
            raise ValueError(f"{what}: expected costs by name, of {', '.join(allowed)}, got {row!r}")
        for name, value in row.items():
            _check_number(f"{what}: {name}", value)
        if (ranks := row.get("ranks")) is not None and not (ranks == int(ranks) and 1 <= ranks <= MOST_RANKS):
            raise ValueError(f"{what}: ranks is how many have a share each, from 1 to {MOST_RANKS}, got {ranks!r}")
        numbers: dict[str, Any] = {name: value if name == "switch" else float(value) for name, value in row.items()}
        costs[what] = kind(**numbers)
    return costs


def _check_number(name: str, value: object) -> None:
    if not is_cost(value):
        raise ValueError(f"{name} must be a number, {COST_RANGE}, got {value!r}")
