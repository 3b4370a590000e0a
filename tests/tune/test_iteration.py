"""What an iteration takes and what its time goes into, against closed forms and against planning all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tune.small import A100, candidate, layouts, on_device, result

from megatron.pipeline.model.description import describe, shape_of
from megatron.pipeline.planner.costmodel.device import Link
from megatron.pipeline.planner.costmodel.estimate import costs_of_training, layer_seconds, remade
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.tune import iteration, relax
from megatron.pipeline.tune.candidate import Candidate
from megatron.pipeline.tune.costs import CandidateCosts
from megatron.pipeline.tune.iteration import Dominated, Infeasible, Result, evaluate, least_seconds
from megatron.pipeline.tune.layouts import FULL_RECOMPUTE, Layouts

RECOMPUTE = FULL_RECOMPUTE | {"recompute_fused_backward": True}
DISTRIBUTED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
# Schedules of four ranks that take no time to plan, by family and changes.
FOUR: list[tuple[str, dict[str, Any]]] = [
    ("1f1b", {}),
    ("1f1b", {"stock": True}),
    ("interleaved", {"stock": True}),
    ("zb-h1", {}),
    ("gis", {}),
    ("1f1b", {"vocab_parallel": "interlaced"}),
    ("zb-h1", {"vocab_parallel": "1"}),
    ("zb-h1", {"offload": "full"}),
    ("zb-h1", RECOMPUTE),
]
TWO: list[tuple[str, dict[str, Any]]] = [("zb-auto", {}), ("v-auto", {}), ("v-auto", {"post_validation": True})]


@pytest.fixture(scope="module")
def four() -> Layouts:
    """A node of four GPUs."""
    return layouts()


@pytest.fixture(scope="module")
def two() -> Layouts:
    return layouts(gpus=2)


@pytest.fixture(scope="module")
def eight() -> Layouts:
    """Two nodes of four."""
    return layouts(gpus=8, per_node=4)


def between(on: Layouts, one: Candidate) -> float:
    costs = (predicted := CandidateCosts(on.cluster, one)).costs
    plan = Request(one.variant.name, one.placement.ranks, 4, costs, objective=one.objective).plan()
    return predicted.between(plan.schedule, plan.value)


def test_1f1b_of_equal_stages_takes_its_closed_form(four: Layouts) -> None:
    """(m + p - 1)(F + B + W), and then the step; the vocabulary of 128 rows is 0.2 % of a stage."""
    on = on_device(four, latency=0.0, hop=Link(0.0, 1e30))
    one = candidate(on, "1f1b")
    layer = layer_seconds(shape_of(one.args), on.cluster.device, Links.within(on.cluster.device)).total
    found = result(on, one)
    assert found.seconds - found.parts.between == pytest.approx((32 + 4 - 1) * 2 * layer, rel=5e-3)
    assert found.parts.between == pytest.approx(between(on, one))
    assert found.tokens_per_second == pytest.approx(32 * 2048 / found.seconds)
    operations = 32 * shape_of(one.args).training_operations()
    assert found.mfu == pytest.approx(operations / (found.seconds * 4 * A100.peak))


def test_families_with_fused_backwards_hold_less_where_layers_are_recomputed(two: Layouts) -> None:
    """A B that makes layers again keeps what a later W reads; a BW does not, so seq-1f1b costs what 1f1b does."""
    plain, sliced, split = (
        CandidateCosts(two.cluster, candidate(two, name, **FULL_RECOMPUTE)).costs for name in ("1f1b", "seq-1f1b", "zb-h1")
    )
    assert sliced == plain
    assert split.stages[0].activation > plain.stages[0].activation


def test_a_search_counts_what_backwards_make_again(four: Layouts) -> None:
    """What is written for training has B's longer time and W within it; the least that is held is what recomputation leaves."""
    one = candidate(four, "zb-auto", **RECOMPUTE)
    apart, found = CandidateCosts(four.cluster, one).costs, result(four, one)
    assert found.costs == cutting.with_recomputation(apart, weights=True)
    assert found.seconds - found.parts.between >= least_seconds(CandidateCosts(four.cluster, one))
    whole = result(four, candidate(four, "zb-auto"))
    assert found.fullest.activations < whole.fullest.activations / 3 and found.parts.recomputation > 0


def test_a_backward_with_w_within_it_takes_what_mpipe_costs_says(four: Layouts) -> None:
    """The start of W is saved: both plan for the same seconds."""
    one = candidate(four, "zb-h1", **RECOMPUTE)
    model, device = describe(one.args), four.cluster.device
    printed = remade(model, costs_of_training(model, one.placement, one.layers, device, Links.within(device)))
    assert [stage.backward for stage in result(four, one).costs.stages] == [stage.backward for stage in printed.stages]


