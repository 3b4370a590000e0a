"""Which link a group of ranks gets."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from costmodel.drawn_shapes import shape

from megatron.pipeline.planner.costmodel.device import Link, named
from megatron.pipeline.planner.costmodel.estimate import estimate
from megatron.pipeline.planner.costmodel.links import Links, Spread, with_messages
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.shape.description import Ranks

A100 = replace(named("A100-80GB"), beside_communication=1.0)
DEVICE = replace(A100, within=Link(1e-6, 200e9), hop=Link(2e-6, 50e9), between=Link(3e-6, 20e9))


def cards(count: int) -> Link:
    """So many network cards of a node."""
    return Link(3e-6, min(200e9, count * 20e9))


@pytest.mark.parametrize(
    ("tensor", "context", "expert", "data", "pipeline", "expected", "together"),
    [
        # hop, tensor, context, data on nodes of 8, and ranks of a group of experts on one node
        (1, 1, 1, 1, 8, (DEVICE.hop, *[DEVICE.within] * 3), None),
        (8, 1, 1, 1, 4, (DEVICE.between, *[DEVICE.within] * 3), None),
        (8, 1, 1, 2, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, cards(1)), None),
        (2, 1, 1, 8, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, cards(4)), None),
        (2, 8, 1, 1, 2, (DEVICE.between, DEVICE.within, cards(4), cards(4)), None),
        (1, 1, 16, 16, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, cards(8)), 8),
        (2, 1, 8, 8, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, cards(4)), 4),
        (1, 1, 12, 12, 1, (DEVICE.hop, DEVICE.within, DEVICE.within, cards(8)), 1),  # one group is 8 + 4, and the next 4 + 8
        (16, 1, 1, 1, 1, (DEVICE.hop, cards(8), DEVICE.within, DEVICE.within), 1),
        # Of groups of three neighbours, the third is on two nodes; alone on a node none is.
        (3, 1, 1, 1, 4, (DEVICE.between, cards(8), DEVICE.within, DEVICE.within), 1),
        (3, 1, 1, 1, 2, (DEVICE.hop, *[DEVICE.within] * 3), None),
    ],
)
def test_groups_get_their_links(
    tensor: int, context: int, expert: int, data: int, pipeline: int, expected: tuple[Link, ...], together: int | None
) -> None:
    links = Links.of(DEVICE, 8, Ranks(tensor, context, expert, data, pipeline))
    assert (links.hop, links.tensor, links.context, links.data) == expected
    assert links.expert == Spread(DEVICE.within, DEVICE.between, together)


@pytest.mark.parametrize(
    ("tensor", "data", "pipeline", "far"),
    [(2, 1, 8, {3, 7}), (1, 2, 16, {3, 7, 11, 15}), (3, 1, 4, {1, 2, 3}), (1, 1, 8, set()), (8, 1, 4, {0, 1, 2, 3})],
)
def test_neighbours_on_one_node_are_near(tensor: int, data: int, pipeline: int, far: set[int]) -> None:
    """Of stages of three GPUs on nodes of 8 the third has a GPU on the second node, and the next ones are there."""
    links = Links.of(DEVICE, 8, Ranks(tensor, 1, 1, data, pipeline))
    assert {rank for rank, near in enumerate(links.near) if not near} == far and links.near_hop == DEVICE.hop
    given = replace(shape(Random("links")), quantized=None)
    placement = linear(pipeline)
    costs = with_messages(estimate(given, placement, [1] * pipeline, DEVICE, links=links), given, links)
    costs.check_placement(placement)
    slow, fast = DEVICE.between.seconds(given.hidden_bytes), DEVICE.hop.seconds(given.hidden_bytes)
    for rank in range(pipeline):
        other = (rank + 1) % pipeline
        seconds = slow if rank in far else fast
        assert costs.message(rank, other) == costs.message(other, rank) == pytest.approx(seconds)
    assert bool(costs.links) == (0 < len(far) < pipeline)


def test_ranks_with_the_same_experts_are_as_far_apart_as_others_have_other_experts() -> None:
    links = Links.of(DEVICE, 8, Ranks(2, 1, 2, 16, 1))
    assert (links.experts, links.expert_data, links.data) == (DEVICE.within, cards(2), cards(4))
    assert Links.of(DEVICE, 8, Ranks(1, 1, 16, 16, 2)).expert_data == DEVICE.within, "no other rank has them"


def test_experts_are_cut_in_their_own_way() -> None:
    """``--expert-tensor-parallel-size``: ranks with other experts are that far apart, and need not be as many as share MLPs."""
    links = Links.of(DEVICE, 8, Ranks(2, 1, 16, 8, 2, expert_tensor=1))
    assert (links.experts, links.expert_data, links.expert_tensor) == (cards(8), DEVICE.within, DEVICE.within)
    assert links.expert == Spread(DEVICE.within, DEVICE.between, 8)
    on_a_node = Links.of(DEVICE, 8, Ranks(2, 1, 8, 16, 1, expert_tensor=1))
    assert (on_a_node.experts, on_a_node.expert_data) == (DEVICE.within, cards(1))
    assert on_a_node.expert == Spread(DEVICE.within, DEVICE.between)
    assert Links.of(DEVICE, 8, Ranks(2, 1, 2, 16, 1, expert_tensor=16)).expert_tensor == cards(8)


def test_each_rank_sends_to_each() -> None:
    """Over the links within a node and between nodes at once; a part goes to every other rank."""
    spread = Spread(Link(0.5, 10.0), Link(1.0, 2.0))
    assert spread.all_to_all(40, 4) == 3 * (0.5 + 1)
    assert spread.all_to_all(40, 1) == spread.all_to_all(0, 4) == 0
    assert replace(spread, together=2).all_to_all(40, 4) == 2 * (1 + 10 / 2)
    slow = Spread(Link(50.0, 10.0), Link(1.0, 2.0), together=2)
    assert slow.all_to_all(40, 4) == 50 + 1
