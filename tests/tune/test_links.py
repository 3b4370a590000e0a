"""Which link a group of ranks gets, and what a layer waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.pipeline.costmodel.device import Link, named
from megatron.pipeline.costmodel.links import Links, hop_seconds, layer_communication
from megatron.pipeline.shape.gpt import Experts, Holding, Shape

DEVICE = replace(named("A100-80GB"), within=Link(1e-6, 200e9), hop=Link(2e-6, 50e9), between=Link(3e-6, 20e9))
SHAPE = Shape.plain(8, 1024, 16, 512, 1024)


def cards(count: int) -> Link:
    """So many network cards of a node."""
    return Link(3e-6, min(200e9, count * 20e9))


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "data", "pipeline", "expected"),
    [
        # hop, tensor, context, expert, data on nodes of 8
        (1, 1, 1, 1, 8, (DEVICE.hop, *[DEVICE.within] * 4)),
        (8, 1, 1, 1, 4, (DEVICE.between, *[DEVICE.within] * 4)),
        (8, 1, 1, 2, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, DEVICE.within, cards(1))),
        (2, 1, 1, 8, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, DEVICE.within, cards(4))),
        (2, 8, 1, 1, 2, (DEVICE.between, DEVICE.within, cards(4), DEVICE.within, cards(4))),
        (1, 1, 16, 16, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, DEVICE.between, cards(8))),
        (16, 1, 1, 1, 1, (DEVICE.hop, cards(8), DEVICE.within, DEVICE.between, DEVICE.within)),
        # Of groups of three neighbours, the third is on two nodes; alone on a node none is.
        (3, 1, 1, 1, 4, (DEVICE.between, cards(8), DEVICE.within, DEVICE.between, DEVICE.within)),
        (3, 1, 1, 1, 2, (DEVICE.hop, *[DEVICE.within] * 4)),
    ],
)
def test_groups_get_their_links(
    tensor: int, context: int, expert: int, data: int, pipeline: int, expected: tuple[Link, ...]
) -> None:
    links = Links.of(DEVICE, 8, tensor, context, expert, data, pipeline)
    assert (links.hop, links.tensor, links.context, links.expert, links.data) == expected


def test_tensor_parallel_ranks_wait_for_two_all_reduces() -> None:
    given = replace(SHAPE, holding=Holding(tensor=4))
    expected = 2 * DEVICE.within.all_reduce(2 * 512 * 1024, 4)
    for parallel in (False, True):  # a gather and a scatter take as long as the all-reduce that they replace
        shape = replace(given, holding=replace(given.holding, sequence_parallel=parallel))
        assert layer_communication(shape, Links.within(DEVICE), (0.0, 0.0)) == pytest.approx((expected, expected))


def test_keys_and_values_go_round_beside_attention() -> None:
    given, links = replace(SHAPE, holding=Holding(context=4)), Links.within(DEVICE)
    around = DEVICE.within.all_gather(2 * 512 * 2 * 1024, 4)
    assert layer_communication(given, links, (0.0, 0.0)) == pytest.approx((around, 2 * around))
    assert layer_communication(given, links, (around, around)) == pytest.approx((0.0, around))
    assert layer_communication(given, links, (1.0, 1.0)) == (0.0, 0.0)


def test_tokens_go_to_their_experts_and_back() -> None:
    experts = Experts((True, False) * 4, 8, 2, 512, 0, 4096, parallel=4)
    given, links = replace(SHAPE, experts=experts), Links.within(DEVICE)
    expected = 0.5 * 2 * DEVICE.within.all_to_all(2 * 2 * 512 * 1024, 4)  # half of the layers have experts
    assert layer_communication(given, links, (0.0, 0.0)) == pytest.approx((expected, expected))


def test_messages_between_stages() -> None:
    assert hop_seconds(SHAPE, Links.within(DEVICE)) == pytest.approx(2e-6 + 2 * 512 * 1024 / 50e9)
    halved = replace(SHAPE, holding=Holding(tensor=2, sequence_parallel=True))
    assert hop_seconds(halved, Links.within(DEVICE)) == pytest.approx(2e-6 + 512 * 1024 / 50e9)