@pytest.mark.parametrize(("schedule", "changes"), [*FOUR, *TWO], ids=str)
def test_parts_add_up_and_what_is_not_planned_takes_what_planning_it_would(
    four: Layouts, two: Layouts, schedule: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bound is beaten; and of few microbatches follows what all take."""
    on = two if (schedule, changes) in TWO else four
    one = candidate(on, schedule, **changes)
    found = result(on, one)
    parts = found.parts
    assert parts.total == found.seconds and min(vars(parts).values()) >= 0
    assert least_seconds(CandidateCosts(on.cluster, one)) <= found.seconds - parts.between
    assert (parts.recomputation > 0) == (one.args.recompute_granularity == "full")
    assert parts.messages == 0, "no ranks share a layer"
    assert parts.imbalance < 0.01 * found.seconds
    slower = replace(on.cluster, device=replace(A100, hop=Link(1e-3, 1e9)))
    assert isinstance(evaluate(slower, one), Result) and result(replace(on, cluster=slower), one).seconds >= found.seconds
    without_recomputation = 0.7 * least_seconds(CandidateCosts(on.cluster, one))
    assert isinstance(evaluate(on.cluster, one, beat=without_recomputation), Dominated)
    assert isinstance(evaluate(on.cluster, one, beat=found.seconds * 1.0001), Result)
    plans_for_limits = schedule in ("zb-auto", "v-auto")
    assert (found.memory_limit is not None) == plans_for_limits and not found.memory_bound
    monkeypatch.setattr("megatron.pipeline.planner.costmodel.memory._ROUNDS", 1000)
    whole = result(on, one)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.01)
    if not plans_for_limits:
        assert found.fullest.total == pytest.approx(whole.fullest.total, rel=0.01)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, **DISTRIBUTED},
        {"pipeline_model_parallel_size": 8},
    ],
    ids=["tensor", "context", "data", "pipeline"],
)
def test_worse_links_never_make_it_faster(eight: Layouts, sizes: dict[str, Any]) -> None:
    one = candidate(eight, "1f1b", **sizes)

    def seconds(**links: Link) -> float:
        return result(on_device(eight, **links), one).seconds

    usual = seconds()
    for name in ("within", "hop", "between"):
        link: Link = getattr(A100, name)
        slow = [seconds(**{name: replace(link, bandwidth=link.bandwidth / factor)}) for factor in (10, 100)]
        late = seconds(**{name: replace(link, latency=link.latency + 1e-3)})
        assert usual <= slow[0] * (1 + 1e-12) <= slow[1] * (1 + 1e-12) and usual <= late * (1 + 1e-12)
    worse = seconds(within=Link(1e-3, 1e9), hop=Link(1e-3, 1e9), between=Link(1e-3, 1e9))
    assert worse > 1.05 * usual


def test_messages_are_those_of_ranks_that_share_a_layer(four: Layouts) -> None:
    shared: dict[str, Any] = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "pipeline_model_parallel_size": 1}
    one = candidate(four, "1f1b", **shared)
    found = result(on_device(four, within=Link(1e-5, 2e9)), one)
    free = result(on_device(four, within=Link(0.0, 1e30)), one)
    assert free.parts.messages == pytest.approx(0.0, abs=1e-9)
    assert found.parts.kernels == pytest.approx(free.parts.kernels)
    assert found.parts.limit == "messages" and found.parts.bubble == pytest.approx(0.0, abs=1e-12)


def test_unequal_stages_are_told_from_bubble(four: Layouts) -> None:
    """The busiest rank's work beyond the mean."""
    wide = layouts("--vocab-size 65535")
    one = candidate(wide, "1f1b")
    found = result(wide, one)
    busiest, mean = least_seconds(CandidateCosts(wide.cluster, one)), found.parts.kernels
    assert found.parts.imbalance == pytest.approx(busiest - mean) and found.parts.limit == "imbalance"
    even = result(wide, candidate(wide, "1f1b", vocab_parallel="1"))
    assert even.parts.imbalance == pytest.approx(0.0, abs=1e-9) and even.seconds < found.seconds


# Between two pipelines.


def data_parallel(on: Layouts, **changes: Any) -> Candidate:
    return candidate(on, "1f1b", pipeline_model_parallel_size=2, **changes)


def test_the_distributed_optimizer_steps_its_share_and_overlap_hides_messages(four: Layouts) -> None:
    on = on_device(four, within=Link(0.0, 10e9))
    seconds = {
        shared: [
            between(on, data_parallel(on, use_distributed_optimizer=shared, overlap_grad_reduce=overlaps))
            for overlaps in (False, True)
        ]
        for shared in (False, True)
    }
    count = 4 * 12 * 2048**2 + 128 * 2048
    step = A100.moving(34 * count)
    ring = 4 * count / 2 / 10e9  # float32 gradients from one of two ranks to the other
    gathered = 2 * count / 2 / 10e9
    assert seconds[False][0] == pytest.approx(step + 2 * ring, rel=0.01)
    assert seconds[True][0] == pytest.approx(step / 2 + ring + gathered, rel=0.01)
    assert seconds[False][1] < seconds[False][0] and seconds[True][1] < seconds[True][0]
    hidden = between(on, data_parallel(on, **DISTRIBUTED))
    assert hidden < between(on, data_parallel(on, **DISTRIBUTED, optimizer_cpu_offload=True)) < seconds[True][1], "one step"
    fast = on_device(four, within=Link(0.0, 1e30))
    assert between(fast, data_parallel(fast, **DISTRIBUTED)) == pytest.approx(step / 2, rel=0.01)


def test_tied_embeddings_are_summed_where_they_are_apart() -> None:
    tied, flags = {}, "--vocab-size 65535"
    kinds: list[tuple[str, dict[str, Any]]] = [("1f1b", {}), ("v-auto", {}), ("zb-h1", {"vocab_parallel": "1"})]
    for name, more in (("untied", ""), ("tied", "--tie")):
        on = layouts(flags)
        on = replace(on, base=on.base | {"untie_embeddings_and_output_weights": not more})
        tied[name] = {schedule: between(on, candidate(on, schedule, **changes)) for schedule, changes in kinds}
    size = 4 * 65536 * 2048
    assert tied["tied"]["1f1b"] - tied["untied"]["1f1b"] == pytest.approx(A100.hop.all_reduce(size, 2), rel=0.01)
    for schedule in ("v-auto", "zb-h1"):
        assert tied["tied"][schedule] <= tied["untied"][schedule], "both ends are on one rank, or all ranks have a share"


def test_post_validation_takes_the_span(four: Layouts) -> None:
    """Without it, the time from the first rank's first pass to the last rank's last, which ZB-H2 has longer."""
    plain, interlocked = candidate(four, "zb-h2"), candidate(four, "zb-h2", post_validation=True)
    faster, slower = result(four, interlocked), result(four, plain)
    assert slower.seconds - faster.seconds > 2e-3
    assert faster.fullest.state == pytest.approx(slower.fullest.state * 30 / 18, rel=0.01), "12 bytes more can undo a step"


# Memory.


@pytest.mark.parametrize(
    ("schedule", "changes"), [("1f1b", {}), ("zb-h1", {"vocab_parallel": "1"}), ("zb-h1", RECOMPUTE), ("v-auto", {})], ids=str
)
def test_what_a_misfit_needs_at_least_leads_to_what_fits(two: Layouts, schedule: str, changes: dict[str, Any]) -> None:
    """What does not get as far as its activations is told without them; what needs are told last is just what fits."""
    one = candidate(two, schedule, **changes)
    outcome = evaluate(on_device(two, memory=4e9).cluster, one)
    assert isinstance(outcome, Infeasible)
    least = relax.least_needed(two, [replace(outcome, state_too_large=False)])
    assert least.needs > outcome.needs > outcome.state > 0
    assert isinstance(evaluate(on_device(two, memory=least.needs * 0.99).cluster, one), Infeasible)
    fits = evaluate(on_device(two, memory=least.needs * 1.001).cluster, one)
    assert isinstance(fits, Result) and fits.fullest.total <= least.needs * 1.001


def test_what_is_needed_at_least_is_that_of_the_leanest(two: Layouts) -> None:
    """A search tries nothing that saves activations where no activations fit; the message about it does."""
    outcome = evaluate(on_device(two, memory=3e9).cluster, candidate(two, "1f1b"))
    assert isinstance(outcome, Infeasible) and outcome.state_too_large
    least = relax.least_needed(two, [outcome])
    assert least.candidate.args.recompute_granularity == "full"
    assert isinstance(evaluate(on_device(two, memory=least.needs * 1.001).cluster, least.candidate), Result)


def test_a_model_whose_weights_alone_are_too_much_is_told_without_planning(two: Layouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iteration, "_plan", None)
    monkeypatch.setattr(CandidateCosts, "costs", None)
    outcome = evaluate(on_device(two, memory=1e9).cluster, candidate(two, "v-auto"))
    assert isinstance(outcome, Infeasible) and outcome.needs > outcome.state > 1e9


def test_starved_is_what_more_memory_would_make_faster(two: Layouts) -> None:
    one = candidate(two, "v-auto")
    plenty = result(two, one)
    outcome = evaluate(on_device(two, memory=4e9).cluster, one)
    assert isinstance(outcome, Infeasible) and not plenty.memory_bound
    least = relax.least_needed(two, [replace(outcome, state_too_large=False)])
    scarce = result(on_device(two, memory=least.needs * 1.02), one)
    assert scarce.memory_bound and scarce.seconds > plenty.seconds
    assert scarce.memory_limit is not None and plenty.memory_limit is not None and scarce.memory_limit < plenty.memory_limit
    assert scarce.fullest.total <= least.needs * 1.02
