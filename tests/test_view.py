"""Pictures, pages and text of timelines."""

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline import planning
from megatron.pipeline.schedule.core.costs import CopyCosts, Costs, StageCosts, uniform
from megatron.pipeline.schedule.core.passes import Kind, Pass
from megatron.pipeline.schedule.core.placement import v
from megatron.pipeline.schedule.core.schedule import Schedule
from megatron.pipeline.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.schedule.time.simulate import activation_changes, activation_peaks, activation_profile, simulate
from megatron.pipeline.schedule.transforms.transform import recompute
from megatron.pipeline.view import Entry, Point, draw, draw_pareto, draw_robustness, page, render, write_page
from megatron.pipeline.view.chrome_trace import to_trace
from megatron.pipeline.view.plots import label_places, pareto
from megatron.pipeline.view.style import COLOURS, ink, number, shade, with_whole_braids


def timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    schedule = planning.plan(name, ranks, microbatches)
    return simulate(schedule, uniform(schedule.placement))


def test_text_by_hand() -> None:
    assert render(timeline("1f1b", 2, 2), width=100).splitlines() == [
        "rank 0 F0--------F1--------....................BW0=================..........BW1=================",
        "rank 1 ..........F0--------BW0=================F1--------BW1=================....................",
    ]


def test_text_without_room_for_numbers_keeps_the_kinds() -> None:
    lines = render(timeline("zb-h1", 2, 4), width=20).splitlines()
    assert lines == ["rank 0 FF.BWFBWFBWBW", "rank 1 .FBFBWFBWFBWW"]
    assert all(len(line) <= 40 for line in render(timeline("1f1b", 16, 200), width=40).splitlines())


def test_text_names_chunks_if_there_are_several() -> None:
    passes = [Pass(Kind.F, 0, 0), Pass(Kind.F, 0, 1), Pass(Kind.BW, 0, 1), Pass(Kind.BW, 0, 0)]
    schedule = Schedule("v", v(1), 1, (tuple(passes),))
    assert render(simulate(schedule, uniform(schedule.placement)), width=43) == "rank 0 F0.0--F0.1--BW0.1=======BW0.0======="[:43]


@pytest.mark.parametrize("empty", [Timeline(((), ())), Timeline(((Timed(Pass(Kind.F, 0), 3, 3),),))])
def test_timelines_without_length_are_drawn(empty: Timeline, tmp_path: Path) -> None:
    assert render(empty).startswith("rank 0")
    draw({"empty": empty}, tmp_path / "empty.png")


def test_a_picture_names_every_panel_and_number(tmp_path: Path) -> None:
    schedule = planning.plan("zb-h1", 2, 3)
    costs = uniform(schedule.placement)
    planned = simulate(schedule, costs)
    shifted = Timeline(tuple(tuple(Timed(work, start + 100, end + 100) for work, start, end in rank) for rank in planned.ranks))
    path = tmp_path / "picture.svg"
    memory = {"planned": activation_profile(schedule, planned, costs)}
    draw({"planned": planned, "measured": shifted}, path, memory, unit="ms")
    text = path.read_text()
    for label in ("planned", "measured", "span 10, bubble 10.0%", "time (ms)", "rank 1", "memory", "B  backward, input"):
        assert f"<!-- {label} -->" in text
    assert "BW  backward" not in text
    assert text.count("<!-- 2 -->") >= 2 * 2 * 3  # microbatch 2 of every rank and kind, in both panels


