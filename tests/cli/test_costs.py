"""Costs on the command line and in files: per rank, per stage, with extras, with recomputation."""

import json
from pathlib import Path

import pytest
from command import refusal, report
from hypothesis import given
from hypothesis import strategies as st
from schedule_strategies import placements

from megatron.pipeline.cli import main
from megatron.pipeline.cli.arguments import StageList, cost_flags
from megatron.pipeline.cli.request import cost_flags_of
from megatron.pipeline.planner.planning.costs import CostFlags, cost_fields, costs_of
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved, linear, v

numbers = st.floats(1e-6, 1e6) | st.just(0.0)


def flags(*arguments: str) -> CostFlags:
    return cost_flags_of(cost_flags().parse_args(arguments))


@st.composite
def stage_costs(draw: st.DrawFn) -> StageCosts:
    activation = draw(numbers)
    parts = [activation * draw(st.sampled_from([0, 0.25, 1])) for _ in range(2)]
    fused = draw(st.none() | numbers)
    return StageCosts(draw(numbers), draw(numbers), draw(numbers), activation, parts[0], fused, draw(numbers), parts[1])


@given(st.lists(stage_costs(), min_size=1, max_size=5), numbers)
def test_costs_survive_json(stages: list[StageCosts], hop: float) -> None:
    costs = Costs(tuple(stages), hop)
    assert Costs.from_json(costs.to_json()) == costs


