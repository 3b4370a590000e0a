"""The page of ``mpipe serve`` in a real browser: what it shows is what the command makes, by mouse and by keys."""

from __future__ import annotations

import json
import re
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from browser.opened import SMALL, TIMEOUT, Opened, expect, needs_chromium, planned
from served import command, untimed

from megatron.pipeline import cli
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts

pytestmark = needs_chromium


def test_the_schedules_shown_are_those_of_the_command(opened: Opened) -> None:
    opened.go({"schedule": "zb-v"}, {"schedule": "zb-auto", "memory-limit": "3"}, {"schedule": "interleaved", "chunks": "3"})
    expected = [
        planned(schedule="zb-v"),
        planned(schedule="zb-auto", memory_limit="3"),
        planned(schedule="interleaved", chunks="3"),
    ]
    for number, plan in enumerate(expected):
        opened.shows(plan["passes"], number)
    plain = planned(schedule="1f1b")
    interleaved = min(planned(schedule="interleaved", chunks=str(chunks))["makespan"] for chunks in (2, 3, 4))
    for number, plan in enumerate(expected):
        time, memory = plan["makespan"], max(plan["peak_activation"])
        expect(opened.page.locator("#cards tr[aria-busy]").nth(number).locator("td.fact")).to_have_text(
            [
                f"{time:.5g}",
                f"\N{MULTIPLICATION SIGN} {plain['makespan'] / time:.2f}",
                f"\N{MULTIPLICATION SIGN} {interleaved / time:.2f}",
                f"{100 * plan['bubble_rate']:.1f} %",
                f"{100 * plan['makespan_gap']:z.1f} %",
                f"{memory:.5g}",
                f"{100 * memory / max(plain['peak_activation']):.0f} %",
            ],
            timeout=TIMEOUT,
        )
    ends = opened.page.evaluate("window.playground.shown.map((one) => Math.max(...one.panel.ends))")
    assert ends == pytest.approx([plan["makespan"] for plan in expected])
    opened.page.get_by_role("button", name="makespan", exact=True).click()
    shown = opened.page.evaluate("window.playground.shown.map((one) => one.plan.makespan)")
    assert shown == sorted(ends) and opened.page.locator("#cards .place").all_inner_texts() == ["1", "2", "3"]


def test_what_is_typed_is_planned(opened: Opened) -> None:
    page = opened.page
    opened.go({"schedule": "zb-h1"})
    page.get_by_label("W, backward for weights").fill("0.5")
    page.get_by_label("p2p time").fill("0.2")
    page.get_by_label("ranks, p").fill("3")
    page.get_by_label("on all ranks").select_option("2")
    page.get_by_label("S, logits").fill("0.7")
    page.get_by_label("offload").select_option("full")
    page.get_by_label("bandwidth").fill("4")
    page.get_by_label("schedule 1", exact=True).select_option("gis")
    page.get_by_label("chunks per rank of schedule 1").fill("2")
    opened.ready()
    flags = {
        "schedule": "gis", "pp": "3", "chunks": "2", "cost": "F=1,B=1.2,W=0.5,comm=0.2,D2H=0.25,H2D=0.25", "vocab-parallel": "2",
        "vocab-cost": "S=0.7", "offload": "full",
    }  # fmt: skip
    page.get_by_text("command", exact=True).click()
    expect(page.get_by_text("--vocab-cost S=0.7 --offload full")).to_be_visible()
    expected, complaint = command(SMALL | flags)
    if expected is None:
        expect(page.get_by_role("alert")).to_have_text(complaint.removeprefix("mpipe: "))
    else:
        opened.shows(expected["passes"])


