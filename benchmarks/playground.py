"""How soon does the page of ``mpipe serve`` show what a limit was dragged to? Prints a Markdown table for the documentation.

    python benchmarks/playground.py [--schedules NAME,..] [--json FILE]
    python benchmarks/playground.py --picture docs/images/playground.png

A headless Chromium presses an arrow key on the slider of the memory limit, from the largest limit to the least that there is a
plan for, at p=8 and m=32: once as soon as the page is there (cold: what was not yet planned ahead is waited for), and once when
all limits are planned ahead (warm). A time is from the key to the painted plan, as the page itself measures it. Only families
that make different schedules of different limits have a slider. With --picture, the page is drawn instead: front, table and
timelines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import command_line, markdown
from playwright.sync_api import expect, sync_playwright

COSTS = {"F": "1", "B": "1.2", "W": "0.8", "comm": "0.05"}
TIMEOUT = 300_000  # milliseconds

# Presses a key on the slider, and resolves to the milliseconds until its plan is painted.
PRESS = """async (key) => {
    const [one] = window.playground.shown;
    const begin = performance.now();
    const slider = document.querySelector('[role=slider]');
    slider.dispatchEvent(new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true }));
    do await new Promise(requestAnimationFrame); while (one.busy || one.drawn !== one.wanted);
    return performance.now() - begin;
}"""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", default="zb-v,zb-auto,v-auto", metavar="NAME,..")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the page with three schedules, and measure nothing")
    options = parser.parse_args()
    if options.picture:
        return draw(options.picture)
    times = {name: measure(name) for name in options.schedules.split(",")}
    if options.json:
        options.json.write_text(json.dumps(times))
    rows = []
    for name, found in times.items():
        cold, warm = found["cold"], found["warm"]
        figures = [statistics.median(cold), max(cold), found["ahead"], statistics.median(warm), max(warm)]
        rows.append([f"`{name}`", len(cold), *(f"{figure:.0f}" for figure in figures)])
    columns = ("dragged", "limits", "cold: median ms", "worst", "planned ahead after s", "warm: median ms", "worst")
    print(markdown(columns, rows), end="")


def draw(picture: Path) -> None:
    """Write what the page shows of three schedules, once all is planned."""
    with opened("schedule=zb-v", "schedule=v-auto&memory-limit=5", "schedule=1f1b", width=1000) as page:
        expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
        whole, last = page.locator("#plans").bounding_box(), page.locator("#scroller").bounding_box()
        clip = {"x": 0, "y": whole["y"], "width": 1000, "height": last["y"] + last["height"] - whole["y"]}
        page.screenshot(path=picture, full_page=True, clip=clip)


def measure(name: str) -> dict[str, Any]:
    """Milliseconds of every limit in a server of its own, cold and warm, and seconds until all were planned ahead."""
    with opened(f"schedule={name}") as page:
        cold = drag(page)
        begin = page.evaluate("performance.now()")
        expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
        ahead = (page.evaluate("performance.now()") - begin) / 1000
        return {"cold": cold, "warm": drag(page), "ahead": ahead}


@contextlib.contextmanager
def opened(*plans: str, width: int = 1280) -> Iterator[Any]:
    """The page of a server of its own, with these schedules on it, all of which are planned."""
    command = [sys.executable, "-m", "megatron.pipeline.cli", "serve", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+/", server.stdout.readline())
            assert found
            with sync_playwright() as started:
                flags = ["--no-sandbox"] if os.geteuid() == 0 else []
                browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
                page = browser.new_page(viewport={"width": width, "height": 900})
                state = [*COSTS.items(), ("pp", "8"), ("microbatches", "32"), *(("plan", plan) for plan in plans)]
                page.goto(f"{found[0]}#{urllib.parse.urlencode(state)}")
                expect(page.locator("#cards tr[aria-busy=false]")).to_have_count(len(plans), timeout=TIMEOUT)
                yield page
                browser.close()
        finally:
            server.terminate()


def drag(page: Any) -> list[float]:
    """Milliseconds of every limit, from the largest down to the least that there is a plan for."""
    page.evaluate(PRESS, "End")
    least = page.get_by_role("slider").get_attribute("aria-valuemin")
    times = []
    while page.evaluate("window.playground.shown[0].values['memory-limit']") != least:
        times.append(page.evaluate(PRESS, "ArrowDown"))
        if page.evaluate("!!window.playground.shown[0].answer.message"):
            break
    return times


if __name__ == "__main__":
    main()
