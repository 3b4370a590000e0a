"""Whatever ``mpipe`` is given, it answers: a schedule that obeys every rule, or one line and exit code 2. It never hangs."""

import contextlib
import copy
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.cli import main
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.rules.verify import verify

NASTY = ["", "0", "-1", "nan", "inf", "-inf", "1e400", "9" * 30, "x", "1.5", "=", ",", "--", "ä\ud800", "\0", "1_0", "F=1", "all"]
NUMBERS = ["0", "1", "0.3", "2.5", "1e-100", "1e100", "1e-9"]
STAGES = st.sampled_from(["all", "0", "0,1", "1-2", "2-1", "0-9999999999999", *NASTY])


def named(*names: str) -> st.SearchStrategy[str]:
    number = st.sampled_from([*NUMBERS, *NUMBERS, *NASTY])
    items = st.builds("{}={}".format, st.sampled_from([*names, *names, "X"]), number)
    return st.one_of(st.lists(items, min_size=1, max_size=4).map(",".join), st.sampled_from(NASTY))


def small(most: int) -> st.SearchStrategy[str]:
    return st.one_of(st.integers(1, most).map(str), st.integers(1, most).map(str), st.sampled_from(NASTY))


FLAGS: dict[str, st.SearchStrategy[str]] = {
    "--cost": named("F", "B", "W", "comm", "BW", "R", "D2H", "H2D"),
    "--copy": named("both", "switch", "shared"),
    "--activation": named("B", "W", "R"),
    "--first-stage": named("F", "B", "W", "activation"),
    "--last-stage": named("F", "B", "W", "activation"),
    "--memory-limit": st.sampled_from([*NUMBERS, "3", "4", "6", "12", *NASTY]),
    "--objective": st.sampled_from(["span", "makespan", *NASTY]),
    "--costs": st.sampled_from(["/", "/nowhere", *NASTY]),
}
OFFLOAD: dict[str, st.SearchStrategy[str]] = {
    "--offload": st.sampled_from(["off", "selective", "full", *NASTY]),
    "--host-memory-limit": st.sampled_from([*NUMBERS, "3", *NASTY]),
}
PLAN_FLAGS = {
    **FLAGS,
    **OFFLOAD,
    "--chunks": small(4),
    "--splits": small(3),
    "--group": small(5),
    "--recompute": STAGES,
    "--fuse": STAGES,
    "--balance": st.sampled_from(["5", "9", "16", *NASTY]),
}
COMPARE_FLAGS = {
    **FLAGS,
    **OFFLOAD,
    "--chunks": st.lists(small(4), min_size=1, max_size=2).map(",".join),
    "--schedules": st.lists(st.sampled_from(list(families.FAMILIES)), min_size=1, max_size=2).map(",".join),
}


@st.composite
def flags(draw: st.DrawFn, table: dict[str, st.SearchStrategy[str]], most: int = 4) -> list[str]:
    chosen = draw(st.lists(st.sampled_from(sorted(table)), max_size=most, unique=True))
    return [part for name in chosen for part in (name, draw(table[name]))]


def run(*arguments: str) -> tuple[int, str]:
    """The exit code and stdout, after checking that a refusal is one line and nothing else, and that it took no time."""
    out, err = io.StringIO(), io.StringIO()
    signal.signal(signal.SIGPROF, lambda *_: pytest.fail(f"{arguments} took 10 seconds of computation"))
    signal.setitimer(signal.ITIMER_PROF, 10)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    assert code in (0, 2)
    if code == 2:
        assert out.getvalue() == ""
        assert err.getvalue().startswith("mpipe: ")
        assert err.getvalue().count("\n") == 1
    else:
        assert err.getvalue() == ""
    return code, out.getvalue()


def check(text: str) -> dict[str, Any]:
    """What was printed is strict JSON of a schedule that obeys every rule, at the costs and the limit that it names."""
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    schedule = Schedule.from_json(text)
    costs = Costs.from_fields(data["stage_costs"]) if "stage_costs" in data else None
    verify(schedule)
    if "memory_limit" in data:
        assert max(data["peak_activation"]) <= data["memory_limit"] * (1 + 1e-9)
        if costs is not None:
            verify(schedule, costs, data["memory_limit"])
    assert -1e-9 <= data["span_bubble_rate"] <= data["bubble_rate"] + 1e-9
    assert data["makespan_bubble_rate"] == data["bubble_rate"], "by its older name"
    assert data["gap"] >= -1e-9
    assert data["makespan_gap"] >= -1e-9
    return data


@examples(130)
@given(st.sampled_from([*families.FAMILIES, "", "file:x", "zb"]), small(5), small(6), flags(PLAN_FLAGS))
def test_plan_answers_any_arguments(name: str, ranks: str, microbatches: str, more: list[str]) -> None:
    code, text = run("plan", "--schedule", name, "--pp", ranks, "--microbatches", microbatches, *more, "--json")
    if code == 0:
        data = check(text)
        assert (data["schedule"], data["pp"], data["microbatches"]) == (name, int(ranks), int(microbatches))


@examples(20)
@given(small(4), small(5), flags(COMPARE_FLAGS))
def test_compare_answers_any_arguments(ranks: str, microbatches: str, more: list[str]) -> None:
    code, text = run("compare", "--pp", ranks, "--microbatches", microbatches, *more, "--json")
    if code == 0:
        rows = json.loads(text)["schedules"]
        values = [row[json.loads(text)["objective"]] for row in rows]
        assert values == sorted(values)