def test_what_a_file_of_costs_may_leave_out() -> None:
    (stage,) = Costs.from_json('{"stages": [{"forward": 2, "backward": 3, "weight": 1, "activation": 8}]}').stages
    assert stage == StageCosts(2, 3, 1, activation=8, retained=8, fused=None, recompute=2, checkpoint=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not costs: invalid JSON"),
        ("[]", 'not costs: expected {"hop"'),
        ('{"stages": []}', "not costs: expected"),
        ('{"stages": [{"forward": 1, "backward": 1, "weight": 1}], "hops": 1}', "not costs: expected"),
        ('{"stages": [3]}', "stage 0: expected the costs of the stage by name, got 3"),
        (
            '{"stages": [{"forward": 1, "backward": 1, "weight": 1, "dispatch": 0.2, "layers": 2}]}',
            "stage 0: dispatch without experts, combine, backward_combine, backward_experts, backward_dispatch, weight_ex",
        ),
        *(
            (
                f'{{"stages": [{{"forward": 1, "backward": 1, "weight": 1, "layers": {layers}}}]}}',
                f"stage 0: layers must be a whole number from 0 to 1000, got {layers}",
            )
            for layers in (1.5, 1001)
        ),
        ('{"stages": [{"forward": 1, "backward": 1}]}', "stage 0: missing weight; costs of a stage are forward, backward"),
        ('{"stages": [{"forward": 1, "backward": 1, "weight": 1, "F": 1}]}', "stage 0: unknown cost 'F'"),
        ('{"stages": [{"forward": 1, "backward": 1, "weight": -1}]}', "stage 0: weight must be a number, 0 or between"),
        ('{"stages": [{"forward": 1, "backward": true, "weight": 1}]}', "stage 0: backward must be a number"),
        ('{"stages": [{"forward": null, "backward": 1, "weight": 1}]}', "stage 0: forward must be a number"),
        ('{"stages": [{"forward": NaN, "backward": 1, "weight": 1}]}', "forward must be a number, 0 or between 1e-100 and 1e100"),
        ('{"stages": [{"forward": 1, "backward": 1, "weight": 1}], "hop": "1"}', "hop must be a number"),
        (
            '{"stages": [{"forward": 1, "backward": 1, "weight": 1}], "beside_communication": 0}',
            "beside_communication must be a number of at least 1, got 0",
        ),
        ('{"stages": [{"forward": 1, "backward": 1, "weight": 1, "checkpoint": 2}]}', "checkpoint takes 2, more than the 1 of"),
    ],
)
def test_bad_costs_name_the_file_and_the_stage(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    plan = ["plan", "--schedule", "1f1b", "--pp", "1", "--microbatches", "1", "--costs", str(path)]
    line = refusal(capsys, *plan)
    assert f"{path}: " in line
    assert message in line


def test_the_costs_of_a_plan_may_have_a_part_of_a_layer_on_a_chunk() -> None:
    costs = Costs((StageCosts(1, 1, 1, layers=5).share(2),) * 2)
    assert costs.stages[0].layers == 2.5 and Costs.from_fields(costs.fields()) == costs


@pytest.mark.parametrize(
    ("placement", "first", "last"),
    [(linear(3), [0], [2]), (interleaved(2, 3), [0], [5]), (v(3), [0], [5]), (linear(1), [0], [0])],
)
def test_extras_go_to_the_ends_of_the_model_wherever_they_live(placement: Placement, first: list[int], last: list[int]) -> None:
    base = costs_of(flags("--cost", "F=2,B=3,W=1,BW=3.5,comm=0.5", "--activation", "B=2,W=1,R=0.5"), placement)
    share = StageCosts(2, 3, 1, 1, 0.5, 3.5, 2, 0.25).share(placement.chunks)
    assert base == Costs((share,) * (placement.last_stage + 1), 0.5)
    extra = ("--first-stage", "F=0.25", "--last-stage", "F=1,B=2,W=4,activation=3")
    costs = costs_of(flags("--cost", "F=2,B=3,W=1,BW=3.5,comm=0.5", "--activation", "B=2,W=1,R=0.5", *extra), placement)
    for index, stage in enumerate(costs.stages):
        embedding, head = 0.25 * (index in first), index in last
        assert stage.forward == share.forward + embedding + head
        assert stage.recompute == share.recompute + embedding + head
        assert stage.backward == share.backward + 2 * head
        assert stage.weight == share.weight + 4 * head
        assert stage.fused == 3.5 / placement.chunks + 6 * head
        assert stage.activation == share.activation + 3 * head
        assert stage.retained == pytest.approx(stage.activation / 2)
        assert stage.checkpoint == pytest.approx(stage.activation / 4)


@given(placements(), st.data())
def test_what_json_tells_about_costs_is_read_back(placement: Placement, data: st.DataObject) -> None:
    count = placement.last_stage + 1
    take_time = st.lists(stage_costs(), min_size=count, max_size=count).filter(lambda stages: any(one.forward for one in stages))
    stages = data.draw(take_time)
    costs = Costs(tuple(stages), data.draw(numbers))
    told = json.loads(json.dumps(cost_fields(placement, costs)))
    assert costs_of(flags(), placement, told) == costs


@given(
    placements(),
    st.fixed_dictionaries({}, optional={name: st.floats(0.1, 10) for name in ("F", "B", "W", "comm", "BW", "R")}),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_equal_stages_are_told_by_one_ranks_share(
    placement: Placement, cost: dict[str, float], retained: float, kept: float
) -> None:
    given = {"costs": cost, "activation": {"B": 1.0, "W": round(retained, 3), "R": round(kept, 3)}}
    costs = costs_of(flags(), placement, given)
    told = cost_fields(placement, costs)
    assert set(told) == {"costs", "activation"}
    assert {name: told["costs"][name] for name in cost if name != "R"} == pytest.approx(
        {name: value for name, value in cost.items() if name != "R"}
    )
    again = costs_of(flags(), placement, told)
    for field in ("forward", "backward", "weight", "retained", "recompute", "checkpoint"):
        assert getattr(again.stages[0], field) == pytest.approx(getattr(costs.stages[0], field))


def test_extras_leave_the_parts_of_layers() -> None:
    others = dict.fromkeys(("F.experts", "F.combine", "B.combine", "B.experts", "B.dispatch"), 0.1)
    cost = {"F": 2, "F.dispatch": 0.4, "W.experts": 0.5, "layers": 8} | others
    flags = CostFlags(cost, last_stage={"F": 1, "activation": 0.5})
    stages = costs_of(flags, v(2)).stages
    assert [stage.forward for stage in stages] == [1, 1, 1, 2]
    assert {(stage.dispatch, stage.weight_experts, stage.layers) for stage in stages} == {(0.2, 0.25, 4)}
    assert stages[:3] == costs_of(CostFlags(flags.cost), v(2)).stages[:3]


def test_a_plan_with_uneven_stages_travels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --schedule zb-h1 --pp 3 --microbatches 5 --cost F=1,B=1.5,W=1,comm=0.25 --memory-limit 9 --objective makespan "
    plan += "--first-stage F=0.5,activation=0.5 --last-stage F=1,B=1,W=0.5,activation=2 --fuse 1"
    planned = report(capsys, plan)
    assert planned["costs"] == {"F": 1.5, "B": pytest.approx(11 / 6), "W": pytest.approx(7 / 6), "comm": 0.25}
    assert [stage["forward"] for stage in planned["stage_costs"]["stages"]] == [1.5, 1, 2]
    assert (planned["objective"], planned["memory_limit"], planned["fuse"]) == ("makespan", 9, [1])
    assert all(work[0] in "FB" and work[:1] != "W" for work in planned["passes"][1])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned))
    del planned["plan_seconds"]
    assert report(capsys, f"plan {path}") == planned

    # Flags replace what they name, on every stage, and leave the rest.
    other = report(capsys, f"plan {path} --cost W=2,comm=0")["stage_costs"]
    assert other["hop"] == 0
    assert [(stage["forward"], stage["weight"]) for stage in other["stages"]] == [(1.5, 2), (1, 2), (2, 2)]

    # The same stages from a file of costs give the same plan.
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(planned["stage_costs"]))
    same = "--schedule zb-h1 --pp 3 --microbatches 5 --objective makespan --memory-limit 9 --fuse 1"
    again = report(capsys, f"plan {same} --costs {costs}")
    del again["plan_seconds"]
    assert again == planned


