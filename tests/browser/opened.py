"""A page of the playground in a real browser, and the plans that it must show."""

from __future__ import annotations

import shutil
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

import pytest
from served import command

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium: scripts/install_chromium.sh")

expect = playwright.expect
SMALL = {"pp": "4", "microbatches": "8", "cost": "F=1,B=1.2,W=0.8,comm=0.05", "objective": "makespan"}
TIMEOUT = 60_000  # milliseconds


@dataclass
class Opened:
    """A page of the playground, and what went wrong on it."""

    page: Any
    address: str
    wrong: list[str] = field(default_factory=list)

    def go(self, *plans: dict[str, str], **common: str) -> None:
        """Open the page with these schedules on it, and wait until they are there."""
        small = {"pp": SMALL["pp"], "microbatches": SMALL["microbatches"]}
        given = [*(small | common).items(), *(("plan", urllib.parse.urlencode(plan)) for plan in plans)]
        self.page.goto(f"{self.address}#{urllib.parse.urlencode(given)}")
        self.ready()

    def ready(self) -> None:
        """Wait until every schedule on the page is planned or refused."""
        expect(self.page.locator("#cards tr[aria-busy]").first).to_be_visible(timeout=TIMEOUT)
        expect(self.page.locator("#cards tr[aria-busy=true]")).to_have_count(0, timeout=TIMEOUT)

    def shows(self, passes: list[list[str]], number: int = 0) -> None:
        """Wait until a schedule on the page is this one: a plan that is on its way may not have been asked for yet."""
        deadline = time.monotonic() + TIMEOUT / 1000
        while self.passes(number) != passes:
            assert time.monotonic() < deadline, f"the page shows {self.passes(number)}, not {passes}"
            self.page.wait_for_timeout(50)

    def passes(self, number: int = 0) -> list[list[str]]:
        """Every rank's passes, out of the columns that the timelines are painted from."""
        return self.page.evaluate(
            """(number) => {
                const { panel } = window.playground.shown[number];
                const name = (i) => `${panel.kindNames[panel.kinds[i]]}${panel.numbers[i]}.${panel.chunks[i]}`;
                return panel.first.slice(1).map((end, rank) =>
                    Array.from({ length: end - panel.first[rank] }, (_, i) => name(panel.first[rank] + i)));
            }""",
            number,
        )

    def slider(self, number: int = 0) -> Any:
        return self.page.get_by_role("slider").nth(number)

    def limit(self, number: int = 0) -> float:
        return float(self.slider(number).get_attribute("aria-valuenow"))


def planned(**flags: str) -> dict[str, Any]:
    plan, complaint = command(SMALL | {name.replace("_", "-"): value for name, value in flags.items()})
    assert plan is not None, complaint
    return plan
