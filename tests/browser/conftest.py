"""One server and one browser for the tests of a module.

playwright keeps an event loop running in the thread, so no test of another module may run before the browser is closed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from browser.opened import CHROMIUM, playwright

    with playwright.sync_playwright() as started:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # which root may not have
        browser = started.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


# A busy machine may take longer than the page waits for what it plans ahead.
_PATIENT = """
const end = AbortSignal.timeout;
AbortSignal.timeout = (ms) => (ms ? new AbortController().signal : end.call(AbortSignal, 0));
"""


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    from browser.opened import TIMEOUT, Opened

    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    context.add_init_script(_PATIENT)
    opened = Opened(context.new_page(), address)
    opened.page.set_default_timeout(TIMEOUT)

    def request(request: Any) -> None:
        if not request.url.startswith((address, "data:", "blob:")):
            opened.wrong.append(f"asked for {request.url}")

    def said(message: Any) -> None:
        refused = "status of 400" in message.text and "/api/" in message.location["url"]  # an answer
        if message.type in ("error", "warning") and not refused:
            opened.wrong.append(message.text)

    opened.page.on("request", request)
    opened.page.on("console", said)
    opened.page.on("pageerror", lambda error: opened.wrong.append(str(error)))
    yield opened
    context.close()
    assert not opened.wrong  # no error, and no request to anywhere else, whatever the test did
