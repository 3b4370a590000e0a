"""How soon does the page of ``mpipe serve`` show what a limit was dragged to? Prints a Markdown table for the documentation.

    python benchmarks/playground.py [--schedules NAME,..] [--json FILE]

A headless Chromium presses an arrow key on the slider of the memory limit, from the largest limit to the least that there is a
plan for, at p=8 and m=32: once as soon as the page is there (cold: what was not yet planned ahead is waited for), and once when
all limits are planned ahead (warm). A time is from the key to the painted plan, as the page itself measures it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import urllib.parse
from pathlib import Path
from typing import Any

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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="1f1b,interleaved,zb-v,v-half,zb-auto,v-auto", metavar="NAME,..")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time there")
    options = parser.parse_args()
    times = {name: measure(name) for name in options.schedules.split(",")}
    if options.json:
        options.json.write_text(json.dumps(times))
    print("| dragged | limits | cold: median ms | worst | planned ahead after s | warm: median ms | worst |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, told in times.items():
        cold, warm = told["cold"], told["warm"]
        figures = [statistics.median(cold), max(cold), told["ahead"], statistics.median(warm), max(warm)]
        print(f"| `{name}` | {len(cold)} | " + " | ".join(f"{figure:.0f}" for figure in figures) + " |")


def measure(name: str) -> dict[str, Any]:
    """Milliseconds of every limit in a server of its own, cold and warm, and seconds until all were planned ahead."""
    command = [sys.executable, "-m", "megatron.pipeline.cli", "serve", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+/", server.stdout.readline())
            assert found
            with sync_playwright() as started:
                flags = ["--no-sandbox"] if os.geteuid() == 0 else []
                browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                state = COSTS | {"pp": "8", "microbatches": "32", "plan": f"schedule={name}"}
                page.goto(f"{found[0]}#{urllib.parse.urlencode(state)}")
                expect(page.locator("#cards tr[aria-busy=false] td.fact").first).not_to_be_empty(timeout=TIMEOUT)
                cold = drag(page)
                begin = page.evaluate("performance.now()")
                expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
                ahead = (page.evaluate("performance.now()") - begin) / 1000
                warm = drag(page)
                browser.close()
        finally:
            server.terminate()
    return {"cold": cold, "warm": warm, "ahead": ahead}


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
