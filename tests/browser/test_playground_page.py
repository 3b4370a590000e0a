"""The page of ``mpipe serve`` in a real browser: it can be read and used, at any size, by keys alone, and from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser.opened import TIMEOUT, Opened, expect, needs_chromium, planned

from megatron.pipeline import cli

pytestmark = needs_chromium


def test_keys_alone_reach_everything(opened: Opened) -> None:
    opened.go({"schedule": "v-auto"})
    reached = set()
    for _ in range(60):
        opened.page.keyboard.press("Tab")
        reached.add(
            opened.page.evaluate("document.activeElement.id || document.activeElement.ariaLabel || document.activeElement.name")
        )
        outline = opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or opened.page.evaluate("document.activeElement === document.body")
    assert {
        "pp",
        "F",
        "offload",
        "schedule 1",
        "memory limit of schedule 1",
        "download schedule 1 as CSV",
        "add",
        "scroller",
    } <= reached
    assert {"memory limit of v-auto", "link"} <= reached
    nameless = opened.page.evaluate(
        "[...document.querySelectorAll('input, select, button, [role=slider]')].filter((one) =>"
        " !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map((one) => one.outerHTML)"
    )
    assert nameless == []


# The contrast of every text with what is behind it, by WCAG's formula; disabled inputs may be faint.
CONTRASTS = """() => {
    const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const linear = (part) => ((part /= 255), part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
    const behind = (one) => {
        const colour = one ? numbers(getComputedStyle(one).backgroundColor) : [255, 255, 255];
        return colour.length === 4 && colour[3] === 0 ? behind(one.parentElement) : colour;
    };
    const found = [];
    for (const one of document.querySelectorAll("body *")) {
        const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!(own || one.matches("input, select")) || one.disabled || !one.checkVisibility()) continue;
        const style = getComputedStyle(one);
        const [a, b] = [numbers(one.closest("svg") ? style.fill : style.color), behind(one)].map(light);
        found.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 80)]);
    }
    return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(opened: Opened, scheme: str) -> None:
    opened.page.emulate_media(color_scheme=scheme)
    opened.go({"schedule": "zb-v"}, {"schedule": "1f1b", "memory-limit": "1"})
    expect(opened.page.get_by_role("alert").nth(1)).to_contain_text("raise the limit to 4")
    contrasts = opened.page.evaluate(CONTRASTS)
    assert len(contrasts) > 40 and [one for one in contrasts if one[0] < 4.5] == []
    paper = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) < 150) == (scheme == "dark")


# What is cut off at the right end of the window or of what it is in.
CUT = """() => [...document.querySelectorAll("#plans *, select, button")].filter((one) =>
    one.checkVisibility() && (one.getBoundingClientRect().right > innerWidth || one.scrollWidth > one.clientWidth + 1) &&
    getComputedStyle(one).display !== "inline").map((one) => one.outerHTML.slice(0, 80))"""


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_it_fits_into_the_window(opened: Opened, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 800})
    opened.go({"schedule": "interleaved", "chunks": "2", "memory-limit": "7"}, {"schedule": "1f1b"})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.page.evaluate(CUT) == []
    for name in ("chart", "overview"):
        assert opened.page.locator(f"#{name}").bounding_box()["width"] > width / 2


def test_no_schedule_and_no_rank_is_out_of_sight(opened: Opened) -> None:
    names = ({"schedule": name} for name in ("1f1b", "zb-h1", "zb-h2", "interleaved"))
    opened.page.set_viewport_size({"width": 1440, "height": 900})
    opened.go(*names, pp="8")
    heights = "[scroller.scrollHeight - scroller.clientHeight, scroller.clientHeight, chart.clientHeight]"
    assert opened.page.evaluate(heights) == [0, pytest.approx(800, abs=100), pytest.approx(800, abs=100)]
    opened.page.get_by_label("ranks, p").fill("64")
    opened.ready()
    assert opened.page.evaluate("window.playground.timelines.chart.pitch") == 2
    inside, whole, _ = opened.page.evaluate(heights)
    assert inside == 0 and whole > 4 * 64 * 2
    opened.page.evaluate("window.scrollTo(0, document.body.scrollHeight)")  # the last rank is where the content ends
    opened.page.wait_for_function("() => playground.timelines.chart.scroll === content.clientHeight - chart.clientHeight")


def test_what_was_below_the_pointer_is_not_told_after_a_key_has_moved_it(opened: Opened) -> None:
    opened.go({"schedule": "1f1b"})
    box = opened.page.locator("#chart").bounding_box()
    opened.page.locator("#scroller").focus()
    opened.page.mouse.move(box["x"] + 80, box["y"] + 52)
    expect(opened.page.locator("#tip")).to_be_visible()
    opened.page.keyboard.press("+")
    expect(opened.page.locator("#tip")).to_be_hidden()


