"""Costs files and models that a page of ``mpipe serve`` opens: plans at them are those of the command."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from served import ask, command, get, serving, untimed

from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.serve.opened import MOST_BYTES, Opened
from megatron.pipeline.serve.workers import ENDING

ROOT = Path(__file__).parent.parent
SMALL = {"pp": "4", "microbatches": "8"}
BYTES = Costs(tuple(StageCosts(0.01 + 0.001 * stage, 0.02, 0.01, activation=3e8) for stage in range(8)), hop=1e-4).to_json()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (address, _):
        yield address


def opened(address: str, name: str, text: str | bytes, **more: str) -> tuple[int, dict[str, Any]]:
    """What the server says of a file that a page opens."""
    url = f"{address}api/costs?{urllib.parse.urlencode({'name': name, **more})}"
    status, body, _ = get(url, sent=text.encode() if isinstance(text, str) else text, timeout=180)
    return status, json.loads(body)


def test_a_plan_at_the_costs_of_a_file_is_the_one_of_the_command(address: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(BYTES)
    status, about = opened(address, "some/costs.json", BYTES)
    assert status == 200
    assert about == {
        "costs": about["costs"], "name": "costs.json", "stages": 8, "unit": "MiB", "size": 2**20, "microbatch": 8 * 3e8,
        "vocabulary": False, "copies": False,
    }  # fmt: skip
    assert json.loads(get(f"{address}api/costs/{about['costs']}")[1]) == about
    for limit in ("", "2GiB"):
        flags = SMALL | {"schedule": "v-auto"} | ({"memory-limit": limit} if limit else {})
        expected, complaint = command(flags | {"costs": str(path)})
        _, told = ask(address, flags | {"costs": about["costs"]})
        assert not complaint and untimed(told["plan"]) == expected
        assert max(told["plan"]["peak_activation"]) <= 2 * 2**30 or not limit
    assert ask(address, flags | {"costs": about["costs"]}, ".csv")[0] == 200
    _, told = ask(address, flags | {"costs": about["costs"], "memory-limit": "1MiB"})
    assert "MiB" in told["message"] and told["least"] > 2**20


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("costs.json", "{}", 'mpipe: costs.json: not costs: expected {"hop": .., "stages": [{"forward"'),
        ("costs.json", "[" * 100_000, "mpipe: costs.json: "),
        ("costs.json", b"\xff\xfe", "mpipe: the file is no text: give a costs file (.json) or a model's flags (.yaml)"),
        ("costs.json", " " * (MOST_BYTES + 1), "mpipe: the file has more than 4 MiB"),
        ("model.yaml", "num_layers: 8", "mpipe: --gpu: unknown GPU ''; known are A100-40GB"),
    ],
    ids=["empty", "deep", "bytes", "long", "yaml"],
)
def test_a_file_without_costs_is_refused(address: str, name: str, text: str | bytes, message: str) -> None:
    status, told = opened(address, name, text)
    assert status == 400 and told["message"].startswith(message)


def test_a_file_that_is_not_there_any_more_is_named(address: str) -> None:
    again = "mpipe serve does not have this costs file any more: open it again"
    assert ask(address, SMALL | {"schedule": "1f1b", "costs": "/etc/passwd"}) == (404, {"message": f"mpipe: {again}"})
    status, body, _ = get(f"{address}api/costs/0123")
    assert (status, json.loads(body)) == (404, {"message": f"mpipe: {again}"})


def test_a_model_is_cut_into_the_stages_of_its_flags(address: str) -> None:
    model = (ROOT / "configs" / "tiny.yaml").read_text()
    status, about = opened(address, "tiny.yaml", model, gpu="H100-80GB")
    assert status == 200, about
    assert about["name"] == "tiny.yaml" and about["unit"] == "MiB" and about["stages"] >= 4
    _, told = ask(address, SMALL | {"schedule": "zb-v", "costs": about["costs"]})
    assert told["plan"]["makespan"] > 0
    status, told = opened(address, "tiny.yaml", model.replace("num-layers: 8", "num-layers: 3"), gpu="H100-80GB")
    assert status == 400 and "3" in told["message"] and "\n" not in told["message"]


@pytest.mark.rest
def test_a_model_of_experts_gets_the_ranks_that_share_them(address: str) -> None:
    status, about = opened(address, "moe.yaml", (ROOT / "configs" / "mixtral" / "8x7B.yaml").read_text(), gpu="H100-80GB")
    assert status == 200, about
    _, told = ask(address, SMALL | {"schedule": "v-half", "costs": about["costs"], "overlap-experts": "on", "microbatches": "20"})
    assert told["plan"]["overlap"]["braids"] > 0


def test_names_of_files_are_plain(address: str) -> None:
    status, about = opened(address, "../" + 300 * "x" + "<script>\n.json", BYTES)
    assert (
        status == 200
        and about["name"].endswith("<script>_.json".replace("<", "_").replace(">", "_"))
        and len(about["name"]) == 80
    )


def test_the_server_ends_with_what_makes_a_model_s_costs() -> None:
    text = (ROOT / "configs" / "llama3" / "70B.yaml").read_text()
    with serving() as (address, process), ThreadPoolExecutor(1) as asking:
        answer = asking.submit(opened, address, "70B.yaml", text, gpu="H100-80GB")
        made = making(process.pid)
        process.terminate()
        assert answer.result() == (503, {"message": ENDING})
        process.wait(20)
        psutil.wait_procs(made, 5)
        assert not any(one.is_running() for one in made)


def test_a_page_that_goes_away_ends_what_makes_its_model_s_costs() -> None:
    text = (ROOT / "configs" / "llama3" / "70B.yaml").read_text()
    with serving() as (address, process):
        at = urllib.parse.urlsplit(address)
        with socket.create_connection((at.hostname, at.port)) as client:
            head = f"POST /api/costs?name=70B.yaml&gpu=H100-80GB HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}"
            client.sendall(f"{head}\r\n\r\n{text}".encode())
            made = making(process.pid)
        _, alive = psutil.wait_procs(made, 20)
        assert not alive
        assert opened(address, "costs.json", BYTES)[0] == 200
        process.terminate()
        said, _ = process.communicate(timeout=30)
        assert not said


def making(server: int) -> list[psutil.Process]:
    """What makes a model's costs, as soon as there is any."""
    deadline = time.monotonic() + 30
    while not (made := [one for one in psutil.Process(server).children(recursive=True) if "costs" in one.cmdline()]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return made


def test_models_are_read_for_pages_of_this_machine_alone() -> None:
    with Opened(models=False) as elsewhere:
        assert elsewhere.gpus == []
        with pytest.raises(ValueError, match=r"a model's flags are read at 127\.0\.0\.1 only; run mpipe costs"):
            asyncio.run(elsewhere.add("model.yaml", "num_layers: 8", "H100-80GB"))


def test_the_files_opened_last_are_kept() -> None:
    with Opened(models=False) as files:
        ids = [
            asyncio.run(files.add("costs.json", Costs((StageCosts(1 + number, 1, 1),)).to_json(), ""))["costs"]
            for number in range(70)
        ]
        with pytest.raises(ValueError, match="open it again"):
            files.path(ids[0])
        assert Path(files.path(ids[-1])).is_file() and len(list(Path(files.path(ids[-1])).parent.iterdir())) == 64
    assert not Path(files._folder.name).exists()