def test_recomputation_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --schedule 1f1b --pp 1 --microbatches 2 --cost F=1,B=2,W=3,R=4 --activation B=1,W=1,R=0.25"
    data = report(capsys, f"{plan} --recompute all")
    assert data["passes"] == [["F0.0", "R0.0", "BW0.0", "F1.0", "R1.0", "BW1.0"]]
    assert (data["span"], data["peak_activation"]) == (20, [1])
    assert (data["costs"], data["activation"]) == ({"F": 1, "B": 2, "W": 3, "comm": 0, "R": 4}, {"B": 1, "W": 1, "R": 0.25})
    two = report(capsys, "plan --schedule 1f1b --pp 2 --microbatches 2 --activation B=1,R=0.25 --recompute 0")
    assert two["peak_activation"] == [1.25, 1]
    assert [any(work.startswith("R") for work in passes) for passes in two["passes"]] == [True, False]


def test_a_fused_backward_may_take_another_time(capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, "plan --schedule zb-h1 --pp 1 --microbatches 1 --cost F=1,B=1,W=1,BW=1.5 --fuse 0")
    assert (data["passes"], data["span"], data["costs"]["BW"]) == ([["F0.0", "BW0.0"]], 2.5, 1.5)


def test_the_limit_travels_and_can_be_lifted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    data = report(capsys, "plan --schedule zb-h1 --pp 2 --microbatches 4 --memory-limit 2")
    path.write_text(json.dumps(data | {"memory_limit": 1}))
    assert "above the limit of 1" in refusal(capsys, "plan", str(path))
    assert "memory_limit" not in report(capsys, f"plan {path} --memory-limit inf")
    for wrong in ("2", -1, True):
        path.write_text(json.dumps(data | {"memory_limit": wrong}))
        assert f"{path}: memory_limit must be a number between 0 and 1e100, got {wrong!r}" in refusal(capsys, "plan", str(path))
    path.write_text(json.dumps(data | {"memory_limit": [2]}))
    assert f"{path}: memory_limit has 1 numbers for 2 ranks" in refusal(capsys, "plan", str(path))


