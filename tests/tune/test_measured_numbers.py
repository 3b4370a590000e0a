"""What ``mpipe tune --measure`` makes of times: links, efficiency, which sizes and partners, and the file of a device."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tune.measured_ranks import MODEL

from megatron.pipeline.cli import tune_measure
from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.planner.costmodel import estimate
from megatron.pipeline.planner.costmodel.device import Device, Link, MeasuredLayer
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.shape.gpt import Shape, Work
from megatron.pipeline.tune.measure import fit, links, outcome, rank
from megatron.pipeline.tune.measure.clock import MeasureClock, repeated
from megatron.pipeline.tune.measure.fit import SendingFit
from megatron.pipeline.tune.measure.links import nodes, partners
from megatron.pipeline.tune.measure.rank import Measurements, Timing
from megatron.pipeline.tune.measure.sizes import Size, candidates, dense, layer_flags, shape


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
    p2p = [SendingFit(1, size, link.seconds(size)) for size in (4096, 10**6, 10**8)]
    ring = [SendingFit(3, size / 4, link.all_gather(size, 4)) for size in (4096, 10**6, 10**8)]
    for sent in (p2p, ring, p2p + ring):
        assert fit.link(sent).latency == pytest.approx(latency, abs=1e-9)
        assert fit.link(sent).bandwidth == pytest.approx(1e9)


def test_times_that_no_link_makes() -> None:
    superlinear = fit.link([SendingFit(1, 1000, 1e-6), SendingFit(1, 10**6, 1.0)])
    assert superlinear.latency == 0 and superlinear.bandwidth > 0
    falling = fit.link([SendingFit(1, 1000, 2e-3), SendingFit(1, 10**6, 1e-3)])
    assert (falling.latency, falling.bandwidth) == (1e-3, pytest.approx(1e9))
    single = fit.link([SendingFit(1, 10**6, 1e-3)])
    assert (single.latency, single.bandwidth) == (0.0, pytest.approx(1e9))


def test_the_efficiency_is_the_median_of_what_layers_ask_for(args: Settings, base: Device) -> None:
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
    class Hand(MeasureClock):
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


def test_sizes_that_do_not_divide_the_model_are_left_out(args: Settings) -> None:
    assert candidates(args, (1, 2, 4), (2, 1)) == [Size(1, 1), Size(1, 2), Size(2, 1), Size(2, 2)]
    with pytest.raises(
        ValueError, match="--tensor 4,8: none of these divides 4 of --num-attention-heads, 2 of --num-query-groups"
    ):
        candidates(args, (4, 8), (1,))


def test_a_rank_has_its_part_of_a_layer(args: Settings) -> None:
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
    args: Settings, monkeypatch: pytest.MonkeyPatch
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
    timings, too_large = rank._layers(rank.MeasureJob(args, sizes), torch.device("cpu"), lambda _: None)
    assert Layer.measured == [(4, 1), (4, 3), (2, 1), (2, 1), (4, 1), (4, 3)]
    assert [(one.size, one.seconds.total) for one in timings] == [(Size(1, 1), 12.0), (Size(2, 1), 13.0)], "of the slowest rank"
    assert too_large == [Size(1, 3)]


# The device.


def found_device(args: Settings, timings: tuple[Timing, ...], before: Device | None = None) -> Device:
    links = {"hop": Link(1e-5, 1e9), "within": Link(2e-5, 2e9)}
    return outcome.merged(before, outcome.make(found(timings, links), args, None, "mpipe tune"), Path("m.json"))


def test_what_was_not_measured_is_taken_and_said(args: Settings, base: Device) -> None:
    cpu = found_device(args, ())
    assert (cpu.peak, cpu.between, cpu.latency) == (1e11, Link(1e-5, 1e9), 0)
    assert "between as hop" in cpu.source and "within" not in cpu.source
    alone = outcome.make(found(gpu=True, name="NVIDIA A100-SXM4-80GB"), args, None, "")
    assert (alone.peak, alone.hop, alone.to_host, alone.memory) == (base.peak, base.hop, 1e9, 1e9)
    assert "hop of A100-80GB" in alone.source and "peak of A100-80GB" in alone.source
    assert alone.beside_communication == base.beside_communication and "beside_communication of A100-80GB" in alone.source
    assert cpu.beside_communication == 1 and "beside_communication, 1" in cpu.source
    several = outcome.make(found(gpu=True, name="NVIDIA A100-SXM4-80GB", beside_communication=1.2), args, None, "")
    assert several.beside_communication == 1.2 and "beside_communication" not in several.source
    unknown = outcome.make(found(gpu=True, name="another", links={"hop": Link(0, 1), "within": Link(0, 1)}), args, None, "")
    assert unknown.peak == 1e11
    with pytest.raises(ValueError, match="one rank has no links to measure: say whose to take with --gpu NAME"):
        outcome.make(found(gpu=True, name="another"), args, None, "")


def test_measured_layers_are_found_again_and_others_predicted_from_them(args: Settings) -> None:
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


def test_more_sizes_are_added_to_a_file(args: Settings) -> None:
    before = found_device(args, (timing(Size(1, 1), 8e-3), timing(Size(1, 2), 9e-3)))
    after = found_device(args, (timing(Size(1, 2), 1e-2), timing(Size(2, 1), 4e-3)), before)
    assert [layer.forward for layer in after.layers] == [4e-3, 5e-3, 2e-3]
    with pytest.raises(ValueError, match=r"m.json is of another, and this is a processor: give another -o"):
        found_device(args, (), replace(before, name="another"))
