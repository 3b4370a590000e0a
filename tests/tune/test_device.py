"""Files of GPUs: what comes with the package can be read, and whatever is wrong with another is one clear error."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.cli.gpu import named_gpu
from megatron.pipeline.planner.costmodel.device import Device, Link, named, of_maker, read, shipped


def told(**changes: Any) -> dict[str, Any]:
    """A device's file, with a measured layer of a former release, and changes by the names of fields."""
    return {**json.loads(named("A100-80GB").to_json()), "layers": [{"hidden": 1024}], **changes}


def test_what_comes_with_the_package_says_where_it_is_from() -> None:
    nvidia = ["A100-40GB", "A100-80GB", "B200", "B300", "GB200", "GB300", "H100-80GB", "H20", "H200"]
    assert shipped() == [*nvidia, "MI300X", "MI355X", "RTX-4090", "RTX-5090", "RTX-6000-Ada", "RTX-PRO-6000"]
    for name in shipped():
        device = named(name)
        assert device.name == name and Device.from_json(device.to_json()) == device
        assert all(word in device.source for word in ("data sheet", "fitted", "assumptions"))


def test_a_file_that_does_not_say_what_communication_costs_is_read_as_if_it_cost_nothing() -> None:
    row = told()
    assert named("H100-80GB").beside_communication == row.pop("beside_communication") == 1.06
    assert Device.from_json(json.dumps(row)).beside_communication == 1


@pytest.mark.parametrize("name", [field.name for field in fields(Device) if field.default is MISSING])
def test_every_field_is_needed(name: str) -> None:
    row = told()
    del row[name]
    with pytest.raises(ValueError, match=rf"^a device: missing {name}; it has name, memory, .*, source$"):
        Device.from_json(json.dumps(row))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 1}, "a device: unknown field 'speed'; it has name, memory"),
        ({"name": 1}, "a device: name must be of type str, got 1"),
        ({"memory": "80 GB"}, "a device: memory must be a number, got '80 GB'"),
        ({"memory": 10**400}, "a device: memory must be a number, got 1000"),  # no float holds it
        ({"peak": True}, "a device: peak must be a number, got True"),
        ({"peak": 0}, "the peak of a device must be a number above 0, got 0"),
        ({"memory": -1}, "the memory of a device must be a number above 0, got -1"),
        ({"bandwidth": float("nan")}, "a device: bandwidth must be a number, got nan"),
        ({"to_host": float("inf")}, "a device: to_host must be a number, got inf"),
        ({"to_device": 0}, "the to_device of a device must be a number above 0, got 0"),
        ({"efficiency": 1.1}, "the efficiency of a device is a share above 0 and of at most 1, got 1.1"),
        ({"latency": 2}, "the latency of a device must be seconds of at least 0 and below 1, got 2"),
        ({"beside_communication": 0.9}, "the beside_communication of a device must be a number of at least 1, got 0.9"),
        ({"within": 5}, "within of a device: expected an object with latency, bandwidth, got 5"),
        ({"hop": {"latency": 0}}, "hop of a device: missing bandwidth; it has latency, bandwidth"),
        ({"between": {"latency": 0, "bandwidth": 0}}, "the bandwidth of between must be a number above 0, got 0"),
        ({"within": {"latency": -1, "bandwidth": 1}}, "the latency of within must be seconds of at least 0 and below 1, got -1"),
        ({"precisions": {}}, "precisions of a device must be a list, got {}"),
        ({"precisions": [3]}, "a precision: expected an object with name, peak"),
        ({"per_node": 1.5}, "a device: per_node must be of type int, got 1.5"),
        ({"weight": 0}, "the weight of a device must be a number above 0, got 0"),
        ({"source": None}, "a device: source must be of type str, got None"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_malformed_field_is_one_clear_error(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(told(**changes)), encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.json: ") as error:
        read(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
    ],
)
def test_the_makers_numbers_are_found_by_the_name_that_cuda_gives(name: str, kind: str | None) -> None:
    found = of_maker(name)
    assert (found and found.name) == kind


@pytest.mark.parametrize(
    ("typed", "kind"),
    [("H100", "H100-80GB"), ("a100", "A100-80GB"), ("h100-80gb", "H100-80GB"), ("RTX 4090", "RTX-4090"), ("rtx5090", "RTX-5090")],
)
def test_names_are_those_that_people_type(typed: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert named(typed).name == kind
    assert named_gpu(Namespace(gpu=typed)) == named(kind)
    said = capsys.readouterr().err
    assert said == ("" if typed.lower() == kind.lower() else f"mpipe: --gpu {typed} is {kind}\n")


@pytest.mark.parametrize("name", ["H", "RTX", "h10", "", "V100"])
def test_an_unknown_one_says_how_a_file_is_made(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"unknown GPU .*; known are A100-40GB, .* For another one, mpipe tune .* --gpu-from COSTS"
    ):
        named(name)


def test_rings() -> None:
    """Thakur et al.: n - 1 steps of a latency and an n-th of all bytes each, twice of them for an all-reduce."""
    link = Link(0.5, 10.0)
    assert link.seconds(40) == 0.5 + 4
    assert link.all_gather(40, 4) == 3 * (0.5 + 1)
    assert link.all_reduce(40, 4) == 6 * (0.5 + 1)
    for nothing in (link.seconds(0), link.all_gather(0, 4), link.all_reduce(40, 1)):
        assert nothing == 0


@pytest.mark.parametrize("name", ["", "\ud800", "two\nlines", "x" * 81])
def test_names_that_cannot_be_shown_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="the name of a device must be up to 80 printable characters"):
        replace(named("A100-80GB"), name=name)
