"""The page of ``mpipe serve`` in a real browser: what it says and shows while it waits for the server."""

from __future__ import annotations

import re
from typing import Any

from browser.opened import Opened, expect, needs_chromium

pytestmark = needs_chromium


class Held:
    """Requests of a page that do not reach the server until they are let go."""

    def __init__(self) -> None:
        self.routes: list[Any] = []
        self._holds = True

    def take(self, route: Any) -> None:
        if self._holds:
            self.routes.append(route)
        else:
            route.continue_()

    def let_go(self) -> None:
        self._holds = False
        for route in self.routes:
            route.continue_()


def test_nothing_of_a_schedule_stays_while_another_is_planned_in_its_place(opened: Opened) -> None:
    page, held = opened.page, Held()
    opened.go({"schedule": "zb-v"}, {"schedule": "1f1b"}, pp="2", microbatches="4")
    page.route(re.compile("schedule=auto"), held.take)
    page.get_by_label("schedule 1", exact=True).select_option("auto")
    row = page.locator("#cards tr[aria-busy]").first
    expect(row.locator("td.fact")).to_have_text(["planning", *6 * [""]])
    expect(page.locator("#elapsed")).to_have_text(re.compile(r"^\d+ s$"))
    titles = "window.playground.timelines.chart.panels.map((panel) => panel.title)"
    assert page.evaluate(titles) == ["1f1b"]
    expect(page.locator(".curves").first).to_be_hidden()
    held.let_go()
    opened.ready()
    assert page.evaluate(titles)[0].startswith("auto: ")
    assert page.evaluate("window.playground.shown[0].curves.title") == page.evaluate(titles)[0]