def test_slow_links_and_ranks_that_are_typed_are_planned(opened: Opened) -> None:
    opened.go({"schedule": "zb-h1"})
    opened.page.get_by_label("links", exact=True).fill("1-2=3,2to3=2")
    opened.page.get_by_label("slow ranks").fill("2=1.5")
    opened.ready()
    opened.shows(planned(schedule="zb-h1", cost="F=1,B=1.2,W=0.8,comm=0.05,comm[1-2]=3,comm[2to3]=2", slow="2=1.5")["passes"])
    opened.page.get_by_label("slow ranks").fill("2=fast")
    expect(opened.page.get_by_text("is not ranks and how many times as long they take")).to_be_visible()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ranks, p", "0", "“0” is not a whole number of at least 1"),
        ("ranks, p", "many", "“many” is not a whole number of at least 1"),
        ("ranks, p", "5000", "at most 4096 ranks"),
        ("microbatches, m", "99999999", "with 4 ranks at most 250000 microbatches"),
        ("F, forward", "-1", "“-1” is not a number of at least 0"),
        ("B, backward for the input", "1,2", "“1,2” is not a number of at least 0; write 1.2"),
    ],
)
def test_what_is_wrong_in_the_form_is_said_beside_its_field(opened: Opened, name: str, value: str, message: str) -> None:
    page = opened.page
    opened.go({"schedule": "1f1b"})
    expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
    field = page.get_by_label(name)
    before = field.input_value()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    field.fill(value)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_accessible_description(message)
    expect(page.locator("#message")).to_have_text("correct the fields that are marked")
    for chart in ("front", "timelines"):
        expect(page.locator(f"#{chart}")).to_be_hidden()
    assert not [url for url in asked if "/api/" in url]
    assert page.get_by_role("alert").all_inner_texts() == [""]  # said once
    field.fill(before)
    opened.ready()
    expect(field).not_to_have_attribute("aria-invalid", "true")
    opened.shows(planned(schedule="1f1b")["passes"])


@pytest.mark.parametrize(
    ("name", "value", "flags"),
    [
        ("memory limit of schedule 1", "x", None),
        ("memory limit of schedule 1", "0.2", {"memory-limit": "0.2"}),
        ("chunks per rank of schedule 1", "7", {"chunks": "7"}),
    ],
)
def test_a_refusal_marks_the_field_and_has_the_reason(
    opened: Opened, name: str, value: str, flags: dict[str, str] | None
) -> None:
    page = opened.page
    opened.go({"schedule": "zb-v"})
    page.get_by_label(name).fill(value)
    complaint = "“x” is not a number of at least 0, or bytes such as 20GiB"
    if flags is not None:
        complaint = command(SMALL | {"schedule": "zb-v"} | flags)[1].removeprefix("mpipe: ").replace("--chunks", "chunks")
    expect(page.get_by_role("alert")).to_have_text(complaint)
    expect(page.get_by_label(name)).to_have_accessible_description(complaint)
    expect(page.locator("[aria-invalid]")).to_have_count(1)
    expect(page.locator("#timelines")).to_be_hidden()  # nothing is shown that is not so, and no empty chart
    expect(page.locator("#message")).to_have_text("1 of 1 not possible", timeout=TIMEOUT)


def test_auto_says_what_it_chose_and_why_not_the_others(opened: Opened) -> None:
    page = opened.page
    opened.go({"schedule": "auto", "memory-limit": "2"}, pp="2", microbatches="4")
    plan = planned(schedule="auto", memory_limit="2", pp="2", microbatches="4")
    best = next(one["label"] for one in plan["candidates"] if one["why_not"] is None)
    expect(page.locator("#cards tbody th, #cards th").first).to_contain_text(best)
    assert page.evaluate("window.playground.timelines.chart.panels[0].title") == f"auto: {best} within 2"
    expect(page.get_by_role("slider")).to_have_accessible_name(f"memory limit of auto: {best} within 2")
    page.get_by_text(f"auto chose {best}: why not the {len(plan['candidates']) - 1} others").click()
    told = page.locator("#cards details tbody tr")
    rows = {row[0]: row[-1] for row in (one.split("\t") for one in told.all_inner_texts())}
    assert rows == {one["label"]: one["why_not"] or "chosen" for one in plan["candidates"]}
    page.get_by_label("memory limit of schedule 1").fill("0.2")
    expect(page.get_by_role("alert")).to_contain_text("raise the memory limit to that")
    expect(page.get_by_label("memory limit of schedule 1")).to_have_attribute("aria-invalid", "true")


def test_nothing_is_planned_ahead_while_the_page_is_hidden_and_no_limit_of_a_fixed_order(opened: Opened) -> None:
    page = opened.page
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urllib.parse.unquote(request.url)))
    page.add_init_script("Object.defineProperty(document, 'hidden', { get: () => window.away ?? true })")
    opened.go({"schedule": "zb-h1"}, {"schedule": "v-half"})
    page.wait_for_timeout(500)  # more than the pause before planning ahead
    assert not [url for url in asked if "ahead=1" in url]
    page.evaluate("window.away = false; document.dispatchEvent(new Event('visibilitychange'))")
    expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
    ahead = [url for url in asked if "ahead=1" in url]
    assert ahead and not [url for url in ahead if "memory-limit" in url]
    expect(page.get_by_role("slider")).to_have_count(0)