@pytest.mark.parametrize("kind", COLOURS)
def test_numbers_are_legible_on_every_colour(kind: Kind) -> None:
    """Black digits once stood on dark blue. WCAG asks for a contrast of at least 3 for large or bold text."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for chunk in range(4):
        colour = shade(COLOURS[kind], chunk, 4)
        low, high = sorted((luminance(colour), luminance(ink(colour))))
        assert (high + 0.05) / (low + 0.05) > 3


def test_a_wide_picture_leaves_the_numbers_out(tmp_path: Path) -> None:
    path = tmp_path / "wide.svg"
    draw({"1f1b": timeline("1f1b", 4, 150)}, path)
    assert "<!-- 149 -->" not in path.read_text()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({}, tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw({"x": timeline("1f1b", 1, 1)}, tmp_path / "x.jpeg")


def test_every_kind_has_a_colour_and_a_meaning_of_its_own() -> None:
    for table in (COLOURS, {kind: kind.row.meaning for kind in Kind}):
        assert set(table) == set(Kind) and len(set(table.values())) == len(Kind)
    assert len({shade(colour, chunk, 4) for colour in COLOURS.values() for chunk in range(4)}) == 4 * len(Kind)


def test_slices_have_letters() -> None:
    assert [number(Pass(Kind.F, n), 2) for n in range(4)] == ["0a", "0b", "1a", "1b"]
    assert [number(Pass(Kind.F, n), 100) for n in (25, 26, 52, 199)] == ["0z", "0aa", "0ba", "1cv"]
    assert number(Pass(Kind.F, 7)) == "7"
    sliced = timeline("1f1b", 2, 4)
    assert "F1b" in render(sliced, splits=2) and "F3" not in render(sliced, splits=2)


def offloaded() -> tuple[Schedule, Costs]:
    """1F1B on 2 ranks, whose first one has its first two microbatches in host memory for a while."""
    plain = planning.plan("1f1b", 2, 3)
    rows = ["F0.0 F1.0 D2H0.0 D2H1.0 H2D0.0 BW0.0 F2.0 H2D1.0 BW1.0 BW2.0", " ".join(map(str, plain.passes[1]))]
    passes = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    costs = uniform(plain.placement, forward=4, backward=4, weight=4)
    return replace(plain, passes=passes), replace(costs, copies=CopyCosts(to_host=4, to_device=2))


def test_text_has_lanes_for_copies() -> None:
    drawn = simulate(*offloaded())
    lines = render(drawn, width=60).splitlines()
    assert [line[:7] for line in lines] == ["rank 0 ", " D2H   ", " H2D   ", "rank 1 ", " D2H   ", " H2D   "]
    assert [line[7:] for line in lines[:3]] == [
        "F0--F1--........BW0=====F2--..BW1=====..BW2=====",
        "....>0-->1--....................................",
        "............<0..............<1..................",
    ]
    assert render(drawn, width=20).splitlines()[1][7:].strip(".") == ">>"
    folded = render(Timeline(drawn.ranks * 20, drawn.copies * 20), height=24).splitlines()
    assert len(folded) <= 24 and "... 34 ranks more" in folded


def test_pictures_have_lanes_for_copies(tmp_path: Path) -> None:
    schedule, costs = offloaded()
    drawn = simulate(schedule, costs)
    for name, one in (("boxes", drawn), ("columns", Timeline(drawn.ranks, drawn.copies))):
        draw({name: one}, tmp_path / f"{name}.svg")
        text = (tmp_path / f"{name}.svg").read_text()
        assert "<!-- D2H  copy to host memory -->" in text and "<!-- H2D  copy to the device -->" in text
        assert text.count("#882255") > 1 and text.count("#332288") > 1  # not in the legend only


def test_a_trace_has_threads_for_copies() -> None:
    schedule, costs = offloaded()
    events = to_trace(simulate(schedule, costs), schedule, costs)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == ["rank 0", "rank 0 D2H", "rank 0 H2D", "rank 1", "rank 1 D2H", "rank 1 H2D"]
    found = {(names[event["tid"]], event["name"], event["dur"]) for event in events if event.get("cat") in ("D2H", "H2D")}
    assert found == {(f"rank 0 {kind}", f"{kind}{n}.0", 1e6 * time) for kind, time in (("D2H", 4), ("H2D", 2)) for n in (0, 1)}


def test_text_that_is_cut_says_so() -> None:
    drawn = timeline("zb-h2", 8, 30)
    lines = render(drawn, width=80).splitlines()
    assert all(" ... " in line for line in lines[:8])
    assert lines[0].startswith("rank 0 FFFFFFFFFFFFFFFB") and lines[7].endswith("WWW")
    note = " ".join(lines[8:])
    parts = re.fullmatch(r"left out: time (\S+) to (\S+) of 97; (\d+) of 720 passes", note)
    assert parts
    begin, end = float(parts[1]), float(parts[2])
    hidden = sum(timed.start >= begin and timed.end <= end for rank in drawn.ranks for timed in rank)
    assert hidden == int(parts[3]) > 0


def test_text_that_cuts_through_a_pass_says_so() -> None:
    passes = tuple(Timed(Pass(kind, 0), start, end) for kind, start, end in ((Kind.F, 0, 32), (Kind.B, 32, 64), (Kind.W, 64, 65)))
    first, *note = render(Timeline((passes,)), width=40).splitlines()
    assert "B" not in first
    assert " ".join(note).endswith("of 65; 0 of 3 passes")


@examples(40)
@given(p=st.integers(1, 20), m=st.integers(1, 30), width=st.integers(40, 130), height=st.integers(10, 30), weight=st.floats(0, 2))
def test_text_never_floods_and_never_hides_silently(p: int, m: int, width: int, height: int, weight: float) -> None:
    schedule = planning.plan("zb-h1", p, m)
    drawn = simulate(schedule, uniform(schedule.placement, weight=weight))
    lines = render(drawn, width, height).splitlines()
    assert len(lines) <= height and all(len(line) <= width for line in lines)
    letters = sum(len(re.findall("[FBW]", line)) for line in lines if line.startswith("rank "))
    visible = sum(timed.end > timed.start for rank in drawn.ranks for timed in rank)
    assert letters == visible or any(line.startswith("left out") for line in lines)


@pytest.mark.parametrize(("start", "length"), [(1e99, 1e-300), (1e99, 1.0), (0.0, 1e-320)])
def test_text_survives_any_scale(start: float, length: float) -> None:
    passes = (Timed(Pass(Kind.F, 0), 0.0, length), Timed(Pass(Kind.F, 1), start, start + length))
    assert len(render(Timeline((passes,)), width=60)) < 1000


def test_narrow_passes_become_columns_and_files_stay_small(tmp_path: Path) -> None:
    wide, narrow = tmp_path / "wide.svg", tmp_path / "narrow.svg"
    draw({"1f1b": timeline("1f1b", 32, 20)}, wide)
    draw({"1f1b": timeline("1f1b", 32, 600)}, narrow)
    assert "columns: share of time" in narrow.read_text() and "columns: share of time" not in wide.read_text()
    assert narrow.stat().st_size < 500_000
    assert "<!-- rank 16 -->" in narrow.read_text()


def recomputed() -> tuple[Schedule, Costs]:
    """A V with R on some stages, and unequal stages."""
    schedule = recompute(planning.plan("1f1b", 4, 6), {0, 1})
    stages = tuple(StageCosts(1 + 0.1 * i, 1.3, 0.7, recompute=1, checkpoint=0.125) for i in range(4))
    return schedule, Costs(stages, hop=0.1)


def data_of(path: Path) -> dict[str, Any]:
    """What a page embeds; its columns decoded with nothing but the format's description."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    for entry in data["entries"]:
        packed, count = zlib.decompress(base64.b64decode(entry["columns"])), sum(entry["counts"])
        code = "<" + "".join(f"{count}{letter}" for letter in ("dddIHB" if entry["memory"] else "ddIHB"))
        values = struct.unpack(code, packed)
        entry["columns"] = [values[at : at + count] for at in range(0, len(values), count)] if count else []
    return data