@pytest.mark.parametrize(
    ("text", "stages"), [("all", {0, 1, 2, 3, 4, 5}), ("0", {0}), ("0,3-5", {0, 3, 4, 5}), ("2-2,1", {1, 2})]
)
def test_stages(text: str, stages: set[int]) -> None:
    assert StageList(text).of(6) == stages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--recompute 4", "--recompute 4: there is no stage 4; the stages are 0..3"),
        ("--recompute 0-99999999999999999999", "there is no stage 99999999999999999999"),
        ("--fuse 3-1", "'3-1': expected all, or stages such as 0 or 0,3-5"),
        ("--fuse -1", "'-1': expected all"),
        ("--objective time", "invalid choice: 'time'"),
        ("--activation B=1,R=2", "activation B=1,W=1,R=2: F must allocate"),
        ("--splits 2", "--splits 2 cuts microbatches into slices, and zb-h1 does not: leave it out"),
        ("--fuse 2-4", "--fuse 2-4: there is no stage 4"),
        ("--group 2", "--group 2 sets groups of microbatches, and zb-h1 has its own or none"),
        (
            "--cost F.attention=0.5",
            "unknown cost 'F.attention' (attention is what the other parts leave of F: give F); allowed are F,",
        ),
        ("--cost F.dispatch=0.1,layers=4", "F.dispatch without F.experts, F.combine, B.combine, B.experts, B.dispatch, W.ex"),
        ("--cost layers=1.5", "layers=1.5: give a whole number of layers per rank, from 1 to 1000"),
        ("--cost F.dispatch=0.9,F.combine=0.9", "F.dispatch + F.combine = 1.8 is more than F = 1, whose parts they are"),
        ("--cost B=2,B.experts=2.5", "B.experts = 2.5 is more than B = 2, whose part it is"),
        ("--first-stage BW=1", "unknown cost 'BW'; allowed are F, B, W, activation"),
        ("--costs /nowhere/at/all", "--costs: cannot read /nowhere/at/all: No such file or directory"),
        ("--schedule file:mine.json", "for a file: mpipe plan mine.json"),
    ],
)
def test_bad_flags(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = "plan --schedule zb-h1 --pp 4 --microbatches 8"
    assert message in refusal(capsys, plan, arguments)


def test_costs_of_stages_exclude_the_flags_they_replace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"stages": [{"forward": 1, "backward": 1, "weight": 1}, {"forward": 1, "backward": 1, "weight": 1}]}')
    plan = ["plan", "--schedule", "zb-h1", "--pp", "2", "--microbatches", "2", "--costs", str(path)]
    assert "leave --first-stage out, or --costs" in refusal(capsys, *plan, "--first-stage", "F=1")
    assert "leave --cost out, but for comm[..] of single links, or --costs" in refusal(capsys, *plan, "--cost", "comm=1")


def test_layers_are_split_with_the_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "plan --schedule zb-h1 --pp 4 --microbatches 8 --last-stage F=0.5,B=0.5 --objective makespan --balance 20"
    data = report(capsys, flags)
    split = data["balance"]
    assert split["layers"] == [6, 5, 5, 4] and split["layout"] == "Et*6|t*5|t*5|t*4L"
    assert data["makespan"] < split["even"]
    file = tmp_path / "plan.json"
    assert main([*flags.split(), "-o", str(file)]) == 0
    capsys.readouterr()
    assert report(capsys, f"plan {file}")["makespan"] == pytest.approx(data["makespan"])
    assert main(flags.split()) == 0
    text = capsys.readouterr().out
    assert f"makespan of the even split; this one is {1 - data['makespan'] / split['even']:.1%} shorter" in text
    assert "by stage 6 5 5 4; --pipeline-model-parallel-layout 'Et*6|t*5|t*5|t*4L'" in text
    compared = report(capsys, flags.replace("plan --schedule zb-h1", "compare --schedules zb-h1"))
    assert compared["schedules"][0]["balance"]["layers"] == [6, 5, 5, 4]


def test_an_even_split_beyond_the_limit_has_no_length(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("plan --schedule 1f1b --pp 4 --microbatches 8 --balance 16 --memory-limit 3.6".split()) == 0
    assert "the even split does not fit into the limit" in capsys.readouterr().out


def test_what_a_plan_says_of_its_shards_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "spread.json"
    plan = "plan --schedule 1f1b --pp 2 --microbatches 3 --vocab-parallel 2 --vocab-cost S=0.3,exchange=0.1"
    assert main([*plan.split(), "-o", str(file)]) == 0
    planned = json.loads(file.read_text())
    assert planned["vocab_costs"] == {"S": 0.3, "T": 0.5, "IF": 0.0, "IB": 0.0, "activation": 0.0, "exchange": 0.1}
    capsys.readouterr()
    assert main(["plan", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["span"] == planned["span"]
