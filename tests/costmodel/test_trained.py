"""What trains decides what passes take and hold, and which schedule is the shortest."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule.core.kinds import Flow
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.program import Send
from megatron.pipeline.planner.shape.trained import Trained

LAYER = 12 * 512**2 + 13 * 512  # parameters
MODEL = (
    "--num-layers 16 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 1 --global-batch-size 16 "
    "--bf16 --pipeline-model-parallel-size 4 --tokenizer-type NullTokenizer --vocab-size 8191 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer"
)
HELD = 2 * 1024 * 512  # bytes of hidden states


def printed(capsys: pytest.CaptureFixture[str], command: str) -> Any:
    assert main(command.split()) == 0
    return json.loads(capsys.readouterr().out)


def costs(capsys: pytest.CaptureFixture[str], trained: str, flags: str = MODEL) -> Any:
    schedule = "" if "--pipeline-schedule" in flags else "--pipeline-schedule zb-h1"
    return printed(capsys, f"costs {flags} {schedule} --gpu H100-80GB --json --trained {trained}")["stages"]


def test_a_frozen_linear_has_b_and_no_w_and_keeps_no_input(capsys: pytest.CaptureFixture[str]) -> None:
    whole, frozen = costs(capsys, "all"), costs(capsys, "none")
    for stage, (before, after) in enumerate(zip(whole, frozen, strict=True)):
        assert after["weight"] == after["retained"] == 0
        assert after["forward"] == before["forward"]
        assert (after["backward"] == pytest.approx(before["backward"])) is (stage > 0), "the embedding's gradient is none"
    # Both norms' outputs and the MLP's: of 32 times half of that, 14 are inputs, of which attention keeps its own.
    assert whole[1]["activation"] - frozen[1]["activation"] == 4 * (1 + 1 + 4) * HELD


def test_adapters_add_products_and_hold_what_w_needs(capsys: pytest.CaptureFixture[str]) -> None:
    whole, frozen = costs(capsys, "all")[1], costs(capsys, "none")[1]
    adapted, wider, attention = (costs(capsys, f"lora:r={which}")[1] for which in ("16", "64", "16,linear_qkv,linear_proj"))
    for name in ("forward", "backward", "weight"):
        assert frozen[name] < attention[name] < adapted[name] <= wider[name]
    assert adapted["weight"] < 0.5 * whole["weight"]
    # Of each of 4 linears in 4 layers there are 16 numbers more, 64 or of 2 linears alone 16.
    each = 2 * 1024 * 4
    assert [one["activation"] - whole["activation"] for one in (adapted, wider)] == [4 * 16 * each, 4 * 64 * each]
    assert adapted["retained"] == whole["retained"] + 4 * 16 * each
    assert attention["activation"] == frozen["activation"] + 4 * HELD + 2 * 16 * each


def test_before_the_first_layer_that_trains_there_is_no_b(capsys: pytest.CaptureFixture[str]) -> None:
    whole, later = costs(capsys, "all"), costs(capsys, "layers=6-11,12-13")
    for name in ("backward", "weight", "activation", "retained"):
        assert later[0][name] == 0
        assert later[1][name] == pytest.approx(whole[1][name] / 2, rel=0.02)  # layers 6 and 7, of 4 to 7
        assert later[2][name] == pytest.approx(whole[2][name])
    assert later[3]["backward"] == pytest.approx(whole[3]["backward"])
    assert 0 < later[3]["weight"] < 0.5 * whole[3]["weight"], "two layers of four, and no output layer"
    assert costs(capsys, "layers=8-15,embedding")[0]["backward"] > 0
    output = costs(capsys, "output", f"{MODEL} --untie-embeddings-and-output-weights")
    assert [stage["backward"] for stage in output] == [0] * 4
    assert [stage["weight"] > 0 for stage in output] == [False] * 3 + [True]


@pytest.mark.parametrize(
    ("flags", "trained", "count"),
    [
        ("", "all", 4 * LAYER),
        ("", "none", 0),
        ("", "layers=4-5", 2 * LAYER),
        ("", "lora:r=16", 4 * 16 * (4 + 2 + 5 + 5) * 512),
        ("", "lora:r=8,layers=4,linear_proj", 8 * 2 * 512),
        ("--tensor-model-parallel-size 2 --sequence-parallel", "lora:r=16", 2 * 16 * (4 + 2 + 5 + 5) * 512),
        ("--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512", "lora:r=16,linear_fc1", 4 * 16 * (1 + 2) * 512),
    ],
)
def test_gradients_and_optimizer_states_are_of_what_trains(
    capsys: pytest.CaptureFixture[str], flags: str, trained: str, count: int
) -> None:
    ranks = printed(capsys, f"memory {MODEL} {flags} --pipeline-schedule zb-h1 --json --trained {trained}")["ranks"]
    assert ranks[1]["state"] == 2 * ranks[1]["parameters"] + (4 + 12) * count


def test_a_plan_is_made_for_what_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Where W is nothing, zb-h1 is 1F1B and chunks shorten; a V has the frozen part and the other on every rank."""
    plan = "plan --pp 4 --microbatches 8 --cost F=1,B=1,W=1,comm=0.01 --json --schedule"
    spans = {name: printed(capsys, f"{plan} {name} --trained lora:r=16")["makespan"] for name in ("1f1b", "zb-h1", "interleaved")}
    assert spans["1f1b"] == spans["zb-h1"] > 1.1 * spans["interleaved"]
    assert printed(capsys, f"{plan} auto --trained lora:r=16")["chunks"] > 1
    later = [printed(capsys, f"{plan} {name} --trained layers=16-31/32")["makespan"] for name in ("zb-h1", "zb-v")]
    assert later[1] < 0.7 * later[0]


