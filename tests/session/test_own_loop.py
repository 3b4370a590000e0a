"""``megatron.pipeline.install``: a loop that knows nothing of a schedule trains under it, with the bits of stock."""

from __future__ import annotations

import logging
import math
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from marked import rest
from pool import Pool, RankFailed, forked, free_port
from reductions import costs
from replanned import planned_again
from session import own_loops, refused_loops

from megatron.pipeline import install, patches
from megatron.pipeline.flags.facts import cautions_of
from megatron.pipeline.planner.combinations.table import Facts
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.placement import linear
from megatron.pipeline.planner.schedule.core.problem import Objective
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.session.own_loop import OwnLoop


def bits(found: list[own_loops.Trained]) -> list[Any]:
    return [(rank.losses, rank.norms, rank.weights) for rank in found]


def test_a_loop_with_one_module_trains_as_under_stock(pool: Pool) -> None:
    stock, *found = pool.each(4, own_loops.train, ("stock", "zb-h1", "zb-auto"))
    assert [len(losses) for losses in stock[-1].losses] == [5, 4, 6, 3]
    assert [bits(ours) for ours in found] == [bits(stock)] * 2
    assert all(rank.planned == [1.0] * 4 for ours in found for rank in ours)


@pytest.mark.parametrize("pipeline", [rest(1), 2])
def test_with_replicas_whose_reductions_overlap_it_trains_as_under_stock(pool: Pool, tmp_path: Path, pipeline: int) -> None:
    """Four replicas, and two; with DDP's buckets, and of two also with those of a plan: other buckets add four up in another
    order."""
    (file := tmp_path / "costs.json").write_text(costs("zb-h1", pipeline).to_json())
    runs = (("stock", None), ("zb-h1", None), *([("zb-h1", str(file))] if pipeline > 1 else []))
    stock, ours, *planned = (pool.run(4, own_loops.train, name, pipeline, "", True, given) for name, given in runs)
    for found in (ours, *planned):
        assert [(rank.losses, rank.weights) for rank in found] == [(rank.losses, rank.weights) for rank in stock]
        # On every rank, although the loop has asked for aligned reductions.
        assert all(rank.early >= 2 for rank in found)
    for found in planned:
        assert all(2 <= rank.buckets < by_size.buckets for rank, by_size in zip(found, ours, strict=True))
    # Shards are cut from buckets, of which stock has one on all ranks but the first: squares are summed in another order.
    assert [rank.norms for rank in ours] == [pytest.approx(rank.norms, rel=1e-6) for rank in stock]


@pytest.mark.parametrize("late", [False, rest(True)])
def test_what_a_loop_would_gather_is_under_way_behind_the_step(pool: Pool, late: bool) -> None:
    """Of several chunks; of one: above."""
    stock, ours = (pool.run(4, own_loops.overlapping, name, late) for name in ("stock", "zb-v"))
    assert [len(row) for row in stock[-1][0]] == [4, 2, 6, 4]
    assert [losses for losses, _, _ in ours] == [losses for losses, _, _ in stock]
    assert [norms for _, norms, _ in ours] == [pytest.approx(norms, rel=1e-6) for _, norms, _ in stock]
    assert all(kept for _, _, kept in ours)


def test_the_w_of_what_is_frozen_is_planned_to_take_no_time(pool: Pool) -> None:
    stock, ours = pool.each(4, own_loops.train, ("stock", "zb-auto"), 4, "mlp")
    assert bits(ours) == bits(stock)
    # A layer has 12 h^2 elements, 8 of them in the MLP; the output layer's are the embedding's, which is fused.
    assert [rank.planned for rank in ours] == [ours[0].planned] * 4
    assert ours[0].planned[1:3] == pytest.approx([1 / 3] * 2)


@pytest.mark.parametrize("pipeline", [4, rest(2)])
def test_adapters_like_those_of_peft_train_as_under_stock(pool: Pool, pipeline: int) -> None:
    """With clipping, and ranks on which nothing trains; with 2 ranks with replicas and a distributed optimizer."""
    stock, fused, on_a_v, searched = pool.each(4, own_loops.adapters, ("stock", "zb-h1", "zb-v", "v-auto"), pipeline)
    assert [bool(rank.weights) for rank in stock].count(False) == 4 - 4 // pipeline
    assert all(norm > 1e-2 for rank in stock for norm in rank.norms), "clipping changes them"
    exact = [(rank.losses, rank.weights) for rank in stock]
    assert [(rank.losses, rank.weights) for rank in fused] == exact if pipeline == 4 else close(fused, stock)
    assert close(on_a_v, stock) and close(searched, stock)
    assert all(set(rank.planned) == {0.0} for rank in (*fused, *on_a_v)), "B computes all that trains"
    # Layers 1 and 2 are in the first stages: nothing goes back to these.
    for ranks, stages in ((fused, pipeline), (on_a_v, 2 * pipeline), (searched, 2 * pipeline)):
        frozen = stages // 4
        assert [rank.frozen for rank in ranks] == [frozen] * 4
        handed_over = stages == 4 > pipeline  # between the two stages of a rank
        assert min(set().union(*(rank.gradients for rank in ranks))) == frozen + 1 + handed_over


