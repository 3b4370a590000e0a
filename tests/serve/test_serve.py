"""The server of ``mpipe serve``: what it answers is what the commands answer, and it stays awake and to itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

pytest.importorskip("uvicorn", reason="the server needs starlette and uvicorn, which machines with a GPU may lack")

from served import ask, command, get, serving, untimed

from megatron.pipeline import cli
from megatron.pipeline.cli.serve import requested
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.serve import server, workers
from megatron.pipeline.planner.serve.answers import FLAGS, LONG, Answer, planned, work
from megatron.pipeline.planner.serve.workers import Late, Workers

SMALL = {"pp": "4", "microbatches": "8"}
ENDLESS = {"microbatches": "7000", "pp": "64", "schedule": "v-auto"}  # for a test


@pytest.mark.parametrize(
    "flags",
    [
        {"schedule": "1f1b"},
        {"schedule": "zb-v", "cost": "F=1,B=1.2,W=0.8,comm=0.05", "objective": "makespan"},
        {"schedule": "v-auto", "memory-limit": "2.5", "chunks": "2"},
        {"schedule": "zb-h1", "cost": "comm[1-2]=3", "slow": "2=1.5"},
        {"schedule": "seq-1f1b", "splits": "4"},
        {"schedule": "gis-h", "offload": "full", "cost": "D2H=0.5,H2D=0.5"},
        {"schedule": "zb-h1", "vocab-parallel": "2", "vocab-cost": "S=0.4,T=0.3"},
        {"schedule": "auto", "memory-limit": "2", "pp": "2", "microbatches": "4"},
    ],
    ids=lambda flags: "-".join(flags.values()).replace(",", "-"),
)
def test_a_plan_is_the_one_of_the_command(address: str, flags: dict[str, str]) -> None:
    expected, complaint = command(SMALL | flags)
    status, told = ask(address, SMALL | flags)
    assert status == 200 and not complaint
    assert untimed(told["plan"]) == expected
    assert expected is not None and told["panel"]["counts"] == [len(row) for row in expected["passes"]]


@pytest.mark.parametrize(
    "flags",
    [
        {"schedule": "zb-w"},
        {"schedule": "1f1b", "pp": "many"},
        {"schedule": "1f1b", "microbatches": "-3"},
        {"schedule": "1f1b", "pp": "5000"},
        {"schedule": "1f1b", "microbatches": "100000000"},
        {"schedule": "1f1b", "chunks": "3"},
        {"schedule": "1f1b", "memory-limit": "2"},
        {"schedule": "v-auto", "cost": "F=1,G=2"},
        {"schedule": "1f1b", "cost": "comm[4-5]=2"},
        {"schedule": "1f1b", "slow": "4=2"},
        {"schedule": "auto", "memory-limit": "0.2"},
        {"schedule": "file:/etc/passwd"},
        {"schedule": "zb-h1", "vocab-cost": "S=1"},
    ],
    ids=lambda flags: "-".join(flags.values()).replace(",", "-").replace("/", "."),
)
def test_bad_parameters_are_refused_in_the_command_s_words(address: str, flags: dict[str, str]) -> None:
    _, complaint = command(SMALL | flags)
    assert complaint.startswith("mpipe: ") and "\n" not in complaint
    status, told = ask(address, SMALL | flags)
    assert status == 400 and told.pop("message") == complaint
    assert told in ({}, {"least": told.get("least")})


@pytest.mark.parametrize(("name", "least"), [("zb-v", 4), ("v-auto", 1), ("zb-auto", 1)])
def test_the_least_limit_that_is_named_works_and_a_smaller_one_does_not(address: str, name: str, least: float) -> None:
    flags = SMALL | {"schedule": name}
    assert ask(address, flags)[1]["least"] == least
    assert "plan" in ask(address, flags | {"memory-limit": str(least)})[1]
    refused = ask(address, flags | {"memory-limit": str(least - 0.1)})[1]
    assert "plan" not in refused and refused["least"] == least


def test_what_is_missing_is_named(address: str) -> None:
    _, complaint = command({"schedule": "1f1b", "pp": "4"})
    assert "--microbatches" in complaint
    assert ask(address, {"schedule": "1f1b", "pp": "4", "microbatches": ""}) == (400, {"message": complaint})


@pytest.mark.parametrize("name", ["output", "o", "json", "balance", "help", "-help"])
def test_flags_that_read_write_or_take_minutes_are_not_for_pages(address: str, name: str) -> None:
    status, told = ask(address, SMALL | {"schedule": "1f1b", name: "/tmp/never"})
    assert status == 400 and told["message"].startswith(f"mpipe: unknown parameter {name!r}; allowed are schedule, pp, ")


def test_a_page_may_ask_for_every_other_flag() -> None:
    told = set(vars(cli.parse(["plan", "--schedule=1f1b", "--pp=1", "--microbatches=1"])))
    own = {"run", "flags", "output", "json", "balance", "print_completion", "lengths", "attention", "order"}
    own |= {"files", "text", "draw", "memory", "consecutive", "trace"}
    assert {name.replace("_", "-") for name in told - own} == set(FLAGS)


def test_downloads_are_what_the_commands_write(address: str, tmp_path: Path) -> None:
    flags = {"schedule": "v-half", **SMALL}
    expected, _ = command(flags)
    status, text = ask(address, flags, ".json")
    assert status == 200 and untimed(json.loads(text)) == expected
    (tmp_path / "plan.json").write_bytes(text)
    for name, *rest in (["export", "-o", "x.csv"], ["plan", "--memory", "--draw", "x.svg"]):
        with contextlib.chdir(tmp_path):
            assert cli.main([name, "plan.json", *rest]) == 0
    assert ask(address, flags, ".csv") == (200, (tmp_path / "x.csv").read_bytes())
    status, picture = ask(address, flags, ".svg")
    drawn = (tmp_path / "x.svg").read_text()
    assert status == 200 and b"<!-- v-half -->" in picture and picture.decode().count("<!--") == drawn.count("<!--")
    assert ask(address, {"schedule": "seq-1f1b", **SMALL}, ".csv")[0] == 400
    assert ask(address, flags, ".png")[0] == 404
    _, _, headers = get(f"{address}api/plan.csv?{urllib.parse.urlencode(flags)}")
    assert headers["content-disposition"] == 'attachment; filename="v-half.csv"' and headers["content-type"].startswith(
        "text/csv"
    )


def test_only_the_own_page_may_ask(address: str) -> None:
    port = urllib.parse.urlsplit(address).port
    for host in ("localhost", "127.0.0.1"):
        assert get(address, {"Host": f"{host}:{port}"})[0] == 200
    for host in ("evil.example", f"127.0.0.1.evil.example:{port}", ""):
        assert get(address, {"Host": host})[0] == 400
    assert get(f"{address}api/about", {"Sec-Fetch-Site": "same-origin"})[0] == 200
    assert get(f"{address}api/about", {"Sec-Fetch-Site": "cross-site"})[0] == 403
    for origin in ("https://evil.example", "null"):  # a page that was opened from a file has the latter
        assert get(f"{address}api/about", {"Origin": origin})[0] == 403
    assert get(f"{address}api/about", {"Origin": address.rstrip("/")})[0] == 200


HALVES = {
    "nothing": "",
    "half a header": "GET / HTTP/1.1\r\nHost: local",
    "half a body": "POST /api/costs?name=costs.json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{}",
    "half a second one": "GET /web/icon.svg HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHo",
}


def test_a_client_that_goes_away_leaves_no_word() -> None:
    with serving() as (address, process):
        at = urllib.parse.urlsplit(address)
        for sent in HALVES.values():
            with socket.create_connection((at.hostname, at.port)) as client:
                client.sendall(sent.encode())
                time.sleep(0.1)  # so that it is read before it ends
        assert get(f"{address}api/about")[0] == 200
        process.terminate()
        said, _ = process.communicate(timeout=30)
        assert not said


@pytest.mark.parametrize("path", ["", "web/playground.js", "view/paint.js", "api/about", "api/plan", "nothing"])
def test_every_answer_keeps_the_page_to_its_server(address: str, path: str) -> None:
    _, _, headers = get(address + path)
    assert headers["content-security-policy"].startswith("default-src 'self'; ")
    assert headers["x-content-type-options"] == "nosniff" and "access-control-allow-origin" not in headers


def test_no_file_outside_is_served(address: str) -> None:
    for path in ("web/../server.py", "web/%2e%2e/server.py", "web//etc/passwd", "view/../page.py"):
        assert get(address + path)[0] == 404


def test_a_port_that_is_taken_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "--no-browser", "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"mpipe: cannot listen at 127.0.0.1, port {port} (Address already in use): give another --port, or 0 for any\n"
    )


@pytest.mark.parametrize("flags", [["--port", "70000"], ["--port", "x"], ["--workers", "0"], ["--host", ""]])
def test_bad_flags_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        cli.main(["serve", "--no-browser", *flags])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and f"argument {flags[0]}: " in said and "expected a" in said and flags[1] in said


def test_a_host_that_is_every_address_goes_by_the_machine_s_name() -> None:
    assert server._names("127.0.0.1") == ["localhost", "127.0.0.1", "127.0.0.1"]
    assert socket.gethostname() in server._names("0.0.0.0") and "0.0.0.0" not in server._names("0.0.0.0")


def test_the_address_that_is_printed_answers() -> None:
    for host, expected in (("0", socket.gethostname()), ("::1", "[::1]")):
        if host == "::1" and not _has_ipv6_loopback():
            continue
        with serving("--host", host) as (address, _):
            parts = urllib.parse.urlsplit(address)
            assert parts.netloc == f"{expected}:{parts.port}"
            at = f"http://[::1]:{parts.port}/" if host == "::1" else f"http://127.0.0.1:{parts.port}/"
            assert get(at, {"Host": parts.netloc})[0] == 200


def _has_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_host_that_does_not_exist_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--no-browser", "--host", "nosuch.invalid"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mpipe: cannot listen at nosuch.invalid (") and said.endswith(
        ": give a name or an address of this machine\n"
    )
    assert "while attempting" not in said


def test_a_browser_is_opened_where_there_are_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(server.webbrowser, "open", opened.append)
    monkeypatch.setattr(server.sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    server._open("there")
    assert not opened
    monkeypatch.setenv("DISPLAY", ":0")
    server._open("there")
    assert opened == ["there"]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=lambda ending: ending.name)
def test_with_plans_that_are_made_it_ends_quietly_and_at_once(ending: signal.Signals) -> None:
    with serving() as (address, process), ThreadPoolExecutor(2) as threads:
        assert ask(address, {"schedule": "1f1b", **SMALL})[0] == 200  # all is up
        asked = [threads.submit(ask, address, ENDLESS | {"microbatches": str(7000 - at)}) for at in range(2)]
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 3  # two workers, and what starts them
        wait_until_busy(family)
        os.kill(process.pid, ending)
        said, _ = process.communicate(timeout=30)
        assert not said and (ending != signal.SIGINT or process.returncode in (0, 130))
        _, alive = psutil.wait_procs(family, timeout=20)
        assert not alive
        for one in asked:
            if ending == signal.SIGKILL:
                assert one.exception(30) is not None
            else:
                assert one.result(30) == (503, {"message": workers.ENDING})


def test_an_interrupt_of_all_its_processes_while_they_start_is_quiet() -> None:
    with serving(start_new_session=True) as (_, process):
        time.sleep(0.3)  # anywhere in the start
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C does
        said, _ = process.communicate(timeout=30)
        assert not said


def wait_until_busy(family: list[psutil.Process]) -> None:
    """Until one of the processes computes."""
    started = time.monotonic()
    while time.monotonic() < started + 30:
        if any(process.cpu_percent(0.1) > 20 for process in family):
            return
    raise AssertionError("no process computes")


def test_answers_are_kept_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEPT", 12)
    kept = server._Kept()
    for name in "abc":
        kept.put(((name, ""),), Answer(200, b"1234"))
        kept.get((("a", ""),))
    assert [kept.get(((name, ""),)) is not None for name in "abc"] == [True, False, True] and kept.size == 10
    kept.put((("a", ""),), Answer(200, b"12"))
    assert kept.size == 8


def test_fixed_orders_are_less_work_than_searches_and_small_ones_less_than_large() -> None:
    small, large = SMALL, {"pp": "64", "microbatches": "256"}
    names = ["1f1b", "interleaved", "v-half", "v-auto", "auto"]
    works = [work(tuple((sizes | {"schedule": name}).items())) for sizes in (small, large) for name in names]
    assert works[:5] == sorted(works[:5]) and works[5:] == sorted(works[5:]) and works[6] < LONG < works[7]
    assert work(tuple(ENDLESS.items())) > LONG
    for given in ({"pp": "64"}, {"pp": "many", "microbatches": "2000"}, {"pp": "9" * 5000, "microbatches": "8"}):
        assert work(tuple((given | {"schedule": "v-auto"}).items())) < LONG


@pytest.mark.parametrize("cost", ["F=1,B=1.2,W=0.8,comm=0.05", "F=1,B=1,W=1,comm=0.5", "F=2,B=1,W=3,comm=0"])
def test_the_page_compare_and_auto_plan_the_same_schedules(cost: str, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The page once had one number of chunks of all families but interleaved, so its front was none."""
    sizes = SMALL | {"cost": cost}
    status, body, _ = get(f"{address}api/candidates?{urllib.parse.urlencode(SMALL)}")
    plans = [json.loads(planned(tuple((sizes | one).items()), requested).body)["plan"] for one in json.loads(body)]
    assert status == 200 and [one for one in json.loads(body) if one["schedule"] == "v-auto" and one.get("chunks") == "4"]
    assert cli.main(["compare", *(f"--{name}={value}" for name, value in sizes.items()), "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert not compared["refused"]
    auto, _ = command(sizes | {"schedule": "auto"})
    figures = [
        sorted((one["makespan"], max(one["peak_activation"])) for one in found)
        for found in (plans, compared["schedules"], auto["candidates"])  # type: ignore[index]
    ]
    assert figures[0] == figures[1] == figures[2] and len(figures[0]) > 25


def test_on_one_rank_there_are_only_schedules_that_train(address: str) -> None:
    status, body, _ = get(f"{address}api/candidates?pp=1&microbatches=8")
    assert status == 200 and {one["schedule"] for one in json.loads(body)} == set(families.trained(1)) != set(families.FAMILIES)
    wrong = dict.fromkeys(("pp=0", "pp=many", "pp=5000"), "expected a whole number from 1 to 4096")
    wrong |= {f"pp=8&microbatches={10**9}": "expected a whole number from 1 to 3000000"}
    for query, words in (wrong | {"pp=8&microbatches=200000": "are over 3000000 passes"}).items():
        status, body, _ = get(f"{address}api/candidates?{query}")
        assert status == 400 and words in json.loads(body)["message"]


@pytest.mark.parametrize(
    "flags", [{"schedule": "v-auto", "memory-limit": "3"}, {"schedule": "zb-v", "cost": "B=1.2,W=0.8,BW=1.8"}]
)
def test_a_first_plan_is_as_good_as_valid_and_the_next_no_longer(flags: dict[str, str]) -> None:
    query = tuple((SMALL | flags).items())
    first, then = (json.loads(planned(query, requested, quick).body)["plan"] for quick in (True, False))
    assert first["makespan"] >= then["makespan"] and first["lower_bound"] == then["lower_bound"]
    assert max(first["peak_activation"]) <= (first["memory_limit"] or 4)
    assert first["schedule"] == flags["schedule"] and "panel" in json.loads(planned(query, requested, True).body)


def test_a_plan_that_takes_too_long_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any, **__: Any) -> None:
        raise Late("took more than 60 s")

    monkeypatch.setattr(Workers, "run", run)
    app = server.application(requested)
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def receive() -> Any:
        await asyncio.sleep(60)

    scope = {"type": "http", "method": "GET", "path": "/api/plan", "headers": [(b"host", b"localhost")]}
    asyncio.run(app({**scope, "query_string": urllib.parse.urlencode(ENDLESS).encode()}, receive, send))
    assert told[0]["status"] == 503
    assert json.loads(told[1]["body"])["message"] == (
        "took more than 60 s, which is all that the page has for a plan; "
        "run mpipe plan --microbatches=7000 --pp=64 --schedule=v-auto"
    )