def test_a_page_holds_the_very_passes_and_times(tmp_path: Path) -> None:
    schedule, costs = recomputed()
    planned = simulate(schedule, costs)
    measured = timeline("zb-h1", 2, 3)
    write_page([Entry("planned", planned, schedule, costs, {"gap": "1%"}), Entry("measured", measured)], tmp_path / "p.html")
    data = data_of(tmp_path / "p.html")
    for entry, drawn in zip(data["entries"], (planned, measured), strict=True):
        assert entry["counts"] == [len(rank) for rank in drawn.ranks]
        starts, ends, *changes, numbers, chunks, kinds = entry["columns"]
        works = [Pass(Kind(data["kinds"][kind]["name"]), n, chunk) for kind, n, chunk in zip(kinds, numbers, chunks, strict=True)]
        assert list(map(Timed, works, starts, ends)) == [timed for rank in drawn.ranks for timed in rank]
        assert len(changes) == (entry is data["entries"][0])
    assert list(data["entries"][0]["columns"][2]) == [change for rank in activation_changes(schedule, costs) for change in rank]
    facts = data["entries"][0]["facts"]
    assert facts["gap"] == "1%" and facts["peak memory"] == f"{max(activation_peaks(schedule, costs)):.4g}"
    assert data["entries"][0]["stages"] == [[0], [1], [2], [3]] and data["entries"][1]["stages"] is None


