"""``mpipe tune --measure``: its ranks and how they fail, what it refuses, and one real measurement."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tune import forked_ranks, measured_ranks
from tune.measured_ranks import MODEL
from tune.test_measured_numbers import found

from megatron.pipeline.cli import tune_measure
from megatron.pipeline.cli.arguments import whole_numbers
from megatron.pipeline.planner.costmodel import activations, device, estimate
from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.tune.measure import outcome, processes
from megatron.pipeline.tune.measure.clock import MeasureClock, repeated
from megatron.pipeline.tune.measure.rank import Measurements
from megatron.pipeline.tune.measure.sizes import Size, layer_flags, shape

# Ranks, and how they fail.


def run(job: dict[int, str], silence: float = 60.0) -> Any:
    return processes.run(measured_ranks.act, job, 2, lambda _: None, silence)


def test_the_first_rank_has_the_result() -> None:
    told: list[str] = []
    assert processes.run(measured_ranks.act, {}, 2, told.append) == "rank 0 of 2"
    assert told in (["work"], ["start-up", "work"])


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        ({0: "Connection closed by peer", 1: "dies"}, r"rank 1 of 2 died \(signal 9\), at: work"),
        ({1: "out of luck"}, r"rank 1 of 2 failed \(RuntimeError: out of luck\), at: work"),
    ],
)
def test_a_rank_that_dies_or_fails_is_named(job: dict[int, str], expected: str) -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(processes.RankFailed, match=f"^{expected}$"):
        run(job)
    assert set(multiprocessing.active_children()) <= before, "all ranks have been ended"


def test_a_rank_that_hangs_is_named() -> None:
    start, before = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(processes.RankFailed, match=r"^rank 0 of 2 has said nothing for 5 s, at: (work|start-up)$"):
        run({0: "hangs"}, silence=5.0)
    assert time.monotonic() - start < 60, "it was not waited for"
    assert set(multiprocessing.active_children()) <= before


# The command.


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("-o", "--output")
    parser.add_argument("--gpu")
    parser.add_argument("--expert", type=whole_numbers)
    tune_measure.add_flags(parser)
    known, flags = parser.parse_known_args(["--measure", *given])
    known.flags = flags
    return known


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "--measure writes a file for --gpu: give -o FILE.json"),
        (["-o", "x.txt"], "give -o FILE.json, not x.txt"),
        (["-o", "x.json", *MODEL, "--ranks", "0"], "--ranks 0: give from 1 to "),
        (["-o", "x.json", *MODEL, "--ranks", "1"], "one rank has no links to measure"),
        (["-o", "x.json", "--ranks", "2"], "missing --num-layers"),
        (["-o", "x.json", *MODEL, "--ranks", "2", "--tensor", "3"], "--tensor 3: none of these divides"),
        (["-o", "x.json", *MODEL, "--ranks", "2", "--gpu", "A1000"], "unknown GPU 'A1000'"),
    ],
)
def test_refusals(given: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=re.escape(expected)):
        tune_measure.run(options(*given))


def stages(*, count: int = 4, weight: float = 2e-3, **of: Any) -> str:
    """What a rehearsal writes to costs.json, in seconds and bytes; ``of``: what it says of the training."""
    inner = StageCosts(4e-3, 6e-3, weight, 8e6, 3e6)
    ends = replace(inner, forward=9e-3, backward=9e-3)
    return json.dumps(Costs((ends, *[inner] * (count - 2), ends), hop=1e-4).fields() | {"of": of})


@pytest.mark.parametrize(
    ("flags", "more", "words"),
    [
        ([], "", ""),
        (["--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear"], "--expert 2", "4 top 2 over 2 x 1"),
    ],
)
def test_a_rehearsal_has_the_times_of_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Device, flags: list[str], more: str, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    asked = []

    def measures(_: Any, job: Any, *__: Any) -> Measurements:
        asked.append(job.sizes)
        return found(links={"within": base.within})

    monkeypatch.setattr(processes, "run", measures)
    (tmp_path / "costs.json").write_text(stages(hidden_size=32, numbers="bf16 fp8 delayed", collectives="left out"))
    path, model = tmp_path / "m.json", [*MODEL, "--num-layers", "8", *flags]
    given = f"-o {path} --rehearsed {tmp_path}/costs.json --ranks 2 --micro-batch-sizes 2 {more}".split()
    tune_measure.run(options(*given, *model))
    assert asked == [()]  # no layer was timed here
    measured = device.read(str(path))
    assert measured.name.endswith(" fp8 delayed")  # and so no file of times in 16 bits takes these
    args = tune_measure._model(model)
    if words:
        assert estimate.measured_layer(shape(args, Size(1, 2)), measured) is None  # of other experts
        args |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    layer = estimate.measured_layer(shape(args, Size(1, 2)), measured)
    assert layer is not None and layer.experts == words
    assert (layer.forward, layer.backward, layer.weight) == (2e-3, 3e-3, 1e-3)  # two layers a stage
    if words:  # of which experts have the share that they have by the formulas
        of_measured, of_formulas = (
            estimate.estimate(shape(args, Size(1, 2)), linear(4), [2] * 4, gpu).stages[1]
            for gpu in (measured, replace(measured, layers=()))
        )
        assert of_measured.weight == pytest.approx(2e-3 + measured.latency)
        shares = [each.value("weight_experts") / (each.weight - measured.latency) for each in (of_measured, of_formulas)]
        assert shares[0] == pytest.approx(shares[1]) and 0 < shares[0] < 1
    assert estimate.measured_layer(shape(args, Size(1, 1)), measured) is None


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        (stages(count=2), "", "--rehearsed: 2 stages, and the first and the last have embedding and output layer besides"),
        (stages(count=3), "", "--rehearsed: 8 layers are not spread evenly over 3 stages: give the model's flags as it was"),
        (stages(weight=0.0), "", "--rehearsed: F, B and W must each take time, and some take none: rehearse a schedule that"),
        (stages(hidden_size=128), "", "--rehearsed: the file is of --hidden-size 128, not 32: give the flags of its training"),
        (stages(micro_batch_size=4), "", "the file is of --micro-batch-size 4, not 1"),
        (
            stages(collectives="priced"),
            "",
            "its seconds contain what ranks of a layer exchange, which mpipe tune adds by",
        ),
        (stages(), "--tensor 1,2", "--rehearsed is of one size: give one number with --tensor"),
        (stages(), "--expert 1,2", "--rehearsed is of one size: give one number with --expert"),
        (
            stages(),
            "--tensor 2 --num-experts 4 --disable-bias-linear",
            "--rehearsed with experts and --tensor 2: a costs file does not",
        ),
    ],
)
def test_rehearsals_that_do_not_say_what_a_layer_takes(tmp_path: Path, text: str, more: str, words: str) -> None:
    (tmp_path / "costs.json").write_text(text)
    given = f"-o {tmp_path}/m.json --rehearsed {tmp_path}/costs.json --ranks 2 {more}".split()
    with pytest.raises(ValueError, match=re.escape(words)):
        tune_measure.run(options(*given, *MODEL, "--num-layers", "8"))


def test_nothing_is_written_to_a_file_that_is_no_device_or_where_a_rank_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: Device
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    path = tmp_path / "m.json"
    path.write_text('{"name": "half a')
    with pytest.raises(
        ValueError, match=rf"^cannot add to {path}: not a device: invalid JSON .*; move it away, or give another -o$"
    ):
        tune_measure.run(options("-o", str(path), *MODEL, "--ranks", "2"))
    assert path.read_text() == '{"name": "half a'

    def fails(*_: Any) -> None:
        raise processes.RankFailed("rank 1 of 2 died (signal 9), at: work")

    monkeypatch.setattr(processes, "run", fails)
    path.write_text(base.to_json())
    with pytest.raises(SystemExit) as ended:
        tune_measure.run(options("-o", str(path), *MODEL, "--ranks", "2"))
    assert ended.value.code == "mpipe tune --measure: rank 1 of 2 died (signal 9), at: work; nothing was written"
    assert path.read_text() == base.to_json() and list(tmp_path.iterdir()) == [path]


def test_measuring_is_imported_without_torch() -> None:
    code = "import sys, megatron.pipeline.cli.tune_measure, megatron.pipeline.tune.trial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# For real.


def test_links_between_ranks_of_one_node_and_of_two(pool: Pool) -> None:
    for hosts, expected in (
        (["a", "a"], {"hop", "within"}),
        (["a", "a", "b"], {"hop", "within", "between"}),
    ):
        everyone = pool.run(len(hosts), measured_ranks.links_of, hosts)
        assert set(everyone[0]) == expected
        assert all(links == everyone[0] for links in everyone)
        assert all(link.bandwidth > 0 and 0 <= link.latency < 1 for link in everyone[0].values())


@pytest.mark.parametrize(
    "extra", ["", "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --bf16"]
)
def test_a_layer_is_cut_and_split_as_in_training(pool: Pool, extra: str) -> None:
    """With dropout, whose masks training draws by microbatch; and as many weights as a layer of this width has."""
    flags = [*MODEL, *extra.split(), "--ffn-hidden-size", "64"]
    (((seconds, kept), told, weights),) = pool.run(1, measured_ranks.layer_of, flags, 2, 3)
    assert min(seconds) > 0 and kept > 0
    assert told >= 2
    model = tune_measure._model(flags)
    alone = Shape.of(layer_flags(model, Size(2, 3)))
    assert 0 <= weights - alone.layer_weights < 10 * 32 + 96 + 64, "but for norms and biases"
    assert 0.3 < activations.layer_activation(alone) / kept < 1.5


@pytest.mark.rest
def test_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    forked_ranks.use(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "m.json"
    tune_measure.run(options("-o", str(path), *MODEL, "--ranks", "2", "--tensor", "1,2", "--micro-batch-sizes", "1"))
    printed = capsys.readouterr()
    assert f"wrote {path}" in printed.out and "not measured" in printed.out
    assert "mpipe tune --measure: 1/2 of a layer, 1 sample\n" in printed.err
    measured = device.read(str(path))
    assert measured.name.endswith(", 2 ranks") and "not measured: between as hop" in measured.source
    assert len(measured.layers) == len(json.loads(path.read_text())["layers"]) == 2
    one = shape(tune_measure._model(MODEL), Size(2, 1))
    layer = estimate.measured_layer(one, measured)
    assert layer is not None
    assert estimate.layer_seconds(one, measured.with_links(1e30), Links.within(measured.with_links(1e30))).total == pytest.approx(
        layer.forward + layer.backward + layer.weight
    )


# On a GPU.


@pytest.mark.parametrize("asleep", [pytest.param(20_000_000, marks=pytest.mark.cuda)])
def test_a_gpu_is_timed_by_events_in_its_stream(asleep: int) -> None:
    """What the host takes does not count, what the GPU takes does."""
    clock = MeasureClock(torch.device("cuda", torch.cuda.current_device()))

    def parts() -> list[Any]:
        marks = [clock.mark()]
        torch.cuda._sleep(asleep)
        marks.append(clock.mark())
        torch.cuda._sleep(4 * asleep)
        return [*marks, clock.mark()]

    short, long = repeated(clock, parts, iterations=3, warm_up=1)
    assert 2 * short < long < 8 * short


@pytest.mark.parametrize("flags", [pytest.param("--bf16", marks=pytest.mark.cuda)])
def test_a_measurement_on_gpus(tmp_path: Path, flags: str) -> None:
    path = tmp_path / "m.json"
    tune_measure.run(options("-o", str(path), *MODEL, flags, "--tensor", "1", "--micro-batch-sizes", "1", "--gpu", "A100-80GB"))
    measured = device.read(str(path))
    assert measured.peak == device.named("A100-80GB").peak
    assert len(measured.layers) == 1 and measured.to_host > 1e8
    assert measured.beside_communication >= 1 and ("beside_communication" in measured.source) is (torch.cuda.device_count() == 1)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_the_makers_numbers_are_found_by_the_name_that_cuda_gives(name: str, kind: str | None) -> None:
    found = outcome.known(name)
    assert (found and found.name) == kind
