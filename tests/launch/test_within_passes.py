"""What ``mpipe launch`` leaves to run within and beside the passes, counted on every rank of a script of Megatron-LM's."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import reductions
from launch.launched import SIZES, STAND_IN, launch, rank
from marked import rest

BOTH = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 4096 "
ON_A_GPU = (
    "--transformer-impl local --use-cpu-initialization --no-persist-layer-norm --no-rope-fusion --no-masked-softmax-fusion "
    "--no-gradient-accumulation-fusion "
)
PACKED = pytest.param(
    "zb-v --pipeline-packing --sft --micro-batch-size 1 --calculate-per-token-loss --position-embedding-type none", id="packing"
)
FOUR = "--pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights --train-iters 4 "


def counting_buckets(number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """A rank that writes what ``reductions.noted`` has found."""
    with reductions.noted() as found:
        try:
            rank(number, ranks, port, output, arguments)
        finally:
            output.with_name(f"rank-{number}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("schedule", ["zb-v", rest("zb-h1"), rest("interleaved --num-layers-per-virtual-pipeline-stage 1")])
def test_every_rank_reduces_and_gathers_in_buckets_within_its_passes(tmp_path: Path, schedule: str) -> None:
    flags = f"{SIZES} {FOUR} {BOTH} --timing-log-level 1 --pipeline-schedule {schedule}"
    steps = launch(tmp_path, STAND_IN, flags, 4, target=counting_buckets)
    assert len(steps) == 4
    for number in range(4):
        found = reductions.Buckets(*json.loads((tmp_path / f"rank-{number}.json").read_text())[-1])
        assert min(found.groups) > 1 and found.reduced == found.groups, found
        assert sum(early < groups for early, groups in zip(found.early, found.groups, strict=True)) <= 1, found
        assert found.ahead == sum(found.groups) and found.in_order, found
    output = (tmp_path / "output").read_text()
    assert output.count("every pipeline rank reduces gradients in buckets, within its passes") == 1


@pytest.mark.rest
def test_ranks_with_unequal_buckets_wait_for_each_other_as_often(tmp_path: Path) -> None:
    """Megatron-LM's timers of level 1 begin with a barrier of all ranks."""
    flags = f"{SIZES} {BOTH} --timing-log-level 1 --train-iters 3 --pipeline-schedule"
    stock, ours = (launch(tmp_path / name, STAND_IN, f"{flags} {name}", 4) for name in ("stock", "zb-v"))
    assert [loss for loss, _ in ours] == [loss for loss, _ in stock] and len(stock) == 3


@contextmanager
def posing(number: int, output: Path) -> Iterator[list[Any]]:
    """A rank on the device model, which writes what is found."""
    from gpu_model import pose

    pose()
    sys.modules["megatron.legacy.fused_kernels"] = SimpleNamespace(load=lambda _: None)  # type: ignore[assignment]
    found: list[Any] = []
    try:
        yield found
    finally:
        output.with_name(f"rank-{number}.json").write_text(json.dumps(found))


def counting_reads(number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """Where its host waits for the device in each iteration."""
    with posing(number, output) as found:
        from gpu_model import device

        from megatron.pipeline.runtime import packing
        from megatron.pipeline.runtime.iteration import Iteration

        run, give, make = Iteration.run, packing._Packed.__next__, packing.Packing._make
        keeps_waiting = set[str]()  # what stands before the passes of an iteration, or copies to the device while the host waits

        def giving(items: packing._Packed) -> Any:
            item = give(items)
            keeps_waiting.update(f"{name} is not pinned" for name, part in item.items() if not part.is_pinned())
            return item

        def making(one: packing.Packing, *given: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                keeps_waiting.add("packs before its passes")
            return make(one, *given)

        def counting(iteration: Iteration, call: object) -> object:
            device().syncs.clear()
            result = run(iteration, call)  # type: ignore[arg-type]
            syncs = (one for one in device().syncs if one.stream in ("compute", "all"))
            found.append([Path(one.place.partition(":")[0]).name for one in syncs])
            return result

        packs = patch.object(packing._Packed, "__next__", giving), patch.object(packing.Packing, "_make", making)
        with patch.object(Iteration, "run", counting), packs[0], packs[1]:
            try:
                rank(number, ranks, port, output, arguments)
            finally:
                found.append(sorted(keeps_waiting))


def naming_collectives(number: int, ranks: int, port: int, output: Path, arguments: list[str]) -> None:
    """All collectives of a training, each with its group and the ranks in it."""
    with posing(number, output) as found:
        from gpu_model import device
        from gpu_model.trace import Post

        with device().trace.recording() as trace:
            try:
                rank(number, ranks, port, output, arguments)
            finally:
                posts = (item for item in trace if isinstance(item, Post) and item.parts[0].peer is None)
                found += [(post.group, post.ranks, post.what) for post in posts]


@pytest.mark.rest  # on the device model
def test_all_ranks_of_a_group_call_the_same_collectives(tmp_path: Path) -> None:
    """Also where the groups' ranks have other numbers of buckets, and timers wait for all of them."""
    schedule = "zb-v"
    flags = f"{SIZES} {BOTH} {ON_A_GPU} --timing-log-level 1 --train-iters 3 --pipeline-schedule {schedule}"
    assert len(launch(tmp_path, STAND_IN, flags, 4, target=naming_collectives)) == 3
    called: dict[tuple[str, tuple[int, ...]], dict[int, list[str]]] = {}
    for number in range(4):
        for group, members, what in json.loads((tmp_path / f"rank-{number}.json").read_text()):
            called.setdefault((group, tuple(members)), {}).setdefault(number, []).append(what)
    for (group, members), each in called.items():
        assert sorted(each) == sorted(members) and all(one == each[members[0]] for one in each.values()), (group, each)
    assert any("barrier" in each[0] for (_, members), each in called.items() if len(members) == 4), called.keys()


@pytest.mark.rest  # on the device model
@pytest.mark.parametrize("schedule", ["zb-v --vocab-parallel 2", "zb-v --pipeline-watch replan", PACKED])
def test_no_host_reads_the_device_within_an_iteration(tmp_path: Path, schedule: str) -> None:
    """But once at its end: losses and gradients, which Megatron-LM asks about one by one."""
    flags = f"{SIZES} {FOUR} {BOTH} {ON_A_GPU} --pipeline-schedule {schedule}"
    assert len(launch(tmp_path, STAND_IN, flags, 4, target=counting_reads)) == 4
    for number in range(4):
        found = json.loads((tmp_path / f"rank-{number}.json").read_text())
        assert found[2:] == [*[["rerun_state_machine.py"]] * 2, []], (number, found)