def test_a_page_needs_nothing_else_and_trusts_no_title(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!-- {{data}} &amp;"
    write_page([Entry(evil, timeline("1f1b", 2, 2), facts={evil: evil})], tmp_path / "p.html", title=evil)
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2 and text.count("</script") == 2 and "<!--" not in text.split("<body>")[1]
    assert not re.search(r"https?:|src=|href=|@import|url\(", text)
    assert data_of(tmp_path / "p.html")["entries"][0]["facts"][evil] == evil
    assert "{{style}}" not in text and "{{script}}" not in text


def test_a_large_page_is_small(tmp_path: Path) -> None:
    schedule = planning.plan("zb-h1", 32, 256)
    costs = uniform(schedule.placement, 1, 1.1, 0.9, 0.03)
    write_page([Entry("zb-h1", simulate(schedule, costs), schedule, costs)], tmp_path / "p.html")
    assert (tmp_path / "p.html").stat().st_size < 12 * sum(map(len, schedule.passes)) + 60_000


def test_what_a_page_cannot_show_is_refused(tmp_path: Path) -> None:
    drawn, schedule = timeline("1f1b", 2, 3), planning.plan("1f1b", 2, 2)
    with pytest.raises(ValueError, match="nothing to show"):
        write_page([], tmp_path / "p.html")
    with pytest.raises(ValueError, match="x: the timeline is not one of this schedule"):
        Entry("x", drawn, schedule)
    with pytest.raises(ValueError, match="x: costs say nothing"):
        Entry("x", drawn, costs=uniform(schedule.placement))
    with pytest.raises(ValueError, match="counts microbatches up to 4294967295"):
        write_page([Entry("x", Timeline(((Timed(Pass(Kind.F, 1 << 32), 0, 1),),)))], tmp_path / "p.html")


def page_says(entry: Entry, script: str, folder: Path) -> Any:
    """What the page's own model of an entry, ``panel``, makes of an expression."""
    write_page([entry], folder / "p.html")
    model = (Path(page.__file__).parent / "web" / "model.js").read_text()
    read = """
        const text = require("fs").readFileSync(process.argv[2], "utf8");
        const data = JSON.parse(text.match(/id="data">(.*?)<\\/script>/s)[1]);
        Panel.read(data.entries[0], data.kinds).then((panel) => console.log(JSON.stringify(
    """
    (folder / "check.js").write_text(f"{model}{read}{script})));")
    run = ["node", str(folder / "check.js"), str(folder / "p.html")]
    return json.loads(subprocess.run(run, capture_output=True, text=True, check=True, timeout=30).stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's scripts")
def test_the_script_reads_what_python_wrote(tmp_path: Path) -> None:
    """Passes, memory and dependencies as the page computes them are those of Python."""
    schedule, costs = recomputed()
    planned = simulate(schedule, costs)
    script = """{
      peak: panel.peak,
      names: [...Array(panel.count).keys()].map((i) => panel.name(i)),
      links: panel.links(panel.passesOf(3)).map((pair) => pair.map((i) => [panel.rankOf(i), panel.name(i)])),
      busy: panel.density(1, 0, panel.makespan, 7).reduce((sum, share) => sum + share, 0) * panel.makespan / 7,
      found: [...Array(panel.count).keys()].every((i) =>
        panel.at(panel.rankOf(i), (panel.starts[i] + panel.ends[i]) / 2) === i),
    }"""
    seen = page_says(Entry("planned", planned, schedule, costs), script, tmp_path)
    assert seen["peak"] == pytest.approx(max(activation_peaks(schedule, costs)))
    assert seen["names"] == [f"{work.kind}{work.microbatch}" for rank in schedule.passes for work in rank]
    assert seen["busy"] == pytest.approx(sum(end - start for _, start, end in planned.ranks[1]), rel=1e-5)
    assert seen["found"]
    expected = {
        (before, f"{needed.kind}3", rank, f"{work.kind}3")
        for rank, passes in enumerate(schedule.passes)
        for work in passes
        if work.microbatch == 3
        for before, needed in schedule.predecessors(rank, work)
    }
    assert {(*needed, *needing) for needed, needing in seen["links"]} == expected


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's scripts")
def test_the_script_knows_copies(tmp_path: Path) -> None:
    schedule, costs = offloaded()
    drawn = simulate(schedule, costs)
    script = """{
      links: panel.links(panel.passesOf(1)).map((pair) => pair.map((i) => [panel.rankOf(i), panel.name(i)])),
      copies: [...Array(panel.copies.count).keys()].map((i) => [panel.name(i, panel.copies), panel.copies.ends[i]]),
      found: ["D2H", "H2D"].map((kind) => panel.copyAt(0, kind, 9)),
    }"""
    seen = page_says(Entry("away", drawn, schedule, costs), script, tmp_path)
    expected = {
        (before, f"{needed.kind}1", rank, f"{work.kind}1")
        for rank, passes in enumerate(schedule.passes)
        for work in passes
        if work.microbatch == 1
        for before, needed in schedule.predecessors(rank, work)
    }
    assert {(*needed, *needing) for needed, needing in seen["links"]} == expected
    assert seen["copies"] == [[f"{work.kind}{work.microbatch}", end] for work, _, end in drawn.copies[0]]
    assert seen["found"] == [next(i for i, one in enumerate(drawn.copies[0]) if one.start <= 9 < one.end), -1]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's scripts")
@pytest.mark.parametrize("name", ["model.js", "paint.js", "timelines.js", "main.js"])
def test_scripts_are_javascript(name: str) -> None:
    subprocess.run(["node", "--check", str(Path(page.__file__).parent / "web" / name)], check=True, timeout=30)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_the_frontier_is_what_nothing_beats(places: list[tuple[int, int]]) -> None:
    points = [Point(str(index), *place) for index, place in enumerate(places)]
    beaten = {
        (one.bubble, one.memory)
        for one in points
        if any(other.bubble <= one.bubble and other.memory <= one.memory and other[1:] != one[1:] for other in points)
    }
    best = pareto(points, lambda point: (point.memory, point.bubble))
    assert [(point.bubble, point.memory) for point in best] == sorted(set(places) - beaten, key=lambda place: place[1])


@examples(50)
@given(st.lists(st.tuples(st.floats(50, 350), st.floats(50, 250)), min_size=1, max_size=15))
def test_labels_do_not_cover_each_other(anchors: list[tuple[float, float]]) -> None:
    boxes = label_places(anchors, [(40, 10)] * len(anchors), (0, 0, 400, 300))
    for index, one in enumerate(boxes):
        for other in boxes[:index]:
            assert one[0] >= other[2] or other[0] >= one[2] or one[1] >= other[3] or other[1] >= one[3]
        assert one[0] >= 0 and one[2] <= 400 and one[1] >= 0 and one[3] <= 300


def test_a_pareto_plot_names_every_schedule(tmp_path: Path) -> None:
    points = [Point("1f1b", 0.2, 8), Point("zb-h1", 0.1, 8), Point("zb-h2", 0.0, 15), Point("twin", 0.1, 8)]
    draw_pareto(points, tmp_path / "p.svg", reference=8, title="8 ranks")
    text = (tmp_path / "p.svg").read_text()
    for label in ("1f1b", "zb-h1, twin", "zb-h2", "8 ranks", "multiple of 1F1B's memory"):
        assert f"<!-- {label} -->" in text
    draw_pareto([Point("only", 0.0, 0.0)], tmp_path / "p.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_pareto([], tmp_path / "p.svg")
    with pytest.raises(ValueError, match="more than 0, got 0"):
        draw_pareto(points, tmp_path / "p.svg", reference=0)
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw_pareto(points, tmp_path / "p.gif")


def test_a_robustness_plot_names_schedules_and_jitter(tmp_path: Path) -> None:
    spans = {"1f1b": {0.0: [30.0], 0.1: [31.0, 32.0, 33.0]}, "zb-h1": {0.0: [27.0], 0.3: [28.0, 34.0]}}
    draw_robustness(spans, tmp_path / "r.svg", unit="ms", title="4 ranks", measured="makespan")
    text = (tmp_path / "r.svg").read_text()
    for label in (
        "1f1b",
        "zb-h1",
        "no jitter",
        "jitter 10%",
        "jitter 30%",
        "4 ranks",
        "makespan (ms): the dot is the mean, the bar spans nine of ten runs",
    ):
        assert f"<!-- {label} -->" in text
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_robustness({}, tmp_path / "r.svg")
    with pytest.raises(ValueError, match="zb-v has no runs to draw"):
        draw_robustness({"zb-v": {0.1: []}}, tmp_path / "r.svg")
    with pytest.raises(ValueError, match=r"must end in \.png or \.svg"):
        draw_robustness(spans, tmp_path / "r.gif")


def test_halves_of_a_braid_stand_one_above_the_other(tmp_path: Path) -> None:
    """For all of the braid's time: in pictures, and in traces, where the second lies within the first."""
    row = (Timed(Pass(Kind.F, 1), 0.0, 2.0), Timed(Pass(Kind.FBW, 0), 2.0, 3.0), Timed(Pass(Kind.BW, 1), 3.0, 5.0))
    halves = list(with_whole_braids(row))
    assert [(timed.start, timed.end, half) for timed, half in halves] == [(0.0, 3.0, 0), (0.0, 3.0, 1), (3.0, 5.0, None)]
    events = [event for event in to_trace(Timeline((row,)))["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"]) for event in events[:2]] == [("F1.0", 0.0, 3e6), ("FBW0.0", 0.0, 3e6)]
    draw({"braid": Timeline((row,))}, tmp_path / "braid.svg")
    boxes = re.findall(r'd="(M [^"]*z)', (tmp_path / "braid.svg").read_text(encoding="utf-8"))
    heights = {round(max(ys) - min(ys), 2) for box in boxes if (ys := [float(y) for y in re.findall(r"[ML] \S+ (\S+)", box)])}
    assert any(abs(one - 2 * other) < 0.1 for one in heights for other in heights)