@pytest.mark.parametrize("trained", ["layers=1-3/4", "layers=2-3/4", "layers=3/4"])
def test_freezing_makes_no_order_longer(capsys: pytest.CaptureFixture[str], trained: str) -> None:
    """A stage that holds nothing leaves a V room, and takes none from its limit, which is of 1F1B where all trains."""
    plan = "plan --schedule zb-v --pp 2 --microbatches 6 --json"
    whole, part = (printed(capsys, f"{plan} {more}") for more in ("", f"--trained {trained}"))
    assert part["makespan"] <= whole["makespan"] and max(part["peak_activation"]) <= max(whole["peak_activation"])


def test_layers_of_a_stage_that_train_in_part() -> None:
    found = Trained.read("layers=3-5/6")
    assert found and list(found.stages(4)) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert list(found.stages(3))[1] == (0.5, 0.5)
    adapted = Trained.read("lora:r=8")
    assert adapted and list(adapted.stages(2)) == [(1, 0)] * 2


def test_auto_and_tune_choose_for_what_trains(capsys: pytest.CaptureFixture[str]) -> None:
    tune = f"tune {MODEL.replace('--pipeline-model-parallel-size 4', '')} --gpu H100-80GB --gpus 4 --json --schedules 1f1b,zb-h1"
    tune += " --hidden-size 4096 --num-attention-heads 32"  # else hosts that launch kernels set the pace
    best = [printed(capsys, f"{tune} --pipeline 4 --tensor 1 --trained {trained}")["best"][0] for trained in ("all", "none")]
    assert best[1]["iteration_seconds"] < 0.85 * best[0]["iteration_seconds"]


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        ("lora:r=16,linear_q", "linear_q cannot stand there: give lora:r=16, .* linear_qkv, linear_proj, linear_fc1, linear_fc2"),
        ("lora:r=0", "r=0 cannot stand there"),
        ("lora:linear_qkv", "does not say r, the rank of the adapters"),
        ("lora:r=8,r=16", "r=16 cannot stand there"),
        ("layers=12-16", "the model has layers 0-15"),
        ("layers=5-3", "layers=5-3 cannot stand there"),
        ("layers=0/32", "the model has layers 0-15"),
        ("all,output", "all cannot stand there"),
        ("linear_qkv", "linear_qkv cannot stand there"),
        ("layers=", "layers= cannot stand there"),
    ],
)
def test_wrong_words(capsys: pytest.CaptureFixture[str], trained: str, message: str) -> None:
    for command in ("memory", "costs --gpu H100-80GB", "tune --gpu H100-80GB --gpus 4"):
        line = refusal(capsys, f"{command} {MODEL} --trained {trained}")
        assert line.startswith(f"mpipe: --trained {trained}") and re.search(message, line)


def test_words_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --schedule zb-h1 --pp 4 --microbatches 8"
    assert "say of how many layers, such as layers=16-31/32" in refusal(capsys, f"{plan} --trained layers=2-3")
    assert "--balance 8 moves layers that are alike: give it a pattern" in refusal(
        capsys, f"{plan} --trained lora:r=8 --balance 8"
    )
    assert "lora cannot stand there: give all, none" in refusal(capsys, f"{plan} --trained lora")
    assert "a model has at most 10,000 layers" in refusal(capsys, f"{plan} --trained layers=0-2/999999999")


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "v-auto"])
def test_nothing_goes_back_to_stages_without_b(name: str) -> None:
    plans = PlanCache(Request(name, 4, 1, chunks=2 if name == "interleaved" else None))
    depth = plans.placement.depth
    plans.plan(8)
    plans.train([None] * (depth // 2) + [0.5] * (depth // 2))
    planned, stages = plans.plan(8), plans.planned_costs.stages
    assert {(stage.backward, stage.weight, stage.activation) for stage in stages[: depth // 2]} == {(0, 0, 0)}
    assert {stage.weight / stage.backward for stage in stages[depth // 2 :]} == {0.5}
    sent = [one.message for program in planned.programs for one in program if isinstance(one, Send)]
    assert {message.stage for message in sent if message.flow is Flow.GRADIENT} <= {*range(depth // 2 + 1, depth)}
    assert planned.schedule.fields()["frozen"] == depth // 2
    assert Schedule.from_json(planned.schedule.to_json()).frozen == 0, "a file's programs run B everywhere"


def test_a_model_that_trains_more_has_b_again() -> None:
    """Several share a pipeline, as actor and critic do."""
    plans = PlanCache(Request("zb-h1", 4, 1))
    plans.train([None, None, 0.5, 0.5])
    assert plans.plan(8).schedule.frozen == 2 and plans.plan(8) is plans.plan(8)
    late = plans.plan(8)
    plans.train([None, 1.0, 1.0, 1.0])
    assert plans.plan(8).schedule.frozen == 1
    plans.adopt({8: late})
    assert plans.plan(8).schedule.frozen == 1, "a plan from before is not taken"
    plans.train([None, None, None, 1.0])
    assert plans.plan(8).schedule.frozen == 1


def test_nothing_changes_where_all_trains() -> None:
    plans = PlanCache(Request("zb-h1", 4, 1))
    planned = plans.plan(8)
    plans.train([1.0] * 4)
    assert plans.plan(8) is planned
