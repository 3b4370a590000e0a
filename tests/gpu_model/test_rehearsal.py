"""Ranks that rehearse on one GPU: what they send goes through host memory, in the order of streams, and numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from marked import whole
from pool import Pool
from runtime.test_rehearsal_groups import everything, expected, in_a_world_of_its_own
from training.short_runs import metrics

from gpu_model.mutations import TWO
from gpu_model.recorded import racing
from gpu_model.test_trainer import races
from megatron.pipeline.distributed.device import local_device


def collectives() -> tuple[dict[str, object], list[str]]:
    with racing() as races:
        found = in_a_world_of_its_own(lambda: everything("cuda"))
    return found, races


def test_collectives_and_messages_go_through_host_memory(gpus: Pool) -> None:
    assert gpus.run(2, collectives) == [(expected(0), []), (expected(1), [])]


@pytest.mark.parametrize("flags", ["zb-v --vocab-parallel 2", whole("stock"), whole("zb-h1 --bf16")])
def test_a_rehearsal_on_one_gpu_has_the_numbers_of_training(gpus: Pool, data: str, tmp_path: Path, flags: str) -> None:
    flags = f"{data} {TWO} --pipeline-schedule {flags}"
    gpus.run(2, races, f"{flags} --metrics {tmp_path}/plain.jsonl")
    rehearsal = f"--rehearse --rehearse-dir {tmp_path} --metrics {tmp_path}/rehearsed.jsonl"
    assert gpus.run(2, in_a_world_of_its_own, races, f"{flags} {rehearsal}") == [[], []]
    assert metrics(tmp_path / "rehearsed.jsonl") == metrics(tmp_path / "plain.jsonl")


def test_ranks_share_gpus_where_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert local_device(True) == (5, False)  # no GPU at all
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device(True) == (1, True)
    assert local_device(False) == (5, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert local_device(True) == (5, False)