MOVES = [("ArrowDown", 3.5), ("ArrowLeft", 3), ("PageUp", 4), ("ArrowUp", 4.5), ("End", 8), ("Home", 1), ("ArrowUp", 1.5)]


def test_arrow_keys_move_the_limit_and_the_plan_follows(opened: Opened) -> None:
    opened.go({"schedule": "v-auto"}, {"schedule": "zb-auto"})
    before = opened.passes()
    expect(opened.slider()).to_have_attribute("aria-valuenow", "4", timeout=TIMEOUT)
    opened.slider().focus()
    for key, limit in MOVES:
        opened.slider().press(key)
        expect(opened.slider()).to_have_attribute("aria-valuenow", f"{limit:g}", timeout=TIMEOUT)
    opened.slider().press("PageUp")
    limited = planned(schedule="v-auto", memory_limit="2.5")["passes"]
    assert limited != before
    opened.shows(limited)
    opened.shows(planned(schedule="zb-auto")["passes"], 1)
    assert opened.page.get_by_label("memory limit of schedule 1").input_value() == "2.5"
    opened.slider().press("Delete")
    expect(opened.page.get_by_label("memory limit of schedule 1")).to_have_value("", timeout=TIMEOUT)
    opened.shows(before)


def test_the_limit_is_dragged_by_the_mouse(opened: Opened) -> None:
    opened.go({"schedule": "v-auto"})
    mouse = opened.page.mouse
    opened.slider().scroll_into_view_if_needed()
    box = opened.slider().bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    mouse.move(x, y)
    mouse.down()
    seen = []
    for step in range(1, 25):
        mouse.move(x, y + step)
        seen.append(opened.limit())
    mouse.up()
    opened.ready()
    assert seen == sorted(seen, reverse=True) and 1 <= seen[-1] < 4 and seen[-1] % 0.5 == 0
    opened.shows(planned(schedule="v-auto", memory_limit=str(seen[-1]))["passes"])
    moved = opened.slider().bounding_box()
    assert abs(moved["y"] - box["y"] - 24) < 8  # the line is where the mouse is, or at the next limit


