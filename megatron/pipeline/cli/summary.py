"""Text that the commands print for a person."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from megatron.pipeline.planner import SLACK, Timeline, counted, document, refusals, view


def above_bound(objective: str) -> str:
    """Name of the column for that bound: see ``planner/schedule/optimum/bound.py`` ``own_bound``."""
    return (
        f"above bound: how far the {objective} is above a proven lower bound of any order on the same placement "
        "within the same memory"
    )


def summary(data: dict[str, Any], timeline: Timeline) -> str:
    """A report as text: how long, how good, how much memory, and a drawing."""
    peaks, limit = data["peak_activation"], data.get("memory_limit")
    if isinstance(limit, (list, tuple)):
        limit = min(limit)  # an order within the lowest of them is within all of them
    unit = document.unit_of_fields(data)
    amounts = partial(_amounts, unit)
    # Of a schedule with copies the bound is that of what it holds on the device and in host memory.
    held = max(data["offload"]["peak_without"] if "offload" in data else peaks)
    kind, (bound, above) = data["objective"], _bound(data)
    rows: list[tuple[str, str, str]] = []

    def add(name: str, value: Any, meaning: str) -> None:
        rows.append((name, value if isinstance(value, str) else f"{value:g}", meaning))

    all_ranks = "from the first pass on any rank to the last"
    add("makespan", data["makespan"], f"bubble {data['bubble_rate']:.1%}, {all_ranks}")
    add("span", data["span"], f"bubble {data['span_bubble_rate']:.1%}, the longest from a rank's first pass to its last")
    order = f"no order {_within(held, unit)} has a shorter {kind} on this placement"
    add("lower bound", bound, f"{order}; this one is {above:z.1%} above")
    add("memory", *amounts(peaks))
    if "period" in data:
        rows += _period(data)
    if "balance" in data:
        split = data["balance"]
        for name, of in (("even", "the even split"), ("written", "the split as written")):
            if name == "written" and split[name] is None:
                continue
            words, value = f"{of} does not fit into the limit", split[name]
            if value is not None:
                shorter = 1 - data[kind] / value if value else 0.0
                words = f"{kind} of {of}; this one is {shorter:z.1%} shorter"
            rows.append((name, "-" if value is None else f"{value:g}", words))
        layers = f"by stage {' '.join(map(str, split['layers']))}; {split['flag']} '{split['layout']}'"
        add("layers", sum(split["layers"]), layers)
    if "batch" in data:
        rows += _batch(data, unit)
    if "shielded" in data:
        stages = " ".join(map(str, data["shielded"]))
        add("shielded", len(data["shielded"]), f"stages whose B has weight gradients behind its collectives: {stages}")
    if "overlap" in data:
        found = data["overlap"]
        share = found["exposed"] / found["communication"] if found["communication"] else 0.0
        what = "all-reduces" if data["costs"].get("F.experts") == 0 else "all-to-alls"
        words = f"{share:.0%} of the {found['communication']:g} that a rank spends in {what} (mean); {found['braids']} braids"
        add("exposed", found["exposed"], words)
    rows += _slow(data.get("slow", {}), data["costs"]["comm"]) + (_offloaded(data, unit) if "offload" in data else [])
    if limit is not None and "sustaining_limit" in data and limit < data["sustaining_limit"] * (1 - SLACK):
        why = "cannot sustain the rate: the bubble grows with every microbatch; the smallest limit that could is"
        add("limit", unit.number(limit), f"{why} {unit.amount(data['sustaining_limit'])}")
    wide = max(len(value) for _, value, _ in rows)
    chunks = f" with {data['chunks']} chunks each" if data["chunks"] > 1 else ""
    spread = f", --vocab-parallel {data['vocab_parallel']}" if data.get("vocab_parallel") else ""
    title = f"{data['schedule']}: {counted(data['pp'], 'rank')}{chunks}, {counted(data['microbatches'], 'microbatch')}{spread}"
    table = "\n".join(f"  {name:<12}{value:>{wide}}  {meaning}" for name, value, meaning in rows)
    return f"{title}\n{table}\n\n{drawing(timeline, data.get('splits', 1))}"


def _slow(slow: Mapping[str, float], hop: float) -> list[tuple[str, str, str]]:
    """Lines of a report about links that differ and ranks that are slow."""
    ranks = {name: times for name, times in slow.items() if name.startswith("rank ")}
    links = {name: seconds for name, seconds in slow.items() if name not in ranks}
    rows = ("links", links, f"whose messages do not take {hop:g}"), ("slow ranks", ranks, "in these costs")
    return [(name, str(len(found)), f"{words}: {said_slow(found)}") for name, found, words in rows if found]


def said_slow(slow: Mapping[str, float]) -> str:
    """Links and ranks that are slow, as ``Costs.slow`` has them, as text."""
    return ", ".join(f"{name} takes {much:g}{' times as long' * name.startswith('rank')}" for name, much in slow.items())


def _period(data: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Lines of a report about steady training, with what ranks do between two iterations."""
    period, rules, order = data["period"], data.get("period_by_rules"), ""
    if rules is None:  # of a file, at other costs than it was planned for
        rules, order = data["period_by_rules_of_this_order"], " of this order of passes"
    shorter = 1 - period / rules if rules else 0.0
    than = f"this one is {abs(shorter):.1%} {'longer' if shorter < 0 else 'shorter'}"
    return [
        ("period", f"{period:g}", "from an iteration's start to the next one's, with reductions, steps and gathers"),
        (
            "its bound",
            f"{data['period_lower_bound']:g}",
            f"no order has a shorter period; this one is {data['period_gap']:z.1%} above",
        ),
        ("by rules", f"{rules:g}", f"period{order} under the best of Megatron-LM's overlaps; {than}"),
    ]


