"""``mpipe serve`` as a process of its own, for tests."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

from megatron.pipeline import cli


@contextlib.contextmanager
def serving(*flags: str, start_new_session: bool = False) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of a server, with a slash behind it, and its process, which is gone after this."""
    command = [sys.executable, "-m", "megatron.pipeline.cli", "serve", "--no-browser", "--port", "0", "--workers", "2", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=start_new_session,
        preexec_fn=_hears_hangups,  # noqa: PLW1509  # sets a signal, takes no lock
    ) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            found = re.search(r"http://\S+/", said)
            assert found, said
            yield found[0], process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def _hears_hangups() -> None:
    """Also where the tests run under nohup, whose children ignore SIGHUP."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def command(flags: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """What ``mpipe plan --json`` prints for these flags, without the seconds that it took; and what it complains about."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
        cli.main(["plan", *(f"--{name}={value}" for name, value in flags.items()), "--json"])
    plan = json.loads(out.getvalue()) if out.getvalue() else None
    return plan and untimed(plan), err.getvalue().strip()


def untimed(plan: dict[str, Any]) -> dict[str, Any]:
    """A plan without the seconds that it took, which no two have in common."""
    for told in [plan, *plan.get("candidates", [])]:
        told.pop("plan_seconds", None)
    return plan


def get(
    url: str, headers: dict[str, str] | None = None, sent: bytes | None = None, timeout: float = 60.0
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of an answer; ``sent`` is posted."""
    request = urllib.request.Request(url, data=sent, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, response.read(), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def ask(address: str, flags: dict[str, str], suffix: str = "") -> tuple[int, Any]:
    status, body, _ = get(f"{address}api/plan{suffix}?{urllib.parse.urlencode(flags)}")
    return status, body if suffix else json.loads(body)