def test_every_limit_is_planned_ahead(opened: Opened) -> None:
    opened.go({"schedule": "v-auto"})
    expect(opened.page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
    asked: list[str] = []
    opened.page.on("request", lambda request: asked.append(request.url))
    opened.slider().focus()
    opened.slider().press("End")
    for limit in range(16, 4, -1):
        expect(opened.page.get_by_label("memory limit of schedule 1")).to_have_value(f"{limit / 2:g}")
        opened.ready()
        opened.slider().press("ArrowDown")
    opened.ready()
    opened.shows(planned(schedule="v-auto", memory_limit="2")["passes"])
    assert not [url for url in asked if "/api/" in url]


def test_keys_that_come_before_the_plan_count_from_each_other(opened: Opened) -> None:
    """A busy machine's page once counted the second from what was shown before the first."""
    opened.go({"schedule": "v-auto"})
    expect(opened.page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
    press = "(slider, key) => slider.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true }))"
    opened.slider().evaluate(f"slider => {{ const press = {press}; press(slider, 'End'); press(slider, 'ArrowDown'); }}")
    expect(opened.page.get_by_label("memory limit of schedule 1")).to_have_value("7.5")


def test_an_address_restores_everything(opened: Opened, browser: Any) -> None:
    page = opened.page
    opened.go({"schedule": "zb-v"})
    page.get_by_label("p2p time").fill("0.3")
    page.get_by_label("minimise").select_option("with post-validation")
    page.get_by_role("button", name="add a schedule").click()
    page.get_by_label("schedule 2", exact=True).select_option("zb-auto")
    page.get_by_label("memory limit of schedule 2").fill("2.5")
    opened.ready()
    expect(page).to_have_url(re.compile(r"schedule%3Dzb-auto%26memory-limit%3D2.5$"))
    other = Opened(browser.new_page(), opened.address)
    other.page.goto(page.url)
    other.ready()
    assert other.page.get_by_label("p2p time").input_value() == "0.3"
    assert other.page.get_by_label("minimise").input_value() == "span"
    assert other.page.get_by_label("memory limit of schedule 2").input_value() == "2.5"
    cost = "F=1,B=1.2,W=0.8,comm=0.3"
    expected = [
        planned(schedule="zb-v", cost=cost, objective="span"),
        planned(schedule="zb-auto", cost=cost, objective="span", memory_limit="2.5"),
    ]
    assert [other.passes(number) for number in (0, 1)] == [plan["passes"] for plan in expected]
    other.page.evaluate("location.hash = 'pp=2&microbatches=3&plan=schedule%3D1f1b'")
    expect(other.page.locator("#cards tr[aria-busy]")).to_have_count(1)
    other.ready()
    assert len(other.passes()) == 2
    other.page.close()


def test_downloads_have_what_is_shown(opened: Opened, tmp_path: Path) -> None:
    opened.go({"schedule": "v-half"}, {"schedule": "zb-h1"})
    for suffix in ("SVG", "JSON", "CSV"):
        with opened.page.expect_download() as waiting:
            opened.page.get_by_role("link", name=f"download schedule 2 as {suffix}").click()
        assert waiting.value.suggested_filename == f"zb-h1.{suffix.lower()}"
        waiting.value.save_as(tmp_path / f"plan.{suffix.lower()}")
    assert untimed(json.loads((tmp_path / "plan.json").read_text())) == planned(schedule="zb-h1")
    assert "<!-- zb-h1 -->" in (tmp_path / "plan.svg").read_text()
    for name in ("plan.json", "plan.csv"):
        assert cli.main(["plan", str(tmp_path / name)]) == 0


def test_the_front_is_that_of_compare_and_another_size_leaves_nothing_stale(
    opened: Opened, capsys: pytest.CaptureFixture[str]
) -> None:
    page = opened.page
    opened.go({"schedule": "1f1b"})
    expect(page.locator("#planned")).to_contain_text("schedules of mpipe compare and auto, all chunks", timeout=TIMEOUT)
    assert cli.main(["compare", *(f"--{name}={value}" for name, value in SMALL.items()), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["schedules"]
    points = {(round(one["bubble_rate"], 9), round(max(one["peak_activation"]), 9)) for one in compared}
    front = {one for one in points if not any(other != one and other[0] <= one[0] and other[1] <= one[1] for other in points)}
    blue = page.evaluate(
        "window.playground.pareto.points.filter((_, i) => window.playground.pareto.marks[i].classList.contains('best'))"
    )
    assert {(round(one["bubble"], 9), round(one["memory"], 9)) for one in blue} == front
    assert f"the {len(compared)} schedules" in page.locator("#planned").inner_text()
    opened.go({"schedule": "1f1b"}, {"schedule": "v-auto", "memory-limit": "3"})
    page.locator("#pareto g[role=button]").first.focus()
    told = page.locator("#pareto figcaption")
    expect(told).to_contain_text("memory")
    page.get_by_label("ranks, p").fill("8")  # 1F1B then holds 8 microbatches
    expect(page.get_by_label("memory limit of schedule 2")).to_have_value("6")
    expect(told).to_contain_text("blue: none that holds as little")
    page.get_by_label("microbatches, m").fill("4")
    expect(page.get_by_label("memory limit of schedule 2")).to_have_value("3")


def test_planning_ahead_ends_in_time_and_says_how_many_are_missing(opened: Opened) -> None:
    opened.go({"schedule": "1f1b"})
    expect(opened.page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)  # what the page itself asks for
    ask = "(until) => window.playground.plans.askAhead([{ schedule: 'v-auto', pp: '3', microbatches: '7' }], until, () => {})"
    assert [opened.page.evaluate(ask, until) for until in (0, 1e15)] == [1, 0]


def test_thin_rows_have_the_colours_of_the_legend(opened: Opened) -> None:
    opened.go({"schedule": "zb-v"}, {"schedule": "interleaved"}, pp="32", microbatches="256")
    page = opened.page
    found = page.evaluate(
        """() => {
            const { chart, kinds } = window.playground.timelines;
            chart.boxHeight = 2;
            chart.place();
            chart.scroll = 0;
            chart.resize(chart.width, 400);
            chart.paint();
            const name = (rgb) => "#" + [...rgb].map((one) => one.toString(16).padStart(2, "0")).join("");
            const { data } = chart.pen.getImageData(chart.width / 2, chart.panels[0].top, 40, 2);
            const colours = Array.from({ length: data.length / 4 }, (_, i) => name(data.slice(4 * i, 4 * i + 3)));
            const known = new Set(kinds.map((kind) => kind.colour.toLowerCase()));
            return [chart.crowded, [...new Set(colours)].filter((one) => !known.has(one))];
        }"""
    )
    assert found[0] and len(found[1]) <= 1  # what is left is idle


def test_a_point_of_the_front_shows_its_schedule(opened: Opened) -> None:
    opened.go({"schedule": "1f1b"})
    expect(opened.page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
    front = opened.page.locator("#pareto")
    front.get_by_role("button", name=re.compile("^zb-v[,:]")).click()
    expect(opened.page.get_by_label("schedule 2", exact=True)).to_have_value("zb-v")
    opened.ready()
    opened.shows(planned(schedule="zb-v")["passes"], 1)
    reached = front.locator("[tabindex='0']")
    expect(reached).to_have_count(1)
    reached.focus()
    opened.page.keyboard.press("ArrowRight")
    expect(front.locator("figcaption")).to_contain_text("bubble")
    opened.page.keyboard.press("Enter")
    expect(opened.page.locator("#cards tr[aria-busy]")).to_have_count(3)
    opened.page.get_by_role("button", name=re.compile("^remove schedule 2")).click()
    expect(opened.page.locator("#cards tr[aria-busy]")).to_have_count(2)


def test_costs_of_a_file_replace_the_times_and_limits_are_bytes(opened: Opened, tmp_path: Path) -> None:
    page, path = opened.page, tmp_path / "costs.json"
    stages = tuple(StageCosts(0.01 + 0.001 * stage, 0.02, 0.01, activation=3e8) for stage in range(8))
    path.write_text(Costs(stages, hop=1e-4).to_json())
    opened.go({"schedule": "v-auto"})
    page.get_by_label("file of costs").set_input_files(path)
    expect(page.locator("#opened output")).to_have_text("costs.json, 8 stages")
    opened.ready()
    for field in ("F, forward", "B, backward for the input", "W, backward for weights", "p2p time"):
        expect(page.get_by_label(field)).to_be_disabled()
    sizes = {"pp": SMALL["pp"], "microbatches": SMALL["microbatches"], "objective": "makespan", "costs": str(path)}
    free, _ = command(sizes | {"schedule": "v-auto"})
    assert free is not None
    opened.shows(free["passes"])
    expect(page.locator("#unit")).to_have_text("peak memory, MiB")
    memory = page.locator("#cards tr[aria-busy]").first.locator("td.fact").nth(5)
    expect(memory).to_have_text(f"{max(free['peak_activation']) / 2**20:.5g}", timeout=TIMEOUT)
    page.get_by_label("memory limit of schedule 1").fill("2GiB")
    within, _ = command(sizes | {"schedule": "v-auto", "memory-limit": "2GiB"})
    assert within is not None and within["passes"] != free["passes"]
    opened.shows(within["passes"])
    opened.slider().press("ArrowUp")  # of limits in whole MiB
    expect(page.get_by_label("memory limit of schedule 1")).to_have_value(re.compile(r"\d+MiB"))
    opened.ready()
    page.get_by_text("command", exact=True).click()
    expect(page.get_by_text("--costs costs.json")).to_be_visible()
    page.wait_for_url(re.compile("costs=[0-9a-f]{16}"))
    page.reload()
    expect(page.locator("#opened output")).to_have_text("costs.json, 8 stages")
    page.get_by_role("button", name="close").click()
    expect(page.get_by_label("F, forward")).to_be_enabled()
    opened.go({"schedule": "1f1b"}, costs="0123456789abcdef")
    expect(page.locator("#wrong-file")).to_have_text("mpipe serve does not have this costs file any more: open it again")
    path.write_text("{}")
    page.get_by_label("file of costs").set_input_files(path)
    expect(page.locator("#wrong-file")).to_contain_text("costs.json: not costs")
    opened.ready()
    opened.wrong.clear()  # a browser reports the file that is not there, status 404, as an error
