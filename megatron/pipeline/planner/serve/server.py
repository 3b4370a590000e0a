"""The server of ``mpipe serve``: the page's files, plans and downloads, all from this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import webbrowser
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron.pipeline.planner.planning.request import MOST_CHUNKS, MOST_PASSES, MOST_RANKS
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.serve import answers
from megatron.pipeline.planner.serve.answers import Answer, Ask, Query
from megatron.pipeline.planner.serve.opened import MOST_BYTES, Opened, Unknown
from megatron.pipeline.planner.serve.workers import Busy, Late, Workers, default_count
from megatron.pipeline.planner.view.page import WEB as VIEW
from megatron.pipeline.planner.view.page import looks

WEB = Path(__file__).parent / "web"
KEPT = 128 << 20  # bytes of answers and queries; the ones used longest ago go first
_EVERY_ADDRESS = ("0.0.0.0", "::")
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_OF_FAMILIES = ("name", "chunks", "any_chunks", "searches", "uses_limits")
_PRELOAD = ["megatron.pipeline.planner.serve.answers", "megatron.pipeline.planner.schedule.search.search"]


@dataclass
class _Kept:
    """Answers by query, as many as fit into ``KEPT`` with their queries."""

    answers: OrderedDict[Query, Answer] = field(default_factory=OrderedDict)
    size: int = 0

    def get(self, query: Query) -> Answer | None:
        if query in self.answers:
            self.answers.move_to_end(query)
        return self.answers.get(query)

    def put(self, query: Query, answer: Answer) -> None:
        if query in self.answers:
            self.size -= _size(query, self.answers.pop(query))
        self.answers[query] = answer
        self.size += _size(query, answer)
        while self.size > KEPT:
            self.size -= _size(*self.answers.popitem(last=False))


def _size(query: Query, answer: Answer) -> int:
    return len(answer.body) + sum(len(text.encode()) for pair in query for text in pair)


class _Api:
    """Answers to a page: each method is one of its addresses.

    Args:
        ask, workers: see ``application``.
    """

    def __init__(self, ask: Ask, workers: int | None) -> None:
        self._ask = ask
        self.pool = Workers(workers or default_count(), partial(_warm_up, ask), [*_PRELOAD, ask.__module__], long=answers.LONG)
        self._kept, self._opened = _Kept(), Opened()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        with self._opened:
            async with self.pool:
                yield

    async def plan(self, request: Request) -> Response:
        """``/api/plan?schedule=..&pp=..&..``, the flags of ``mpipe plan``; with ``ahead=1`` it waits for all others, with
        ``quick=1`` it is the first good plan, at once."""
        given = dict(request.query_params)
        ahead, quick = (given.pop(name, "") != "" for name in ("ahead", "quick"))
        return await _while_wanted(request, self._planned(_query(given), ahead, quick))

    async def download(self, request: Request) -> Response:
        """``/api/plan.json?..``, ``.csv`` or ``.svg``: what the commands write of a plan."""
        suffix = request.path_params["suffix"]
        if suffix not in answers.DOWNLOADS:
            return JSONResponse({"message": f"no .{suffix} here; there are {', '.join(answers.DOWNLOADS)}"}, 404)
        response = await _while_wanted(request, self._file(_query(request.query_params), suffix))
        if response.status_code == 200:
            name = "".join(letter for letter in request.query_params.get("schedule", "plan") if letter.isalnum() or letter == "-")
            response.headers["content-disposition"] = f'attachment; filename="{name}.{suffix}"'
        return response

    async def open_costs(self, request: Request) -> Response:
        """``POST /api/costs?name=..``: a costs file."""
        return JSONResponse(self._opened.add(request.query_params.get("name", ""), await _text(request)))

    async def candidates(self, request: Request) -> Response:
        """``/api/candidates?pp=8&microbatches=32``: the schedules that the page plans ahead."""
        return JSONResponse(answers.candidates(_query(request.query_params)))

    async def costs(self, request: Request) -> Response:
        """``/api/costs/ID``: what there is to know of a file that was opened."""
        return JSONResponse(self._opened.about(request.path_params["id"]))

    async def _planned(self, query: Query, ahead: bool = False, quick: bool = False) -> Answer:
        id = dict(query).get("costs", "")
        answer, costs = self._kept.get(query), self._opened.path(id)
        if answer is None:
            if quick:
                return await self.pool.run(answers.planned, query, self._ask, quick, costs)
            try:
                answer = await self.pool.run(
                    answers.planned, query, self._ask, False, costs, ahead=ahead, work=answers.work(query)
                )
            except Late as error:
                run = answers.command(query, self._opened.name(id))
                raise Busy(f"{error}, which is all that the page has for a plan; run {run}") from None
            self._kept.put(query, answer)
        return answer

    async def _file(self, query: Query, suffix: str) -> Answer:
        answer = await self._planned(query)
        if answer.status != 200:
            return answer
        return await self.pool.run(answers.download, json.dumps(json.loads(answer.body)["plan"]).encode(), suffix)


async def _about(_: Request) -> Response:
    """``/api/about``: choices of the page, their limits, and the looks of passes."""
    rows = [{name: getattr(family, name) for name in _OF_FAMILIES} for family in families.FAMILIES.values()]
    most = {"pp": MOST_RANKS, "passes": MOST_PASSES, "chunks": MOST_CHUNKS}
    return JSONResponse({"families": rows, "auto": families.AUTO, "most": most, **looks()})


async def _index(_: Request) -> Response:
    return FileResponse(WEB / "index.html")


def application(ask: Ask, host: str = "127.0.0.1", workers: int | None = None) -> Starlette:
    """The server as an ASGI application.

    Args:
        ask: from the flags of ``mpipe plan`` to what they ask for; a function of a module, for other processes to import.
        host: what it listens at: requests for any other host but localhost are refused, so that no page of another site can
            ask through a name of its own that leads here.
        workers: how many processes plan; by default one per core, at least 2 and at most 4.
    """
    api = _Api(ask, workers)
    app = Starlette(
        routes=[
            Route("/", _index),
            Route("/api/about", _about),
            Route("/api/plan", api.plan),
            Route("/api/candidates", api.candidates),
            Route("/api/costs", api.open_costs, methods=["POST"]),
            Route("/api/costs/{id}", api.costs),
            Route("/api/plan.{suffix}", api.download),
            Mount("/web", StaticFiles(directory=WEB)),
            Mount("/view", StaticFiles(directory=VIEW)),
        ],
        middleware=[Middleware(_OwnPageOnly), Middleware(TrustedHostMiddleware, allowed_hosts=_names(host), www_redirect=False)],
        exception_handlers={ValueError: _refused, Busy: _busy, ClientDisconnect: _gone},
        lifespan=api.lifespan,
    )
    app.state.refuse = api.pool.refuse
    return app


class _OwnPageOnly:
    """Adds headers that keep a page to this server, and refuses what pages of other sites make a browser ask for."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"].startswith("/api/") and _is_of_another_site(dict(scope["headers"])):
            refused = JSONResponse({"message": "this is for the page of mpipe serve only"}, 403)
            await refused(scope, receive, send_with_headers)
        else:
            await self._app(scope, receive, send_with_headers)


