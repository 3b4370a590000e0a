"""``mpipe tune --measure``: what it makes of times, its ranks and how they fail, and one real measurement."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from pool import Pool
from tune import measured_ranks

from megatron.pipeline.cli import tune_measure
from megatron.pipeline.cli.arguments import whole_numbers
from megatron.pipeline.costmodel import activations, device, estimate
from megatron.pipeline.costmodel.device import Device, Link, MeasuredLayer
from megatron.pipeline.costmodel.links import Links
from megatron.pipeline.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.schedule.core.placement import linear
from megatron.pipeline.shape.gpt import Shape, Work
from megatron.pipeline.tune.measure import fit, links, outcome, processes, rank
from megatron.pipeline.tune.measure.clock import Clock, repeated
from megatron.pipeline.tune.measure.fit import Sending
from megatron.pipeline.tune.measure.links import nodes, partners
from megatron.pipeline.tune.measure.rank import Measurements, Timing
from megatron.pipeline.tune.measure.sizes import Size, candidates, dense, layer_flags, shape

MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16".split()


@pytest.fixture
def args() -> Namespace:
    return tune_measure._model([*MODEL, "--group-query-attention", "--num-query-groups", "2"])


@pytest.fixture
def base() -> Device:
    return device.named("A100-80GB")


def found(timings: tuple[Timing, ...] = (), links: dict[str, Link] | None = None, **others: Any) -> Measurements:
    values: dict[str, Any] = {"name": "a processor", "gpu": False, "torch": "2", "ranks": 2, "nodes": 1, "memory": 1e9}
    values |= {"peak": 1e11, "bandwidth": 1e10, "to_host": 1e9, "to_device": 2e9, "too_large": ()}
    return Measurements(**values | {"timings": timings, "links": links or {}} | others)


def timing(size: Size, total: float, activation: float = 1.0) -> Timing:
    return Timing(size, Work(total / 2, total / 4, total / 4), activation)


# From times to numbers.


@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_a_link_is_found_in_the_times_that_it_makes(latency: float) -> None:
    link = Link(latency, 1e9)
    p2p = [Sending(1, size, link.seconds(size)) for size in (4096, 10**6, 10**8)]
    ring = [Sending(3, size / 4, link.all_gather(size, 4)) for size in (4096, 10**6, 10**8)]
    for sent in (p2p, ring, p2p + ring):
        assert fit.link(sent).latency == pytest.approx(latency, abs=1e-9)
        assert fit.link(sent).bandwidth == pytest.approx(1e9)


def test_times_that_no_link_makes() -> None:
    superlinear = fit.link([Sending(1, 1000, 1e-6), Sending(1, 10**6, 1.0)])
    assert superlinear.latency == 0 and superlinear.bandwidth > 0
    falling = fit.link([Sending(1, 1000, 2e-3), Sending(1, 10**6, 1e-3)])
    assert (falling.latency, falling.bandwidth) == (1e-3, pytest.approx(1e9))
    single = fit.link([Sending(1, 10**6, 1e-3)])
    assert (single.latency, single.bandwidth) == (0.0, pytest.approx(1e9))


def test_the_efficiency_is_the_median_of_what_layers_ask_for(args: Namespace, base: Device) -> None:
    """Layers that take what the formulas say at some efficiency ask for that."""
    layers = []
    for microbatch, efficiency in ((1, 0.3), (2, 0.4), (4, 0.9)):
        one = shape(args, Size(2, microbatch))
        seconds = estimate.computing_seconds(one, replace(base, efficiency=efficiency))
        *size, experts = estimate.layer_size(one)
        layers.append((one, MeasuredLayer(*size, *seconds, experts)))  # type: ignore[arg-type, call-arg]
    assert fit.efficiency(base, layers) == pytest.approx(0.4)
    fast = [(one, replace(layer, forward=1e-12, backward=1e-12, weight=1e-12)) for one, layer in layers]
    assert fit.efficiency(base, fast) == 1.0


def test_parts_are_timed_apart_and_warm_up_does_not_count() -> None:
    class Hand(Clock):
        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))
            self.now, self.settled = 0.0, 0

        def settle(self) -> None:
            self.settled += 1

    hand = Hand()
    runs: Iterator[tuple[float, float]] = iter([(99, 99), (1, 10), (3, 30), (2, 20)])

    def parts() -> list[float]:
        marks = [hand.now]
        for seconds in next(runs):
            hand.now += seconds
            marks.append(hand.now)
        return marks

    assert repeated(hand, parts, iterations=3, warm_up=1) == [2, 20]
    assert hand.settled == 2, "before the first that counts, and before intervals are asked for"


# Which sizes, which partners.


def test_sizes_that_do_not_divide_the_model_are_left_out(args: Namespace) -> None:
    assert candidates(args, (1, 2, 4), (2, 1)) == [Size(1, 1), Size(1, 2), Size(2, 1), Size(2, 2)]
    with pytest.raises(
        ValueError, match="--tensor 4,8: none of these divides 4 of --num-attention-heads, 2 of --num-query-groups"
    ):
        candidates(args, (4, 8), (1,))


def test_a_rank_has_its_part_of_a_layer(args: Namespace) -> None:
    flags = layer_flags(args, Size(2, 4))
    assert (flags.hidden_size, flags.num_attention_heads, flags.num_query_groups, flags.kv_channels) == (32, 2, 1, 8)
    assert (flags.ffn_hidden_size, flags.num_layers, flags.tensor_model_parallel_size) == (64, 1, 1)
    whole, part = shape(args, Size(2, 4)), Shape.of(flags)
    assert estimate.layer_size(whole) == estimate.layer_size(part), "what is built is what it is kept as"
    device = found_device(args, ())
    assert estimate.computing_seconds(whole, device).weight == pytest.approx(estimate.computing_seconds(part, device).weight)


def test_experts_become_one_mlp_as_wide_as_what_a_token_passes() -> None:
    experts = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --disable-bias-linear".split()
    args = dense(tune_measure._model([*MODEL, *experts]))
    assert (args.num_experts, args.ffn_hidden_size) == (None, 48)


def test_partners_come_in_two_turns() -> None:
    assert [partners(index, 4) for index in range(4)] == [[1, None], [0, 2], [3, 1], [2, None]]
    assert [partners(index, 3) for index in range(3)] == [[1, None], [0, 2], [None, 1]]
    assert partners(0, 2) == [1, None]
    assert partners(0, 1) == [None, None]
    assert nodes(["a", "b", "a"]) == [[0, 2], [1]]


def test_the_better_of_two_turns_counts_and_what_is_too_large_is_left_out(
    args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Layer:
        """Takes 1 s in its first measurement, and 1 s less in each further one; three samples are too many for it."""

        seconds = iter(range(10, 0, -1))
        measured: ClassVar[list[tuple[int, int]]] = []

        def __init__(self, flags: Namespace) -> None:
            self.heads = flags.num_attention_heads

        def measure(self, microbatch: int, *_: Any) -> Any:
            self.measured.append((self.heads, microbatch))
            if microbatch == 3:
                raise torch.OutOfMemoryError
            return Work(float(next(self.seconds)), 0.0, 0.0), 1.0

        def close(self) -> None:
            pass

    monkeypatch.setitem(sys.modules, "megatron.pipeline.tune.measure.layers", SimpleNamespace(Layer=Layer))
    monkeypatch.setattr(links, "together", lambda _: None)
    monkeypatch.setattr(rank, "_everyone", lambda mine: [mine, mine and (mine[0].plus(Work(5.0, 0.0, 0.0)), 1.0)])
    sizes = (Size(1, 1), Size(1, 3), Size(2, 1))
    timings, too_large = rank._layers(rank.Job(args, sizes), torch.device("cpu"), lambda _: None)
    assert Layer.measured == [(4, 1), (4, 3), (2, 1), (2, 1), (4, 1), (4, 3)]
    assert [(one.size, one.seconds.total) for one in timings] == [(Size(1, 1), 12.0), (Size(2, 1), 13.0)], "of the slowest rank"
    assert too_large == [Size(1, 3)]


# The device.


def found_device(args: Namespace, timings: tuple[Timing, ...], before: Device | None = None) -> Device:
    links = {"hop": Link(1e-5, 1e9), "within": Link(2e-5, 2e9)}
    return outcome.merged(before, outcome.make(found(timings, links), args, None, "mpipe tune"), Path("m.json"))


def test_what_was_not_measured_is_taken_and_said(args: Namespace, base: Device) -> None:
    cpu = found_device(args, ())
    assert (cpu.peak, cpu.between, cpu.latency) == (1e11, Link(1e-5, 1e9), 0)
    assert "between as hop" in cpu.source and "within" not in cpu.source
    alone = outcome.make(found(gpu=True, name="NVIDIA A100-SXM4-80GB"), args, None, "")
    assert (alone.peak, alone.hop, alone.to_host, alone.memory) == (base.peak, base.hop, 1e9, 1e9)
    assert "hop of A100-80GB" in alone.source and "peak of A100-80GB" in alone.source
    unknown = outcome.make(found(gpu=True, name="another", links={"hop": Link(0, 1), "within": Link(0, 1)}), args, None, "")
    assert unknown.peak == 1e11
    with pytest.raises(ValueError, match="one rank has no links to measure: say whose to take with --gpu NAME"):
        outcome.make(found(gpu=True, name="another"), args, None, "")


def test_measured_layers_are_found_again_and_others_predicted_from_them(args: Namespace) -> None:
    made = found_device(args, (timing(Size(1, 1), 8e-3), timing(Size(2, 1), 4e-3)))
    read = Device.from_json(made.to_json())
    assert read == made
    for size, total in ((Size(1, 1), 8e-3), (Size(2, 1), 4e-3)):
        layer = estimate.measured_layer(shape(args, size), read)
        assert layer is not None and (layer.forward, layer.backward) == (total / 2, total / 4)
    other = shape(args, Size(1, 4))
    assert estimate.measured_layer(other, read) is None
    assert 0 < read.efficiency < 1
    seconds = estimate.layer_seconds(other, read, Links.within(read)).total
    assert seconds == pytest.approx(fit.ideal_seconds(other, read) / read.efficiency)


def test_more_sizes_are_added_to_a_file(args: Namespace) -> None:
    before = found_device(args, (timing(Size(1, 1), 8e-3), timing(Size(1, 2), 9e-3)))
    after = found_device(args, (timing(Size(1, 2), 1e-2), timing(Size(2, 1), 4e-3)), before)
    assert [layer.forward for layer in after.layers] == [4e-3, 5e-3, 2e-3]
    with pytest.raises(ValueError, match=r"m.json is of another, and this is a processor: give another -o"):
        found_device(args, (), replace(before, name="another"))


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
        ({1: "dies"}, r"rank 1 of 2 died \(signal 9\), at: work"),
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
    (tmp_path / "costs.json").write_text(stages(hidden_size=32, numbers="bf16 fp8 delayed", collectives="priced"))
    path, model = tmp_path / "m.json", [*MODEL, "--num-layers", "8", *flags]
    given = f"-o {path} --rehearsed {tmp_path}/costs.json --ranks 2 --micro-batch-sizes 2 {more}".split()
    tune_measure.run(options(*given, *model))
    assert asked == [()]  # no layer was timed here
    measured = device.read(str(path))
    assert measured.name.endswith(" fp8 delayed")  # and so no file of times in 16 bits takes these
    args = tune_measure._model(model)
    if words:
        assert estimate.measured_layer(shape(args, Size(1, 2)), measured) is None  # of other experts
        args.expert_model_parallel_size, args.expert_tensor_parallel_size = 2, 1
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
        (stages(collectives="left out"), "", "what they exchange took no time: rehearse with --rehearse-hop and the name"),
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


def test_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    clock = Clock(torch.device("cuda", torch.cuda.current_device()))

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
