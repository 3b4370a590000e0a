"""``mpipe serve``: a local page to try schedules on."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Sequence

from megatron.pipeline.cli.arguments import Commands, add_command
from megatron.pipeline.flags.flag_types import number_type
from megatron.pipeline.planner import Request

_port = number_type(int, "a port between 0 and 65535", 0, 65535)
_workers = number_type(int, "a number of processes between 1 and 64", 1, 64)


def add(commands: Commands) -> None:
    help = "open a page in the browser to try schedules, costs and limits"
    parser = add_command(commands, "serve", help, run, "mpipe serve", "mpipe serve --port 0 --workers 4 --no-browser")
    parser.flag("--host", "address to listen at (default: 127.0.0.1, which only this machine reaches); the page is for that "
        "name, localhost and 127.0.0.1 only", _host, "127.0.0.1", metavar="NAME")  # fmt: skip
    parser.add_argument("--port", type=_port, default=8321, metavar="N", help="port to listen at (default: 8321; 0: any)")
    parser.flag("--workers", "processes that plan (default: one per core, at least 2 and at most 4)", _workers, metavar="N")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and open no browser")


def run(options: argparse.Namespace) -> None:
    """Serve until interrupted.

    Raises:
        ValueError: nothing can listen at the host and the port.
    """
    from megatron.pipeline.planner.serve.server import serve  # its libraries, which other commands do not need

    serve(requested, options.host, options.port, options.workers, browser=not options.no_browser)


def requested(flags: Sequence[str]) -> Request:
    """Request of ``mpipe plan`` with these flags.

    Raises:
        ValueError: they are wrong; the message is the command's.
    """
    from megatron.pipeline.cli import parse
    from megatron.pipeline.cli.request import requested

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            options = parse(["plan", *flags])
    except SystemExit:  # how argparse refuses flags
        raise ValueError(complaint.getvalue().strip().removeprefix("mpipe: ")) from None
    return requested(options)


def _host(text: str) -> str:
    if not text.strip():
        raise ValueError(f"{text!r}: expected a name or an address (0.0.0.0 for every one of this machine)")
    return text