@examples(10)
@given(small(3), small(3), flags(PLAN_FLAGS, most=2))
def test_auto_answers_any_arguments(ranks: str, microbatches: str, more: list[str]) -> None:
    few = [] if "--chunks" in more else ["--chunks", "2"]
    code, text = run("plan", "--schedule", "auto", "--pp", ranks, "--microbatches", microbatches, *few, *more, "--json")
    if code == 0:
        data = check(text)
        (best,) = (row for row in data["candidates"] if row["why_not"] is None)
        assert (best["schedule"], best["span"], best["memory"]) == (data["schedule"], data["span"], max(data["peak_activation"]))


@examples(100)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["plan", "simulate", "verify", "draw", "compare", "export", "--draw", "-o", "--json", "--pp", "--memory"]
            ),
            st.sampled_from([*PLAN_FLAGS, *NASTY]),
            st.text(max_size=5),
        ),
        max_size=6,
    )
)
def test_any_words_are_answered(words: list[str]) -> None:
    run(*(word for word in words if not word.startswith("-h")))


def valid(flags: str) -> dict[str, Any]:
    return json.loads(run(*f"plan --pp 2 --microbatches 3 --json {flags}".split())[1])


VALID = valid("--schedule zb-h1 --last-stage F=1 --memory-limit 9")
AWAY = valid("--schedule interleaved --offload full --cost D2H=0.1 --copy both=0.8 --host-memory-limit 9")
VALUES: list[Any] = [None, True, -1, 0, 1, 2, 10**30, 1.5, 1e300, float("nan"), "", "F0.0", "W9.9", "makespan", [], [[]], {}, [0]]


@st.composite
def damaged(draw: st.DrawFn, whole: Any = VALID) -> bytes:
    """A file, by default a schedule's, with a few values replaced, removed, doubled or swapped, and then perhaps a few bytes."""
    data = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(0, 3))):
        place, key = data, draw(st.sampled_from(sorted(data)))
        while isinstance(place[key], list | dict) and place[key] and draw(st.booleans()):
            place = place[key]
            key = draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        action = draw(st.sampled_from(["replace", "remove", "double", "swap"]))
        if action == "replace":
            place[key] = copy.deepcopy(draw(st.sampled_from(VALUES)))  # what follows may change a list in its place
        elif action == "remove" and len(place) > 1:
            del place[key]
        elif action == "double" and isinstance(place, list):
            place.insert(key, place[key])
        elif action == "swap" and isinstance(place, list):
            place[key], place[0] = place[0], place[key]
    text = json.dumps(data).encode()
    for _ in range(draw(st.sampled_from([0, 0, 1, 5]))):
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + draw(st.binary(max_size=2)) + text[at + draw(st.integers(0, 3)) :]
    return text


@examples(130)
@given(st.one_of(damaged(), damaged(AWAY)), flags(FLAGS, most=1))
def test_any_damage_to_a_file_is_answered(tmp_path: Path, content: bytes, more: list[str]) -> None:
    path = tmp_path / "schedule.json"
    path.write_bytes(content)
    verified, text = run("plan", str(path), *more, "--json")
    if verified == 0:
        check(text)
        # What runs is what the file says: every pass of it, in its order.
        assert json.loads(text)["passes"] == json.loads(content)["passes"]
        assert run("plan", str(path), *more, "--text")[0] == 0


@st.composite
def damaged_table(draw: st.DrawFn) -> str:
    rows = [row.split(",") for row in "0F0,0F1,,0B0,0W0,0B1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1,".split("\n")]
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        at = draw(st.integers(0, len(row) - 1))
        row[at : at + draw(st.integers(0, 1))] = draw(
            st.sampled_from(
                [[], [""], ["0F0"], ["1B1"], ["9W9"], ["0F" + "9" * 30], ["x"], ['"'], ["\n"], ["(0F1;1B0)OVERLAP_F_B"]]
            )
        )
    return "\n".join(map(",".join, rows)) + draw(st.sampled_from(["", "\n", ",", "\n\n", '"', "\0", "ä\n"]))


@examples(100)
@given(damaged_table(), st.sampled_from([[], ["--cost", "F=2,comm=0.5"], ["--memory-limit", "1"]]))
def test_any_damage_to_a_table_is_answered(tmp_path: Path, content: str, more: list[str]) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(content)
    verified, text = run("plan", str(path), *more, "--json")
    if verified == 0:
        check(text)


RECORDED = {
    "ranks": [[["F0.0", 100.5, 101.5], ["B0.0", 101.5, 103], ["W0.0", 103, 103]], [["F0.0", 101.5, 102], ["BW0.0", 102, 104]]]
}


@examples(80)
@given(damaged(RECORDED), st.sampled_from(["report", "text", "csv", "trace", "json", "svg", "html"]))
def test_any_damage_to_a_recorded_timeline_is_answered(tmp_path: Path, content: bytes, use: str) -> None:
    path, output = tmp_path / "recorded.json", tmp_path / f"output.{'trace.json' if use == 'trace' else use}"
    path.write_bytes(content)
    output.unlink(missing_ok=True)
    if use in ("report", "text"):
        code, _ = run("plan", str(path), *(["--json"] if use == "report" else []))
        assert code == 2 or use == "text", "a timeline is no schedule"
        return
    code, text = (
        run("plan", str(path), "--draw", str(output)) if use in ("svg", "html") else run("export", str(path), "-o", str(output))
    )
    assert text == (f"wrote {output}\n" if code == 0 else "")
    assert output.exists() == (code == 0)
    if code == 0 and use == "trace":
        json.loads(output.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
