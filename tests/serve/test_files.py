"""Costs files that a page of ``mpipe serve`` opens: plans at them are those of the command."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
from served import ask, command, get, untimed

from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.serve.opened import MOST_BYTES, Opened

SMALL = {"pp": "4", "microbatches": "8"}
BYTES = Costs(tuple(StageCosts(0.01 + 0.001 * stage, 0.02, 0.01, activation=3e8) for stage in range(8)), hop=1e-4).to_json()


def opened(address: str, name: str, text: str | bytes) -> tuple[int, dict[str, Any]]:
    """What the server says of a file that a page opens."""
    url = f"{address}api/costs?{urllib.parse.urlencode({'name': name})}"
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
        ("costs.json", b"\xff\xfe", "mpipe: the file is no text: give a costs file (.json) of mpipe costs or mpipe rehearse"),
        ("costs.json", " " * (MOST_BYTES + 1), "mpipe: the file has more than 4 MiB"),
        ("model.yaml", "num_layers: 8", "mpipe: model.yaml: not costs"),
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


def test_names_of_files_are_plain(address: str) -> None:
    status, about = opened(address, "../" + 300 * "x" + "<script>\n.json", BYTES)
    assert (
        status == 200
        and about["name"].endswith("<script>_.json".replace("<", "_").replace(">", "_"))
        and len(about["name"]) == 80
    )


def test_the_files_opened_last_are_kept() -> None:
    with Opened() as files:
        ids = [files.add("costs.json", Costs((StageCosts(1 + number, 1, 1),)).to_json())["costs"] for number in range(70)]
        with pytest.raises(ValueError, match="open it again"):
            files.path(ids[0])
        assert Path(files.path(ids[-1])).is_file() and len(list(Path(files.path(ids[-1])).parent.iterdir())) == 64
    assert not Path(files._folder.name).exists()