def _batch(data: dict[str, Any], unit: refusals.Unit) -> list[tuple[str, str, str]]:
    """Lines of a report about unequal microbatches."""
    batch, kind, order = data["batch"], data["objective"], data["batch"]["order"]
    holds, shorter = unit.amount(max(batch["of_equal_peaks"])), 1 - data[kind] / batch["of_equal"]
    of_equal = f"{kind} of the order for equal microbatches, which holds {holds}; this one is {shorter:z.1%} shorter"
    rows = [("of equal", f"{batch['of_equal']:g}", of_equal)]
    return rows + ([("order", str(len(order)), f"of the microbatches: {' '.join(map(str, order))}")] if order else [])


def _amounts(unit: refusals.Unit, values: Sequence[float], number: str = "g") -> tuple[str, str]:
    """The most of an amount of memory, and what a report says of it and of every rank."""
    most, *by_rank = (format(value / unit.size, number) for value in (max(values), *values))
    return most, f"{f'{unit.of(most)} on the fullest rank'.strip()}; by rank {' '.join(by_rank)}"


def _bound(data: dict[str, Any]) -> tuple[float, float]:
    """The lower bound of the objective, and how far above it the schedule is."""
    makespan = data["objective"] == "makespan"
    return (data["makespan_lower_bound"], data["makespan_gap"]) if makespan else (data["lower_bound"], data["gap"])


def brief(data: dict[str, Any]) -> str:
    """A report in one line: the schedule, its length, and its memory."""
    chunks = f" with {data['chunks']} chunks" if data["chunks"] > 1 else ""
    kind = data["objective"]
    length = f"{kind} {data[kind]:g}, {_bound(data)[1]:z.1%} above the lower bound"
    return f"{data['schedule']}{chunks}, {length}; memory {document.unit_of_fields(data).amount(max(data['peak_activation']))}"


def _offloaded(data: dict[str, Any], unit: refusals.Unit) -> list[tuple[str, str, str]]:
    """Lines of a report about a schedule with copies to host memory."""
    offload = data["offload"]
    mode = f", --offload {offload['mode']}" if offload["mode"] else ""
    longer = data["span"] / offload["span_without"] - 1 if offload["span_without"] else 0.0

    def amounts(name: str) -> tuple[str, str]:
        return _amounts(unit, offload[name], number)

    number = "g" if unit is refusals.MIB else ".4g"
    per_iteration = f" {unit.name.strip()} per iteration" if unit.name else " per iteration"
    (most, by_rank), moved = amounts("peak_without"), " ".join(format(value / unit.size, number) for value in offload["moved"])
    return [
        ("host memory", *amounts("host_peak")),
        ("moved", f"{mean(offload['moved_share']):.1%}", f"of all activations; by rank {moved}{per_iteration}"),
        ("k", f"{offload['k']:.3g}", f"time of D2H and H2D over that of F, B and W, per microbatch of a rank{mode}"),
        ("without", most, f"{by_rank}; span {offload['span_without']:g}, this one is {longer:z.1%} longer"),
    ]


def drawing(timeline: Timeline, splits: int = 1) -> str:
    """A timeline as text, as wide as the terminal."""
    return view.render(timeline, shutil.get_terminal_size().columns, splits=splits)


def _within(memory: float, unit: refusals.Unit) -> str:
    """``within 4 microbatches``: the words for a limit of memory."""
    return f"within {'' if unit.name else 'a memory of '}{unit.amount(memory)}"


def write(data: dict[str, Any], text: Callable[[], str], options: argparse.Namespace, brief: str = "") -> None:
    """Print a report or write it to ``--output``: as JSON with ``--json`` or into a .json file, else as text.

    Args:
        brief: what to say of it on the terminal where it goes to a file.
    """
    as_json = options.json or (options.output and Path(options.output).suffix == ".json")
    content = json.dumps(data) if as_json else text()
    if options.output:
        Path(options.output).write_text(content + "\n", encoding="utf-8")
        wrote(options.output, brief)
    else:
        print(content)


def check_output(options: argparse.Namespace, drawn: bool = False) -> None:
    """Refuse to ``write`` a report into a file that is named as if it were something else, before any work is done.

    Args:
        drawn: whether the command draws, too, and ``mpipe export`` reads the report.

    Raises:
        ValueError: the file is not named .json or .txt, or its directory is not there.
    """
    path = options.output
    _check_directory(path)
    if path and (Path(path).suffix not in (".json", ".txt") or path.endswith(".trace.json")):
        others = (
            "; --draw writes .png, .svg, .pdf and .html, --trace writes .trace.json, and mpipe export makes a .csv of a .json"
        )
        raise ValueError(f"cannot write {path}: the file name must end in .json or .txt{others if drawn else ''}")


def check_suffix(path: str | None, suffixes: Sequence[str]) -> str | None:
    """The suffix of a file to write, if there is one to write.

    Raises:
        ValueError: it is not one of those, or the file's directory is not there.
    """
    _check_directory(path)
    if path is None:
        return None
    for suffix in suffixes:
        if path.endswith(suffix):
            return suffix
    *others, last = suffixes
    allowed = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(f"cannot write {path}: the file name must end in {allowed}")


def _check_directory(path: str | None) -> None:
    if path and not Path(path).parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no directory {Path(path).parent}")


def wrote(path: str, brief: str = "") -> None:
    """Say that a file is there now, and in brief what is in it."""
    print(f"wrote {path}: {brief}" if brief else f"wrote {path}")