@pytest.mark.parametrize("vocabulary", ["off", "2"])
def test_memory_of_all_schedules_has_one_scale_with_the_peak_of_1f1b(opened: Opened, vocabulary: str) -> None:
    opened.go({"schedule": "1f1b"}, {"schedule": "v-auto"}, {"schedule": "zb-h2"}, **{"vocab-parallel": vocabulary})
    plans = [planned(schedule=name, vocab_parallel=vocabulary) for name in ("1f1b", "v-auto", "zb-h2")]
    peaks = [max(plan["peak_activation"]) for plan in plans]
    expect(opened.page.locator("#stock")).to_have_text(f"; dashed: 1F1B's peak, {peaks[0]:.5g} microbatches", timeout=TIMEOUT)
    scales = opened.page.evaluate("window.playground.shown.map(({ curves }) => [curves.top, curves.stock])")
    assert scales == 3 * [[scales[0][0], peaks[0]]] and scales[0][0] >= max(peaks)
    shares = [f"{100 * peak / peaks[0]:.0f} %" for peak in peaks]
    expect(opened.page.locator("#cards tr td.fact:nth-child(11)")).to_have_text(shares)


def test_timelines_and_memory_are_in_the_order_of_the_table(opened: Opened) -> None:
    page = opened.page
    opened.go({"schedule": "1f1b"}, {"schedule": "v-auto"}, {"schedule": "zb-v"})
    for limit, order in (("", ["v-auto", "zb-v", "1f1b"]), ("1", ["zb-v", "1f1b", "v-auto within 1"])):
        page.get_by_label(re.compile("memory limit of schedule")).nth(1 if not limit else 0).fill(limit)
        opened.ready()
        page.get_by_role("button", name="makespan", exact=True).click()
        opened.ready()
        names = [name.split()[0] for name in order]
        assert page.evaluate("[...document.querySelectorAll('#cards select')].map((one) => one.value)") == names
        assert page.evaluate("window.playground.timelines.chart.panels.map((panel) => panel.title)") == order
        labels = "[...document.querySelectorAll('.curves [role=slider]')].map((one) => one.ariaLabel)"
        assert page.evaluate(labels) == [f"memory limit of {name}" for name in order]


def test_a_drag_zooms_above_and_moves_below(opened: Opened) -> None:
    opened.go({"schedule": "1f1b"})
    mouse, chart = opened.page.mouse, "window.playground.timelines.chart"
    total = opened.page.evaluate(f"{chart}.total")

    def drag(name: str, begin: float, end: float) -> list[float]:
        """From one part of an element's width to another; returns what is in view then."""
        box = opened.page.locator(name).bounding_box()
        x, width, y = box["x"] + 62, box["width"] - 62 - 12, box["y"] + box["height"] / 2
        mouse.move(x + begin * width, y)
        mouse.down()
        for step in range(1, 9):
            mouse.move(x + (begin + (end - begin) * step / 8) * width, y)
        mouse.up()
        return [one / total for one in opened.page.evaluate(f"[{chart}.from, {chart}.to]")]

    assert drag("#overview", 0.5, 0.5) == [0, 1]
    assert drag("#overview", 0.5, 0.25) == pytest.approx([0.25, 0.5], abs=0.01)
    assert drag("#chart", 0.5, 0.25) == pytest.approx([0.3125, 0.5625], abs=0.01)
    assert drag("#overview", 0.4, 0.6) == pytest.approx([0.475, 0.725], abs=0.01)


def test_every_microbatch_of_a_width_has_its_number_and_bars_of_memory_say_how_much(opened: Opened) -> None:
    count = "const { fillText } = CanvasRenderingContext2D.prototype; window.drawn = [];"
    count += "CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {"
    count += "if (this.canvas.id === 'chart') drawn.push(text); fillText.call(this, text, ...rest); };"
    opened.page.add_init_script(count)
    opened.go({"schedule": "1f1b"}, microbatches="20")
    drawn = opened.page.evaluate("() => { drawn.length = 0; window.playground.timelines.chart.paint(); return drawn; }")
    # F and BW of four ranks; 10 is on the axis, too
    assert {drawn.count(str(number)) for number in range(1, 20) if number % 10} == {8}
    opened.page.locator("#memory").click()
    expect(opened.page.locator("#legend")).to_contain_text("memory of a rank, the highest bar 4 microbatches")


def test_the_same_timelines_serve_a_page_from_a_file(opened: Opened, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(planned(schedule="zb-v")))
    assert cli.main(["plan", str(plan), "--draw", str(tmp_path / "page.html")]) == 0
    opened.address = "file:"
    page = opened.page
    page.goto((tmp_path / "page.html").as_uri())
    expect(page.locator("#facts tbody tr")).to_have_count(1)
    page.keyboard.press("m")
    expect(page.locator("#memory")).to_have_attribute("aria-pressed", "true")
    box = page.locator("#chart").bounding_box()
    assert box["height"] > 300
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 60)
    expect(page.locator("#status")).to_contain_text("needed by")
    page.keyboard.press("Escape")
    expect(page.locator("#status")).to_be_empty()
    opened.wrong[:] = [one for one in opened.wrong if "page.html" not in one]
