"""Braids: a forward and a backward of another microbatch or chunk as one, from the rule to the program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_strategies import costs_of, schedules, unbraided, with_parts_of

from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.braids import Parts, braid_seconds
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.kinds import BRAIDED
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule, ScheduleError
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Flow, Message, Send, Wait, pass_of
from megatron.pipeline.planner.schedule.rules.verify import verify
from megatron.pipeline.planner.schedule.rules.verify_programs import verify_programs
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, simulate
from megatron.pipeline.planner.schedule.transforms.braid import braid


def schedule_of(*rows: str, microbatches: int = 2) -> Schedule:
    passes = tuple(tuple(map(Pass.parse, row.split())) for row in rows)
    return Schedule("mine", linear(len(rows)), microbatches, passes)


ONE = schedule_of("F0.0 F1.0 FB0.0 W0.0 B1.0 W1.0")


class Braiding(Costs):
    """Half of the shorter half of a braid is hidden; the forward's output is there when half of the braid has run."""

    def braid(self, stage: int, kind: Kind, other: int, microbatches: tuple[int, int] = (0, 0)) -> tuple[float, float]:
        forward, backward = self.seconds(Kind.F, stage), self.seconds(kind, other)
        whole = forward + backward - min(forward, backward) / 2
        return whole / 2, whole / 2


def plain(stages: int, hop: float = 0.0) -> Braiding:
    return Braiding((StageCosts(2.0, 4.0, 1.0),) * stages, hop)


def test_a_braid_starts_when_both_halves_can_and_takes_what_its_costs_say() -> None:
    verify(ONE)
    row = simulate(ONE, plain(1)).ranks[0]
    assert [(str(work), start, end) for work, start, end in row] == [
        ("F0.0", 0, 2), ("F1.0", 2, 4.5), ("FB0.0", 4.5, 7), ("W0.0", 7, 8), ("B1.0", 8, 12), ("W1.0", 12, 13),
    ]  # fmt: skip
    two = schedule_of("F0.0 F1.0 FB0.0 W0.0 B1.0 W1.0", "F0.0 B0.0 W0.0 F1.0 B1.0 W1.0")
    verify(two)
    rows = simulate(two, plain(2, hop=0.5)).ranks
    assert rows[0][1][1] == 9  # F0 ends at 2, is there at 2.5, B0 ends at 8.5 and is there at 9: only then F1 starts
    assert simulate(unbraided(two), plain(2, hop=0.5)).ranks[0][1][1] == 2


def test_the_output_of_a_braids_forward_leaves_before_its_backward_ends() -> None:
    two = schedule_of("F0.0 F1.0 FB0.0 W0.0 B1.0 W1.0", "F0.0 B0.0 W0.0 F1.0 B1.0 W1.0")
    rows = simulate(two, plain(2, hop=0.5)).ranks
    assert [(str(work), start, end) for work, start, end in rows[0][1:3]] == [("F1.0", 9, 11.5), ("FB0.0", 11.5, 14)]
    assert rows[1][3][:2] == (Pass.parse("F1.0"), 12)
    program = lower(two, plain(2, hop=0.5))[0]
    braid = program.index(Compute(Pass.parse("F1.0"), Pass.parse("FB0.0")))
    sent = program.index(Send(Message(Flow.ACTIVATION, 1, 0), 1))
    assert braid < sent < program.index(Compute(Pass.parse("FB0.0")))


def test_no_half_of_a_braid_runs_before_the_optimizer_step_is_known_to_stand() -> None:
    [program] = lower(ONE, plain(1))
    assert [str(pass_of(operation) or operation) for operation in program][:4] == ["F0.0", "Validate()", "F1.0", "FB0.0"]


def test_without_parts_of_layers_a_braid_takes_what_its_halves_take() -> None:
    costs = Costs((StageCosts(2.0, 4.0, 1.0),))
    assert simulate(ONE, costs).ranks[0][-1].end == simulate(unbraided(ONE), costs).ranks[0][-1].end