@pytest.mark.parametrize("schedule", ["zb-h1", rest("zb-v")])
def test_adapters_behind_a_frozen_part_train_where_layers_are_recomputed(pool: Pool, schedule: str) -> None:
    """The first of these layers has an input that needs a gradient, without which it would give its adapters none."""
    stock, ours = pool.each(4, own_loops.adapters, ("stock", schedule), 4, True)
    assert all(any(map(any, rank.weights.values())) for rank in stock if rank.weights) and close(ours, stock)
    assert {rank.frozen for rank in ours} == {1 if schedule == "zb-h1" else 2}


def close(ours: list[own_loops.LowRank], stock: list[own_loops.LowRank]) -> bool:
    """Norms of gradients are sums in another order, and clipping carries them into the weights, which a V has elsewhere."""
    mine, theirs = (dict(pair for rank in found for pair in rank.weights.items()) for found in (ours, stock))
    assert len(theirs) == 16 and mine.keys() == theirs.keys()
    assert all(mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6) for name in theirs)
    return numbers(ours) == pytest.approx(numbers(stock), rel=1e-5)


def numbers(found: list[own_loops.LowRank]) -> list[float]:
    """Norms, and losses of the last rank, where loops look for them."""
    return [*(norm for rank in found for norm in rank.norms), *(loss for losses in found[-1].losses for loss in losses)]


def test_adapters_train_where_layers_are_recomputed(pool: Pool) -> None:
    right = pool.run(2, own_loops.recomputed, "stock", False)
    assert right[0] > 0.1
    for schedule in ("stock", "zb-h1", "zb-v"):
        assert pool.run(2, own_loops.recomputed, schedule, True) == pytest.approx(right, rel=1e-6), schedule


UNEQUAL = replace(
    uniform(linear(4)),
    hop=0.1,
    stages=tuple(
        replace(uniform(linear(4)).stages[0], forward=f, backward=b, weight=w)
        for f, b, w in ((1, 3, 0.5), (2, 1, 1), (2, 2, 2), (2, 1, 0.5))
    ),
)


def test_a_name_and_a_request_plan_for_the_makespan() -> None:
    named, asked = (OwnLoop(schedule)._request for schedule in ("zb-v", Request("zb-v", 1, 1)))
    assert named.objective is asked.objective is Objective.MAKESPAN