def _is_of_another_site(headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether a page of another site made a browser ask; older browsers say where the page is from alone."""
    origin = headers.get(b"origin")  # "null" of a page that has none, such as a file
    of_another = origin is not None and origin.partition(b"://")[2] != headers.get(b"host")
    return headers.get(b"sec-fetch-site") == b"cross-site" or of_another


async def _refused(_: Request, error: Exception) -> Response:
    return JSONResponse({"message": f"mpipe: {error}"}, 404 if isinstance(error, Unknown) else 400)


async def _busy(_: Request, error: Exception) -> Response:
    return JSONResponse({"message": str(error)}, 503)


async def _gone(*_: object) -> Response:
    return Response(status_code=499)


def _query(given: Mapping[str, str]) -> Query:
    """The query in a fixed order, so that equal parameters are equal queries."""
    return tuple(sorted(given.items()))


async def _while_wanted(request: Request, made: Awaitable[Answer]) -> Response:
    """The response, which is cancelled when the browser disconnects.

    Raises:
        ClientDisconnect: it did.
    """
    making, leaving = asyncio.ensure_future(made), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({making, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not making.done():
            raise ClientDisconnect
        answer = making.result()
        return Response(answer.body, answer.status, media_type=answer.type)
    finally:
        making.cancel()
        leaving.cancel()


async def _text(request: Request) -> str:
    """The text of a file that a page sends.

    Raises:
        ValueError: it is too long, or no text.
        ClientDisconnect: it ends before.
    """
    received = b""
    async for part in request.stream():
        received += part
        if len(received) > MOST_BYTES:
            raise ValueError(f"the file has more than {MOST_BYTES >> 20} MiB: give one with the costs of stages alone")
    try:
        return received.decode()
    except UnicodeDecodeError:
        raise ValueError("the file is no text: give a costs file (.json) of mpipe costs or mpipe rehearse") from None


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _warm_up(ask: Ask) -> None:
    """Load what the first plan needs, before it is asked for."""
    answers.planned((("schedule", "v-auto"), ("pp", "3"), ("microbatches", "7"), ("cost", "F=1,B=1.3,W=0.9,comm=0.1")), ask)


def _names(host: str) -> list[str]:
    """The names by which a browser may ask for a server that listens at a host."""
    own = [socket.gethostname(), socket.getfqdn()] if host in _EVERY_ADDRESS else [_in_address(host)]
    return ["localhost", "127.0.0.1", *own]


def _in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Server(uvicorn.Server):
    """Ends quietly, and at once: also when its terminal is closed, and with plans that are being made.

    Args:
        refuse: called first; it answers all who wait for a plan.
    """

    def __init__(self, config: uvicorn.Config, refuse: Callable[[], None]) -> None:
        super().__init__(config)
        self._refuse = refuse

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before == signal.SIG_DFL:  # else it is nohup's
                signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._refuse()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # who does not read an answer is cut off, without a word
        await super().shutdown(sockets)


def serve(ask: Ask, host: str, port: int, workers: int | None, browser: bool) -> None:
    """Serve the page until interrupted; see ``application`` for the arguments.

    Raises:
        ValueError: nothing can listen there.
    """
    listening = _listen(host, port)
    at, port = listening.getsockname()[:2]
    host = at if at in _EVERY_ADDRESS else host  # "0" is one of them, too
    address = f"http://{_in_address(socket.gethostname() if host in _EVERY_ADDRESS else host)}:{port}/"
    print(f"mpipe serves at {address} (Ctrl-C ends it)", flush=True)
    app = application(ask, host, workers)
    config = uvicorn.Config(app, http="h11", log_level="warning", timeout_graceful_shutdown=1)
    server = _Server(config, app.state.refuse)
    if browser:
        _open(address)
    with contextlib.suppress(KeyboardInterrupt), listening:
        server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4]
    except OSError as error:
        raise ValueError(f"cannot listen at {host} ({error.strerror}): give a name or an address of this machine") from None
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ValueError(f"cannot listen at {host}, port {port} ({why}): give another --port, or 0 for any") from None


def _open(address: str) -> None:
    """Open the page where there is a browser with windows; it waits until the server runs."""
    if sys.platform.startswith("linux") and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        return  # what there may be would take over the terminal
    with contextlib.suppress(webbrowser.Error):
        webbrowser.open(address)
