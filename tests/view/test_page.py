"""Pages of timelines: what they hold, and what their scripts make of it."""

import base64
import json
import re
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import offloaded, timeline

from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import activation_changes, activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.transform import recompute
from megatron.pipeline.planner.view import Entry, page, write_page

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's scripts")


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
    write_page([Entry(evil, timeline("1f1b", 2, 2), facts={evil: evil})], tmp_path / "p.html")
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


@needs_node
def test_the_script_reads_what_python_wrote(tmp_path: Path) -> None:
    """Passes and memory as the page computes them are those of Python."""
    schedule, costs = recomputed()
    planned = simulate(schedule, costs)
    script = """{
      peak: panel.peak,
      names: [...Array(panel.count).keys()].map((i) => panel.name(i)),
      busy: panel.density(1, 0, panel.makespan, 7).reduce((sum, share) => sum + share, 0) * panel.makespan / 7,
      found: [...Array(panel.count).keys()].every((i) =>
        panel.at(panel.rankOf(i), (panel.starts[i] + panel.ends[i]) / 2) === i),
    }"""
    seen = page_says(Entry("planned", planned, schedule, costs), script, tmp_path)
    assert seen["peak"] == pytest.approx(max(activation_peaks(schedule, costs)))
    assert seen["names"] == [f"{work.kind}{work.microbatch}" for rank in schedule.passes for work in rank]
    assert seen["busy"] == pytest.approx(sum(end - start for _, start, end in planned.ranks[1]), rel=1e-5)
    assert seen["found"]


@needs_node
def test_the_script_knows_copies(tmp_path: Path) -> None:
    schedule, costs = offloaded()
    drawn = simulate(schedule, costs)
    script = """{
      copies: [...Array(panel.copies.count).keys()].map((i) => [panel.name(i, panel.copies), panel.copies.ends[i]]),
      found: ["D2H", "H2D"].map((kind) => panel.copyAt(0, kind, 9)),
    }"""
    seen = page_says(Entry("away", drawn, schedule, costs), script, tmp_path)
    assert seen["copies"] == [[f"{work.kind}{work.microbatch}", end] for work, _, end in drawn.copies[0]]
    assert seen["found"] == [next(i for i, one in enumerate(drawn.copies[0]) if one.start <= 9 < one.end), -1]


def planned(name: str, **options: Any) -> tuple[Schedule, Costs]:
    """A schedule of 4 ranks and 6 microbatches with its costs."""
    found = planning.Request(name, 4, 6, **options).plan()
    return found.schedule, found.problem.costs


@needs_node
@pytest.mark.parametrize(
    "made",
    [
        recomputed,
        offloaded,
        lambda: planned("v-half"),
        lambda: planned("interleaved", overlap=True),
        *(lambda way=way: planned("zb-h1", vocabulary=way) for way in Vocabulary),
    ],
    ids=["recomputed", "offloaded", "v", "braided", *Vocabulary],
)
def test_lines_lead_to_the_passes_that_are_needed(made: Callable[[], tuple[Schedule, Costs]], tmp_path: Path) -> None:
    """What the page joins with lines, for one microbatch, is what the table of kinds has the passes wait for."""
    schedule, costs = made()
    name = "[panel.rankOf(i), panel.kindNames[panel.kinds[i]], panel.chunks[i]]"
    script = f"panel.links(panel.passesOf(2)).map((pair) => pair.map((i) => {name}))"
    links = page_says(Entry("planned", simulate(schedule, costs), schedule, costs), script, tmp_path)
    expected = {
        (before, needed.kind, needed.chunk, rank, work.kind, work.chunk)
        for rank, passes in enumerate(schedule.passes)
        for work in passes
        for before, needed in schedule.predecessors(rank, work)
        if work.microbatch == needed.microbatch == 2
    }
    assert {(*needed, *needing) for needed, needing in links} == expected


@needs_node
@pytest.mark.parametrize("name", ["model.js", "paint.js", "overview.js", "timelines.js", "main.js"])
def test_scripts_are_javascript(name: str) -> None:
    subprocess.run(["node", "--check", str(Path(page.__file__).parent / "web" / name)], check=True, timeout=30)
