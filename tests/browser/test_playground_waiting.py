"""The page of ``mpipe serve`` in a real browser: what it says and shows while it waits for the server."""

from __future__ import annotations

import re
from typing import Any

from browser.opened import TIMEOUT, Opened, expect, needs_chromium

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


def test_work_on_a_model_is_told_at_once_and_can_be_given_up(opened: Opened) -> None:
    page, held = opened.page, Held()
    page.route("**/api/costs?*", held.take)
    opened.go({"schedule": "zb-h1"})
    model = {"name": "8B.yaml", "mimeType": "text/plain", "buffer": b"num_layers: 8"}
    file, told = page.get_by_label("costs, or a model's YAML"), page.locator("#opened output")
    page.get_by_label("GPU of a model").select_option("H100-80GB")
    file.set_input_files(model)
    text = "predicting costs of 8B.yaml for H100-80GB"
    for _ in range(2):  # also where something else is typed meanwhile
        expect(told).to_have_text(f"{text}: mpipe costs loads torch, and counts what every layer computes and holds")
        expect(page.locator("#message")).to_have_text(text)
        expect(page.locator("#elapsed")).to_have_text(re.compile(r"^\d+ s$"))
        page.get_by_label("p2p time").fill("0.2")
        opened.ready()
    page.get_by_role("button", name="close").click()
    expect(told).to_be_hidden()
    expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)
    expect(page.locator("#elapsed")).to_be_empty()
    file.set_input_files(model)
    expect(told).to_contain_text(text)
    page.wait_for_timeout(100)
    held.routes[-1].fulfill(status=400, json={"message": "mpipe: 8B.yaml: no"})
    expect(page.locator("#wrong-file")).to_have_text("8B.yaml: no")
    expect(told).to_be_hidden()
    expect(page.locator("#message")).to_have_text("all planned", timeout=TIMEOUT)


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
