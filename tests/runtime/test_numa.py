"""Binding to the CPUs beside a GPU, on made-up machines: what is bound, and that nothing is ever raised."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.pipeline.runtime.offload import numa

GPU = torch.device("cuda", 1)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four CPUs; this process may use CPUs 2 to 5."""
    monkeypatch.setattr(numa, "_SYSTEM", tmp_path)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    allowed = {2, 3, 4, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed), raising=False)

    def bind(_: int, cpus: set[int]) -> None:
        allowed.intersection_update(cpus)

    monkeypatch.setattr(os, "sched_setaffinity", bind, raising=False)
    for node, cpus in enumerate(["0-3", "4-6,7"]):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cpus + "\n")
    (tmp_path / "bus/pci/devices/0000:dc:00.0").mkdir(parents=True)
    return tmp_path


def place(machine: Path, node: int) -> None:
    (machine / "bus/pci/devices/0000:dc:00.0/numa_node").write_text(f"{node}\n")


def test_binds_to_the_allowed_cpus_of_the_node(machine: Path) -> None:
    place(machine, 1)
    assert numa.bind(GPU) == "NUMA: bound to 2 CPUs of node 1, next to GPU 1 (0000:dc:00.0)"
    assert os.sched_getaffinity(0) == {4, 5}
    assert "nothing to bind: all 2 CPUs" in numa.bind(GPU)
    place(machine, 0)
    assert "may not use the CPUs of node 0" in numa.bind(GPU)


def test_says_why_nothing_is_bound(machine: Path) -> None:
    assert "FileNotFoundError" in numa.bind(GPU)
    place(machine, -1)
    assert "does not say which node GPU 1" in numa.bind(GPU)
    assert "on the CPU" in numa.bind(torch.device("cpu"))
    assert os.sched_getaffinity(0) == {2, 3, 4, 5}


def test_reads_lists_of_cpus() -> None:
    assert numa.cpus("0-2,5,8-9\n") == {0, 1, 2, 5, 8, 9}
    assert numa.cpus("\n") == set()