def test_memory_of_both_halves_counts() -> None:
    assert activation_peaks(ONE, plain(1)) == activation_peaks(unbraided(ONE), plain(1)) == [2]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            "F0.0 FB0.0 W0.0 F1.0 B1.0 W1.0",
            "rank 0: FB0.0 is braided with the pass before it, and that is F0.0; put an F of another",
        ),
        ("F0.0 F1.0 B0.0 FBW1.0 W0.0", "FBW1.0 is braided with the pass before it, and that is B0.0; .* or make it BW"),
        ("F0.0 F1.0 FB0.0 B0.0 W0.0 B1.0 W1.0", "B0.0 runs again what FB0.0 does; keep either FB, or B"),
        ("F0.0 F1.0 FBW0.0 W0.0 B1.0 W1.0", "W0.0 runs again what FBW0.0 does; keep either FBW, or B and W"),
        ("F0.0 F1.0 FB0.0 B1.0 W1.0", "W0.0 is missing"),
    ],
)
def test_what_is_no_braid_is_named(row: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        verify(schedule_of(row))


def test_a_braid_that_waits_for_itself_over_other_ranks_is_named() -> None:
    """Rank 0 starts F1 with B0, whose gradient rank 1 makes only after it has run F1."""
    both = schedule_of("F0.0 F1.0 FB0.0 W0.0 B1.0 W1.0", "F0.0 F1.0 B0.0 W0.0 B1.0 W1.0")
    with pytest.raises(ScheduleError, match=r"rank . is stuck at F1\.0: it needs"):
        verify(both)
    verify(unbraided(both))


def test_the_program_waits_for_both_halves_before_the_first() -> None:
    two = schedule_of("F0.0 F1.0 FB0.0 W0.0 B1.0 W1.0", "F0.0 B0.0 W0.0 F1.0 B1.0 W1.0")
    programs = lower(two, plain(2))
    verify_programs(two, programs)
    forward, backward = Pass(Kind.F, 1), Pass(Kind.FB, 0)
    at = programs[0].index(Compute(forward, backward))
    waits = [place for place, one in enumerate(programs[0]) if isinstance(one, Wait) and isinstance(one.message, Message)]
    assert waits[0] < at and programs[0].index(Compute(backward)) > at


def with_braids(schedule: Schedule, costs: Costs) -> tuple[Schedule, Braiding]:
    paying = Braiding(costs.stages, costs.hop)
    return braid(schedule, Problem(schedule.placement, schedule.microbatches, paying)), paying


@given(schedules(), st.data())
def test_any_schedule_with_braids_is_right_and_never_longer(schedule: Schedule, data: st.DataObject) -> None:
    made, costs = with_braids(schedule, data.draw(costs_of(schedule.placement)))
    verify(made)
    assert [sorted(row) for row in unbraided(made).passes] == [sorted(row) for row in schedule.passes]
    assert simulate(made, costs).span <= simulate(schedule, costs).span
    assert activation_peaks(made, costs) == activation_peaks(schedule, costs)
    verify_programs(made, lower(made, costs))
    assert Schedule.from_json(made.to_json()) == made


def test_a_fused_backward_moves_over_no_w_of_its_chunk() -> None:
    """Weight gradients of a chunk are added in the order of microbatches."""
    mixed = schedule_of("F0.0 F1.0 B0.0 F2.0 W0.0 BW1.0 B2.0 W2.0", microbatches=3)
    split = schedule_of("F0.0 F1.0 B0.0 F2.0 W0.0 B1.0 W1.0 B2.0 W2.0", microbatches=3)
    for schedule, backward in ((mixed, Pass(Kind.BW, 1)), (split, Pass(Kind.FB, 1))):
        made, _ = with_braids(schedule, plain(1))
        verify(made)
        assert {Pass(Kind.FB, 0), backward} <= set(made.passes[0])


@pytest.mark.parametrize("name", ["zb-v", "v-half", "interleaved", "dualpipe-v"])
def test_families_gain_by_braids(name: str) -> None:
    placement = families.placement(name, 4, 2 if name == "interleaved" else None)
    costs = Costs((StageCosts(1.0, 1.0, 1.0),) * (placement.last_stage + 1))
    schedule = Schedule(name, placement, 16, families.named(name).plan(Problem(placement, 16, costs)))
    made, paying = with_braids(schedule, costs)
    verify(made)
    assert simulate(made, paying).span < simulate(schedule, paying).span


def test_every_braided_kind_is_found_by_what_it_is_alone() -> None:
    assert BRAIDED == {Kind.B: Kind.FB, Kind.BW: Kind.FBW}


# The seconds of a braid.

LETTERS = {"a": "compute", "d": "communicate", "e": "compute", "c": "communicate"}
seconds = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
parts = st.builds(Parts, seconds, seconds, seconds, seconds, st.just(0.0), st.just(0.0), st.integers(1, 2))
backwards = st.builds(Parts, seconds, seconds, seconds, seconds, seconds, seconds, st.integers(1, 2))


def run_in(order: str, forward: Parts, backward: Parts) -> tuple[float, float]:
    """When F and all of a braid are over, if the host launches parts in this order: capital letters are of the backward."""
    free, ready = {"compute": 0.0, "communicate": 0.0}, {True: 0.0, False: 0.0}
    for letter in order:
        half = backward.of_layer if letter.isupper() else forward.of_layer
        one = letter.lower()
        if letter in "XY":  # weights of experts and of attention: nothing waits for them
            free["compute"] += half.expert_weights if letter == "X" else half.attention_weights
            continue
        taken = {"a": half.attention, "d": half.dispatch, "e": half.experts, "c": half.combine}
        lane = LETTERS[one]
        end = max(free[lane], ready[letter.isupper()]) + taken[one]
        free[lane] = ready[letter.isupper()] = end
    return ready[False], max(free.values())


def orders(one: str, other: str) -> Iterator[str]:
    """Every way to merge two sequences."""
    for places in combinations(range(len(one) + len(other)), len(one)):
        first, second = iter(one), iter(other)
        yield "".join(next(first) if place in places else next(second) for place in range(len(one) + len(other)))


@given(parts, backwards)
def test_a_braid_takes_what_upstreams_order_of_parts_takes(forward: Parts, backward: Parts) -> None:
    launched = ""
    for layer in range(max(forward.layers, backward.layers)):
        ours, theirs = layer < forward.layers, layer < backward.layers
        launched += "".join(letter for letter in "CaEdXDecAY" if (theirs if letter.isupper() else ours))
    output, whole = braid_seconds(forward, backward)
    assert (output, whole) == pytest.approx(run_in(launched, forward, backward))
    lanes = forward.computing + backward.computing, forward.communicating + backward.communicating
    chains = [one.attention + one.experts + one.communicating for one in (forward, backward)]
    assert max(*lanes, *chains) <= whole * (1 + 1e-9) and whole <= sum(lanes) * (1 + 1e-9)


def test_computation_takes_longer_while_the_other_half_communicates() -> None:
    """In the first second two thirds of a second are computed, then all that is left; and the other way round."""
    attention, gathers = Parts(2.0, 0.0, 0.0, 0.0), Parts(0.0, 0.0, 0.0, 1.0)
    assert braid_seconds(attention, gathers, 1.5) == pytest.approx((2 + 1 / 3, 2 + 1 / 3))
    sends, experts = Parts(1.0, 1.0, 0.0, 0.0), Parts(0.0, 0.0, 3.0, 0.0)
    assert braid_seconds(sends, experts, 1.5) == pytest.approx((4 + 1 / 3, 4 + 1 / 3))
    assert braid_seconds(attention, gathers._replace(combine=4.0), 1.5) == pytest.approx((4.0, 4.0)), "hidden all the same"


@given(parts, backwards, st.floats(1.0, 3.0))
def test_a_braid_beside_slower_computation_takes_no_less_and_no_more_than_its_halves_in_turn(
    forward: Parts, backward: Parts, slower: float
) -> None:
    alone, (output, whole) = braid_seconds(forward, backward), braid_seconds(forward, backward, slower)
    assert output >= alone[0] * (1 - 1e-9) and whole >= alone[1] * (1 - 1e-9)
    assert whole <= sum(one.computing + one.communicating for one in (forward, backward)) * (1 + 1e-9)


times = st.floats(1.0, 3.0)


@settings(max_examples=30)
@given(times, times, st.floats(0.1, 2.0), st.sampled_from([1, 2]))
def test_no_order_of_parts_is_shorter(attention: float, experts: float, exchange: float, backward: int) -> None:
    """Of one layer whose all-to-alls take the same time and whose backward computes as long as its forward, or twice."""
    forward = Parts(attention, exchange, experts, exchange)
    other = forward._replace(attention=backward * attention, experts=backward * experts)
    best = min(run_in(order, forward, other)[1] for order in orders("adec", "CEDA"))
    assert braid_seconds(forward, other)[1] == pytest.approx(best)


@given(st.floats(0.0, 1.0), st.floats(0.1, 2.0), st.floats(0.0, 1.0), st.sampled_from([1, 4]))
def test_a_braid_computes_all_of_w(exchange: float, weight: float, of_experts: float, layers: int) -> None:
    """Also where a BW alone computes some of it behind its all-to-alls, and so takes less than B and W."""
    backward, weights = 1.2 + 2 * exchange, of_experts * weight
    hidden = min(exchange, weights)
    stage = StageCosts(
        1.0 + 2 * exchange, backward, weight, fused=backward + weight - hidden, dispatch=exchange, experts=0.5, combine=exchange,
        backward_combine=exchange, backward_experts=0.6, backward_dispatch=exchange, weight_experts=weights, layers=layers,
    )  # fmt: skip
    split, fused = stage.parts(Kind.FB), stage.parts(Kind.FBW)
    assert fused.computing == pytest.approx(split.computing + weight) and fused.expert_weights == pytest.approx(weights)
    costs = Costs((stage,))
    assert sum(costs.braid(0, Kind.FBW, 0)) >= (1.0 + 1.2 + weight) * (1 - 1e-9)
    assert cutting.hidden(costs).seconds(Kind.BW, 0) == pytest.approx(1.2 + weight)


def test_a_fused_backward_that_takes_less_than_both_compute_computes_less() -> None:
    stage = replace(with_parts_of(1).stages[0], fused=1.4)  # B computes 0.8 and W 0.8
    assert stage.parts(Kind.FBW).computing == pytest.approx(1.4)
    assert cutting.hidden(Costs((stage,))).seconds(Kind.BW, 0) == pytest.approx(1.4)


def test_parts_of_costs() -> None:
    costs = with_parts_of(2)
    assert Costs.from_json(costs.to_json()) == costs and "beside_communication" not in costs.to_json()
    slower = replace(costs, beside_communication=1.5)
    assert Costs.from_json(slower.to_json()) == slower
    assert sum(slower.braid(0, Kind.FBW, 1)) > sum(costs.braid(0, Kind.FBW, 1))
    with pytest.raises(ValueError, match=r"beside_communication must be a number of at least 1, got 0\.5"):
        replace(costs, beside_communication=0.5)
    assert costs.stages[0].parts(Kind.F) == pytest.approx(Parts(0.3, 0.2, 0.3, 0.2, layers=4))
    assert costs.stages[0].parts(Kind.FBW) == pytest.approx(Parts(0.45, 0.2, 0.35, 0.2, 0.4, 0.4, 4))
    assert costs.stages[0].parts(Kind.FB).computing == pytest.approx(0.8)
    assert cutting.hidden(costs).stages[0].total == pytest.approx(2.2) and not cutting.hidden(costs).stages[0].has_parts
    assert costs.communicating == pytest.approx((0.8, 0.8))
    halves = cutting.of_depth(costs, 4)
    assert halves.stages[0].layers == 2 and halves.stages[0].dispatch == 0.1
    with pytest.raises(ValueError, match=r"dispatch, experts take 1\.3, more than the 1 of forward"):
        Costs((StageCosts(1.0, 1.0, 1.0, dispatch=1.0, experts=0.3),))