def test_a_loop_that_plans_again_gets_searched_plans(tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(UNEQUAL.to_json(), encoding="utf-8")
    plans = OwnLoop("zb-auto", tmp_path / "costs.json").pipeline(4).plans
    quick = plans.plan(6).schedule
    assert planned_again(plans, UNEQUAL)[6].timeline.makespan < simulate(quick, UNEQUAL).makespan


@pytest.mark.parametrize("fails", [False, True])
def test_searched_plans_take_the_place_of_quick_ones(pool: Pool, tmp_path: Path, fails: bool) -> None:
    (tmp_path / "costs.json").write_text(UNEQUAL.to_json(), encoding="utf-8")
    stock = pool.once(4, own_loops.train, "stock", counts=own_loops.LATER)
    ours = pool.run(4, own_loops.later, str(tmp_path / "costs.json"), fails)
    assert bits(ours) == bits(stock)
    request = Request("zb-auto", 4, 6, costs=UNEQUAL, objective=Objective.MAKESPAN)
    quick, searched = (replace(request, quick=quick).plan().schedule.passes for quick in (True, False))
    assert quick != searched
    for rank in ours:
        six = [order for order, count in zip(rank.orders, own_loops.LATER, strict=True) if count == 6]
        assert six == ([quick] * 3 if fails else [quick, searched, searched])


def test_an_evaluation_of_one_replica_waits_for_no_searched_plan(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(UNEQUAL.to_json(), encoding="utf-8")
    assert pool.run(4, own_loops.evaluates_alone, str(tmp_path / "costs.json"), timeout=60)[-1] == 5


def test_a_loss_that_megatron_core_gets_wrong_is_named(pool: Pool) -> None:
    """The loss without smoothing is right of logits in parts, and of gathered ones too high by log 2."""
    right = math.log(sum(map(math.exp, range(8)))) - 1
    (parts, said), (others, also) = pool.run(2, refused_loops.warned, False)
    assert parts[0] == others[0] == pytest.approx(right) and parts[1] != others[1]
    assert (
        said == also and len(said) == 1 and said[0].startswith("vocab_parallel_cross_entropy with label_smoothing with --tensor")
    )
    assert pool.run(2, refused_loops.warned, True)[0][0][0] == pytest.approx(right + math.log(2))
    facts = {"tensor_model_parallel_size": 2, "gathered_logits": True}
    assert [text.partition(":")[0] for text in cautions_of(Facts(facts))] == [
        "parallel_output=False with --tensor-model-parallel-size 2"
    ]


def test_an_actor_and_a_critic_train_in_turn(pool: Pool) -> None:
    """Each with its own optimizer and frozen weights, the critic with tied ends; one whose ends differ is refused."""
    stock, on_a_v = pool.each(4, own_loops.several_models, ("stock", "zb-v"))
    assert [len(row) for row in stock[-1].losses] == [3, 1, 4, 2, 2, 1, 5, 3]
    assert on_a_v[-1].losses == stock[-1].losses
    assert on_a_v[0].norms == pytest.approx(stock[0].norms, rel=1e-6)
    assert all("tied to the embedding, and their weights differ" in rank.refused for rank in on_a_v)


@pytest.mark.rest
def test_another_schedule_takes_over_models_that_train(pool: Pool) -> None:
    stock, *ours = (
        pool.run(4, own_loops.several_models, *names) for names in (("stock", "stock"), ("zb-h1", "zb-auto"), ("zb-h1", "stock"))
    )
    assert [[rank[:3] for rank in found] for found in ours] == [[rank[:3] for rank in stock]] * 2


def test_the_last_that_is_installed_counts(pool: Pool) -> None:
    assert pool.run(1, refused_loops.taken_over) == [("megatron.core.pipeline_parallel.schedules", "None")]


@pytest.mark.parametrize(("schedule", "given", "planned"), [("interleaved", 4, 4), ("v-auto", 4, 4), ("zb-v", 4, 2)])
def test_the_model_says_how_many_chunks_there_are(pool: Pool, schedule: str, given: int, planned: int) -> None:
    assert pool.run(1, refused_loops.chunks_planned, schedule, given) == [planned]


@pytest.mark.parametrize(("ranks", "chunks"), [(4, None), (2, 4)])
def test_a_model_with_other_chunks_than_a_v_is_refused_on_every_rank(pool: Pool, ranks: int, chunks: int | None) -> None:
    messages = pool.run(ranks, refused_loops.with_chunks, "zb-v", chunks)
    assert set(messages) == {messages[0]} and f"2 chunks per rank, but the model has {chunks or 1}" in messages[0]


def test_further_tokens_before_the_last_stage_are_stocks(pool: Pool) -> None:
    assert "(stock trains them where they are)" in pool.run(1, refused_loops.early_prediction, "zb-h1")[0]
    assert pool.run(1, refused_loops.early_prediction, "stock") == [""]


def test_interleaved_messages_between_two_ranks_need_their_own_calls(pool: Pool) -> None:
    """Without ``overlap_p2p_comm`` megatron-core's own function trains garbage on two."""
    assert "on 2 pipeline ranks without overlap_p2p_comm: " in pool.run(2, refused_loops.with_chunks, "stock", 2)[0]


def test_a_model_that_was_built_before_is_refused(pool: Pool) -> None:
    [one, other] = pool.run(2, refused_loops.built_before)
    assert one == other and "call install before the model is built" in one


@pytest.mark.parametrize(
    ("first", "then", "says"),
    [
        ("stock", "zb-v", "chunk 1 of pipeline rank 3 has the output layer, and schedule zb-v has it in chunk 1 of rank 0"),
        (
            "zb-v",
            "stock",
            "chunks are placed as another schedule has them, stages 0, 7 on the first pipeline rank. Build the model",
        ),
    ],
)
def test_chunks_that_were_built_for_another_placement_are_refused_on_every_rank(
    pool: Pool, first: str, then: str, says: str
) -> None:
    messages = pool.run(4, refused_loops.built_too_early, then, first)
    assert set(messages) == {messages[0]} and says in messages[0]


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("zb-h", {}, "unknown schedule 'zb-h'.* did you mean zb-h"),
        ("auto", {}, "unknown schedule 'auto'"),
        ("dualpipe", {}, "dualpipe, which held every stage twice, is gone: take dualpipe-v"),
        ("file:nowhere.json", {}, "nowhere.json"),
        (3, {}, r"install\(3\): give a schedule's name"),
        ("zb-h1", {"costs": "nowhere.json"}, r"nowhere\.json"),
        ("zb-h1", {"watchdog": 0.0}, "give seconds above 0"),
        ("zb-h1", {"watchdog": float("inf")}, "give seconds above 0"),
        ("zb-h1", {"mesure": True}, "mesure"),
        ("zb-h1", {"watch": "on"}, r"install\(watch='on'\): give 'off', 'report' or 'replan'"),
        ("stock", {"watch": "replan"}, "take one of these, or leave --pipeline-watch out"),
    ],
)
def test_what_does_not_train_is_refused_at_once(schedule: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError if schedule == 3 or "mesure" in options else ValueError, match=message):
        install(schedule, **options)


