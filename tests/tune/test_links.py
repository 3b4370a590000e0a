"""Which link a group of ranks gets, and what a layer waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.pipeline.planner.costmodel.device import Link, named
from megatron.pipeline.planner.costmodel.links import Links, Spread, exchange_seconds, hop_seconds, layer_communication
from megatron.pipeline.planner.shape.activation_policy import ActivationPolicy
from megatron.pipeline.planner.shape.description import Ranks
from megatron.pipeline.planner.shape.experts import Experts
from megatron.pipeline.planner.shape.gpt import Shape

A100 = replace(named("A100-80GB"), beside_communication=1.0)
DEVICE = replace(A100, within=Link(1e-6, 200e9), hop=Link(2e-6, 50e9), between=Link(3e-6, 20e9))
SHAPE = Shape.plain(8, 1024, 16, 512, 1024)


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


def test_tensor_parallel_ranks_wait_for_two_all_reduces() -> None:
    given = replace(SHAPE, policy=ActivationPolicy(tensor=4))
    expected = 2 * DEVICE.within.all_reduce(2 * 512 * 1024, 4)
    for parallel in (False, True):  # a gather and a scatter take as long as the all-reduce that they replace
        shape = replace(given, policy=replace(given.policy, sequence_parallel=parallel))
        assert layer_communication(shape, Links.within(DEVICE), (0.0, 0.0)) == pytest.approx((expected, expected))


def test_keys_and_values_go_round_beside_attention() -> None:
    given, links = replace(SHAPE, policy=ActivationPolicy(context=4)), Links.within(DEVICE)
    around = DEVICE.within.all_gather(2 * 512 * 2 * 1024, 4)
    assert layer_communication(given, links, (0.0, 0.0)) == pytest.approx((around, 2 * around))
    assert layer_communication(given, links, (around, around)) == pytest.approx((0.0, around))
    assert layer_communication(given, links, (1.0, 1.0)) == (0.0, 0.0)
    slower = replace(links, beside_communication=1.25)
    expected = around - around / 1.25, 2 * around - around
    assert layer_communication(given, slower, (1.0, around)) == pytest.approx(expected), "attention takes longer meanwhile"


def test_tokens_go_to_their_experts_and_back() -> None:
    experts = Experts((True, False) * 4, 8, 2, 512, 0, 4096, parallel=4)
    given, links = replace(SHAPE, experts=experts), Links.within(DEVICE)
    expected = 0.5 * 2 * links.expert.all_to_all(2 * 2 * 512 * 1024, 4)  # half of the layers have experts
    assert layer_communication(given, links, (0.0, 0.0)) == pytest.approx((expected, expected))
    assert exchange_seconds(given, links) == pytest.approx(expected / 2)
    assert exchange_seconds(SHAPE, links) == exchange_seconds(replace(given, experts=replace(experts, parallel=1)), links) == 0


def test_a_token_goes_to_every_expert_that_it_visits_or_to_all_ranks() -> None:
    links = Links.of(DEVICE, 8, Ranks(1, 1, 16, 16, 1))
    experts = Experts((True,) * 8, 32, 8, 512, 0, 4096, parallel=16)
    given, own = replace(SHAPE, experts=experts), 2 * 512 * 1024
    assert exchange_seconds(given, links) == pytest.approx(8 * (3e-6 + 8 * own / 16 / 20e9)), "half of them leave the node"
    gathered = replace(given, experts=replace(experts, gathered=True))
    assert exchange_seconds(gathered, links) == pytest.approx(cards(8).all_gather(16 * own, 16))


def test_ranks_that_share_each_expert_gather_tokens() -> None:
    """In place of the all-reduce of an MLP, unless there are experts that all tokens pass."""
    links = Links.within(DEVICE)
    experts = Experts((True,) * 8, 8, 2, 512, 0, 4096, parallel=2, tensor=4)
    given = replace(SHAPE, experts=experts, policy=ActivationPolicy(tensor=4, sequence_parallel=True))
    own = 2 * 512 * 1024
    each = links.expert.all_to_all(2 * own / 4, 2) + DEVICE.within.all_gather(2 * own, 4)
    assert exchange_seconds(given, links) == pytest.approx(each)
    reduced = DEVICE.within.all_reduce(own, 4)
    for shared, times in ((0, 1), (512, 2)):
        with_shared = replace(given, experts=replace(experts, shared_ffn=shared))
        assert layer_communication(with_shared, links, (0.0, 0.0))[0] == pytest.approx(times * reduced + 2 * each)


def test_messages_between_stages() -> None:
    assert hop_seconds(SHAPE, Links.within(DEVICE)) == pytest.approx(2e-6 + 2 * 512 * 1024 / 50e9)
    halved = replace(SHAPE, policy=ActivationPolicy(tensor=2, sequence_parallel=True))
    assert hop_seconds(halved, Links.within(DEVICE)) == pytest.approx(2e-6 + 512 * 1024 / 50e9)