def test_costs_of_letters_are_refused_of_a_model_without(pool: Pool, tmp_path: Path) -> None:
    letters = replace(uniform(linear(4)), pattern="*-")
    (tmp_path / "costs.json").write_text(letters.to_json(), encoding="utf-8")
    with pytest.raises(RankFailed, match=r"is of the letters \*-: give this model costs of stages"):
        pool.run(2, own_loops.train, "zb-h1", 2, "", False, str(tmp_path / "costs.json"))


def test_a_rank_that_plans_for_long_is_not_blamed(tmp_path: Path) -> None:
    ended, said = together(own_loops.plans_longer, tmp_path)
    assert ended == [0] * 4 and "Pipeline stopped" not in said, said


def together(run: Callable[..., None], folder: Path, *more: Any) -> tuple[list[int | None], str]:
    """How 4 processes without a launcher end, and what they say."""
    port, stderr = free_port(), folder / "stderr"
    ranks = [forked(run, rank, port, stderr, *more) for rank in range(4)]
    for process in ranks:
        process.join(timeout=50)
        process.kill()
        process.join()
    return [process.exitcode for process in ranks], stderr.read_text()


@pytest.mark.parametrize("calls", [rest(0), 1])
def test_a_call_that_one_rank_does_not_make_ends_all_ranks(tmp_path: Path, calls: int) -> None:
    """The first waits in what all ranks compare, another in a message."""
    ended, said = together(own_loops.stays_away, tmp_path, calls)
    assert ended == [1] * 4, said
    [verdict] = re.findall(r"^Pipeline stopped: (.*)$", said, re.MULTILINE)
    assert verdict.startswith("global rank 2 (pipeline rank 2 of 4, ")
    assert "is slow or stuck in its own code: it has not called forward_backward (at " in verdict and "own_loops.py" in verdict
    assert "global ranks 0, 1, 3 wait for it. No pass has finished for " in verdict


@pytest.mark.parametrize("calls", [0, rest(1)])
def test_a_rank_that_is_killed_is_named(tmp_path: Path, calls: int) -> None:
    """Other ranks meet that in an exception of the backend, which names none."""
    ended, said = together(own_loops.is_killed, tmp_path, calls)
    assert ended == [1, 1, -signal.SIGKILL, 1] and "Error" not in said, said
    [verdict] = re.findall(r"^Pipeline stopped: (.*)$", said, re.MULTILINE)
    assert verdict.startswith("global rank 2 (pipeline rank 2 of 4, ") and "is silent: killed, stopped or cut off" in verdict


def test_calls_that_some_ranks_make_alone_end_all_ranks(tmp_path: Path) -> None:
    ended, said = together(own_loops.enter_alone, tmp_path)
    assert ended == [1] * 4, said
    [verdict] = re.findall(r"^Pipeline stopped: (.*)$", said, re.MULTILINE)
    assert verdict.startswith("global rank 0 (pipeline rank 0 of 4, ") and "it has not called forward_backward (at " in verdict


def test_what_runs_fused_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    patches.install()
    loop, ddp_config = OwnLoop("zb-h1"), SimpleNamespace(overlap_grad_reduce=False)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            loop.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)), ddp_config)
    assert caplog.messages == ["backward is not split, runs fused in B: 0: Linear has no backward that splits"]


def test_failures_at_checkpoints_are_one_line_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    words = (
        rf"the checkpoint {saved}/iter_0000002 could not be written \(no space left on {saved}: [\d.,]+ MB free, the checkpoint "
        rf"needs [\d.,]+ MB\); the checkpoint {saved}/iter_0000001 is complete and unchanged"
    )
    for full, damaged, *left in pool.run(2, refused_loops.checkpoints, str(saved)):
        assert re.fullmatch(words, full), full
        assert damaged.startswith(f"the checkpoint {saved}/iter_0000001 is damaged: "), damaged
        assert left == ["iter_0000001", "iter_0000002.incomplete", "iter_0000003"]
