"""What training cannot run is refused with a reason, before any process group exists; what it can is planned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from megatron.core.transformer.enums import LayerType

from megatron.pipeline.cli import main
from megatron.pipeline.model.description import describe
from megatron.pipeline.model.layout import decoder_layers, stage_layers
from megatron.pipeline.monitor.cost_profile import with_sizes
from megatron.pipeline.planner.costmodel.memory import predict
from megatron.pipeline.planner.planning import aside, kept
from megatron.pipeline.planner.planning.aside import plan_batch
from megatron.pipeline.planner.planning.request import Request
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import v
from megatron.pipeline.planner.schedule.core.problem import Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.session.memory import more_than_stock, predicted_memory, stock_memory, uncounted_sizes
from megatron.pipeline.session.own_loop import OwnLoop
from megatron.pipeline.session.startup_lines import plan_in_words
from megatron.pipeline.trainer import program

MODEL = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --lr 1e-2 "
    "--tokenizer-type ByteLevelTokenizer --train-iters 6 --mock-data --pipeline-model-parallel-size 2 --global-batch-size 8"
)
ONE_CHUNK = ("1f1b", "zb-h1", "zb-h2", "zb-auto")
SEVERAL_CHUNKS = ("interleaved", "gis", "gis-h", "1f1b-v", "zb-v", "v-half", "v-min", "v-auto", "dualpipe-v")
SEVERAL_TOKENS = "--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope"
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"
LAYERS_PER_CHUNK = (
    "--pipeline-schedule interleaved --num-layers 10 --num-layers-per-virtual-pipeline-stage 2 "
    "--account-for-loss-in-pipeline-split"
)


@pytest.mark.parametrize("name", [*ONE_CHUNK, *SEVERAL_CHUNKS])
def test_what_runs_is_planned_for_its_own_placement(name: str) -> None:
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule {name}".split(), world_size=2)
    schedule = pipeline.plans.plan(4).schedule
    assert (schedule.name, schedule.placement) == (name, families.placement(name, 2))
    assert schedule.placement.chunks == (1 if name in ONE_CHUNK else 2)


@pytest.mark.parametrize(("flags", "backward", "weight"), [("", 2, 1), ("--recompute-fused-backward", 3, 0)])
def test_before_costs_are_measured_a_recomputing_backward_takes_a_forward_more(flags: str, backward: int, weight: int) -> None:
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule zb-auto {again} {flags}".split(), world_size=2)
    stage = pipeline.plans.plan(4).problem.costs.stages[0]
    assert (stage.forward, stage.backward, stage.weight, stage.activation) == (1, backward, weight, 1)


def by_flags() -> Schedule:
    flags = f"{MODEL} --pipeline-schedule v-auto --pipeline-memory-limit 0.8"
    return program.prepare(flags.split(), world_size=2)[2].plans.plan(4).schedule


def by_install() -> Schedule:
    return OwnLoop("v-auto").pipeline(4).plans.plan(6).schedule


def beside_the_training() -> Schedule:
    """The search that a quick plan of costs runs before."""
    loop = OwnLoop(Request("v-auto", 1, 1, costs=replace(uniform(v(4)), hop=0.1)))
    return plan_batch(loop.pipeline(4).plans.of_batch(6)).planned.schedule


@pytest.mark.parametrize("plan", [by_flags, by_install, beside_the_training])
def test_what_trainings_search_is_kept_for_their_next_start(
    plan: Callable[[], Schedule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "_WORTH", 0.0)
    monkeypatch.setenv(kept.FOLDER, str(tmp_path))
    aside._equal.cache_clear()
    first = plan()
    assert list(tmp_path.glob("v-auto-*.json"))

    def quickly(_request: Request, problem: Problem) -> kept.Order:
        assert problem.quick, "it searches again"
        return first, None

    monkeypatch.setattr(Request, "_search", quickly)
    aside._equal.cache_clear()
    assert plan() == first


STAGE = {"forward": 1e-3, "backward": 1e-3, "weight": 1e-3, "activation": 2**20}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("v-half --pipeline-memory-limit 0.5 --pipeline-model-parallel-size 4", "too little for v-half, which needs 0.75:"),
        ("v-auto --pipeline-memory-limit 0.2", "--pipeline-memory-limit 0.2 is too little for v-auto, which needs 0.577381:"),
        ("auto --pipeline-memory-limit 0.2", "--pipeline-memory-limit 0.2 is too little for auto, which needs 0.577381:"),
        ("v-min --pipeline-costs COSTS --pipeline-memory-limit 3.25MiB", "too little for v-min, which needs 4MiB:"),
        (
            "v-half --num-layers-per-virtual-pipeline-stage 1",
            "v-half has 2 chunks per rank, got 4 by --num-layers-per-virtual-pipeline-stage 1: leave that flag out",
        ),
        (f"zb-h2 {TWO_CHUNKS}", "got 2 by --num-virtual-stages-per-pipeline-rank 2: leave that flag out"),
        ("chimera", "chimera, which held every stage twice, is gone: take dualpipe-v"),
        ("interleaved --pipeline-model-parallel-size 1", "needs at least 2 pipeline ranks"),
        ("zb-h1 --pipeline-memory-limit 12GiB", "12GiB needs --pipeline-costs with activations in bytes: a file, or profile"),
        (
            "zb-h1 --pipeline-costs UNITS --pipeline-memory-limit 12GiB",
            "--pipeline-memory-limit of 12GiB, but the costs do not count bytes: give --pipeline-costs FILE with bytes, or",
        ),
        ("zbv", "unknown schedule 'zbv'; known are 1f1b, "),
        ("zbv", ", auto, stock and file:PATH; did you mean zb-v"),
        ("file:NESTED", "not a schedule: the JSON is nested too deeply"),
        (f"stock {TWO_CHUNKS} --global-batch-size 6", "needs a multiple of 2 microbatches for 2 pipeline ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_the_words_of_the_flags(flags: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps({"stages": [STAGE] * 4}))
    (tmp_path / "nested.json").write_text("[" * 100_000)
    (tmp_path / "units.json").write_text(json.dumps({"unit": "microbatches", "stages": [STAGE] * 4}))
    given = re.sub("COSTS|NESTED|UNITS", lambda name: str(tmp_path / f"{name[0].lower()}.json"), flags)
    with pytest.raises(ValueError, match=re.escape(reason)) as refused:
        program.prepare(f"{MODEL} --pipeline-schedule {given}".split(), world_size=4 if "size 4" in flags else 2)
    assert "\n" not in str(refused.value)
    advised = re.search(r"which needs ([\d.]+\w*):", str(refused.value))
    if advised and not given.startswith("auto"):
        enough = re.sub(r"(--pipeline-memory-limit) \S+", rf"\1 {advised[1]}", given)
        program.prepare(f"{MODEL} --pipeline-schedule {enough}".split(), world_size=4 if "size 4" in flags else 2)


@pytest.mark.parametrize(
    ("flags", "end"),
    [
        ("zb-auto --pipeline-memory-limit 0.4", "which needs 0.577381: raise it"),
        ("auto --pipeline-memory-limit 0.2", "which needs 0.577381: raise it"),
        ("zb-h1 --pipeline-memory-limit 0.75", "which needs 1: raise it, or take zb-auto or v-auto, which can hold less"),
        ("v-auto --pipeline-memory-limit 0.75 --vocab-parallel 2", "which needs 1: raise it"),
    ],
)
def test_the_hint_of_a_refused_limit_names_what_can_hold_less(flags: str, end: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(end)}$"):
        program.prepare(f"{MODEL} --pipeline-schedule {flags}".split(), world_size=2)


def test_auto_says_why_not_the_others_and_has_no_more_chunks_than_costs_speak_for() -> None:
    args, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule auto --pipeline-memory-limit 0.7".split(), world_size=2)
    head, _, table = plan_in_words(args, pipeline)[0].partition("\n")
    rows = {line.split()[0]: line for line in table.splitlines()}
    assert head == " schedule auto is v-auto v=2, at equal costs: a pass takes 1, memory is in microbatches"
    assert list(rows)[:2] == ["schedule", "v-auto"] and rows.keys() >= {*ONE_CHUNK, *SEVERAL_CHUNKS}
    assert rows["zb-h2"].endswith("needs 2, limit 1.4") and rows["zb-auto"].endswith("longer")
    assert "v=2" in rows["interleaved"] and "v=3" not in table
    _, _, several = program.prepare(f"{MODEL} --pipeline-schedule auto --num-layers-per-virtual-pipeline-stage 1".split(), 2)
    assert several.placement.chunks == 4


def test_auto_takes_no_more_stages_than_there_are_layers() -> None:
    flags = "--pipeline-schedule auto --pipeline-memory-limit 0.5 --global-batch-size 16 --pipeline-model-parallel-size 4"
    args, _, pipeline = program.prepare(f"{MODEL} {flags}".split(), world_size=4)
    assert min(stage.count(LayerType.decoder) for stage in stage_layers(args, pipeline.placement)) >= 1


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--num-layers 7", [2, 2, 2, 1]),
        ("--num-layers 10", [3, 3, 2, 2]),
        ("--num-layers 10 --num-layers-in-first-pipeline-stage 1", [1, 3, 3, 3]),
        ("--num-layers 9 --decoder-first-pipeline-num-layers 2 --num-layers-in-last-pipeline-stage 1", [2, 3, 3, 1]),
        ("--num-layers 7 --account-for-embedding-in-pipeline-split", [1, 2, 2, 2]),
        ("--num-layers 6 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [1, 2, 2, 1]),
        ("--num-layers 5 --pipeline-model-parallel-layout Ett|t|tt|L", [2, 1, 2, 0]),
        (f"--pipeline-model-parallel-layout Ettt|tt|tt|tL {TWO_CHUNKS}", [3, 2, 2, 1]),  # as many chunks as it has
        # Ends of interleaved stages are ranks.
        ("--pipeline-schedule interleaved --num-layers 10 --num-layers-in-first-pipeline-stage 4", [2, 3, 2, 3]),
        (f"{LAYERS_PER_CHUNK} --account-for-embedding-in-pipeline-split", [1, 2, 2, 2, 2, 1]),
    ],
)
def test_layers_are_spread_over_the_stages_of_any_placement(flags: str, layers: list[int]) -> None:
    args, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule zb-v {flags}".split(), world_size=2)
    stages = stage_layers(args, pipeline.placement)
    assert [stage.count(LayerType.decoder) for stage in stages] == layers
    assert stages[0][0] is LayerType.embedding and stages[-1][-1] is LayerType.loss


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--num-layers 3", "3 are left for 4 stages"),
        ("--num-layers-in-first-pipeline-stage 8", "0 are left for 3 stages"),
        ("--pipeline-model-parallel-layout Ett|tt|tttL", "3 stages, which 2 pipeline ranks cannot share"),
        ("--pipeline-model-parallel-layout Ett|tttL", "zb-v has 2 chunk"),
        ("--pipeline-model-parallel-layout Ett|tt|tt|tt", "must be loss"),
        (
            f"{SEVERAL_TOKENS} --pipeline-model-parallel-layout Ett|tt|ttttm|L",
            "(m) in stage 2: under schedules of ours they belong",
        ),
        ("--pipeline-model-parallel-layout Ett|xx|tt|ttL", "Invalid layer character"),
        (
            f"--pipeline-model-parallel-layout Etttt|ttttL {TWO_CHUNKS}",
            "(2) and --pipeline-model-parallel-layout (1) each say how many chunks a rank has: give one",
        ),
        (
            "--pipeline-model-parallel-layout Ett|tt|tt|ttL --num-layers-in-first-pipeline-stage 2 "
            "--account-for-loss-in-pipeline-split",
            "leave out --num-layers-in-first-pipeline-stage and --account-for-loss-in-pipeline-split",
        ),
        ("--num-layers-in-first-pipeline-stage 2 --account-for-loss-in-pipeline-split", "give one kind"),
        (
            f"{LAYERS_PER_CHUNK} --num-layers 9",
            "--num-layers 9 and --account-for-loss-in-pipeline-split (10) is not a multiple of 2",
        ),
    ],
)
def test_layers_that_do_not_fit_are_refused_with_numbers(flags: str, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as refused:
        program.prepare(f"{MODEL} --pipeline-schedule zb-v {flags}".split(), world_size=2)
    assert reason in str(refused.value)


@pytest.mark.parametrize("count", [1, 2, 8])
def test_costs_of_other_stages_are_cut_again(tmp_path: Path, count: int) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"stages": [{name: value / count for name, value in STAGE.items()}] * count}))
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule zb-v --pipeline-costs {path}".split(), world_size=2)
    assert pipeline.plans.costs is not None
    assert [stage.forward for stage in pipeline.plans.costs.stages] == pytest.approx([STAGE["forward"] / 4] * 4)
    (note,) = pipeline.plans.notes
    assert f"costs.json has the costs of {count} stages: for the 4 of this schedule they are cut evenly, or joined" in note


def test_stock_takes_chunks() -> None:
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule stock {TWO_CHUNKS}".split(), world_size=2)
    assert pipeline.placement.chunks == 2


@pytest.mark.parametrize(
    ("flags", "request_"),
    [
        (f"--pipeline-memory-limit 1 {TWO_CHUNKS}", "--chunks 2 --memory-limit 2 --objective makespan"),
        (f"--pipeline-memory-limit 1 {TWO_CHUNKS} --post-validation", "--chunks 2 --memory-limit 2 --objective span"),
        ("--vocab-parallel 2", "--objective makespan --vocab-parallel 2 --vocab-cost S=0,T=0"),
    ],
)
def test_auto_is_what_mpipe_would_choose(capsys: pytest.CaptureFixture[str], flags: str, request_: str) -> None:
    """Where no iteration begins before the one before has ended on all ranks, the makespan is what to choose by."""
    _, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule auto {flags}".split(), world_size=2)
    first, *_, last = pipeline.plans.planned_costs.stages
    logits = f"--last-stage activation={last.activation - first.activation}"
    assert main(f"plan --schedule auto --pp 2 --microbatches 4 {logits} {request_} --json".split()) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert pipeline.name == chosen["schedule"].split()[0]
    spread = Vocabulary.ONE_BARRIER if "vocab" in flags else None
    assert pipeline.plans.plan(4).schedule.vocabulary is spread


@pytest.mark.parametrize("plan", ["zb-h1", "v-half", "zb-h1 --recompute 0"])
def test_a_file_of_a_plan_trains(tmp_path: Path, plan: str) -> None:
    path = tmp_path / "plan.json"
    assert main(f"plan --pp 2 --microbatches 4 --json -o {path} --schedule {plan}".split()) == 0
    program.prepare(f"{MODEL} --pipeline-schedule file:{path}".split(), world_size=2)


@pytest.mark.parametrize("variant", Vocabulary)
def test_the_vocabulary_is_spread_in_any_schedule(variant: Vocabulary) -> None:
    flags = f"{MODEL} --vocab-parallel {variant} --pipeline-schedule"
    for name in ("1f1b", "interleaved", "zb-auto", "zb-v"):
        _, _, pipeline = program.prepare([*flags.split(), name], world_size=2)
        schedule = pipeline.plans.plan(4).schedule
        assert (schedule.name, schedule.vocabulary) == (name, variant)
        assert sum(work.kind is Kind.S for row in schedule.passes for work in row) == 8


def test_a_file_says_itself_how_the_vocabulary_is_spread(tmp_path: Path) -> None:
    spread, plain = tmp_path / "spread.json", tmp_path / "plain.json"
    plan = "plan --pp 2 --microbatches 4 --schedule zb-h1 --json -o"
    assert main(f"{plan} {spread} --vocab-parallel 2".split()) == main(f"{plan} {plain}".split()) == 0
    for flags in (f"file:{spread}", f"file:{spread} --vocab-parallel 2 --z-loss 1e-4", f"file:{plain} --vocab-parallel 2"):
        args, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule {flags}".split(), world_size=2)
        assert args.vocabulary.spread == "2"
        assert pipeline.plans.plan(4).schedule.vocabulary is Vocabulary.ONE_BARRIER
    for flags, message in (
        ("--vocab-parallel 1", "--vocab-parallel 1 is asked for, and file:"),
        ("--layer-redistribution", "--vocab-parallel 2 leaves none there"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            program.prepare(f"{MODEL} --pipeline-schedule file:{spread} {flags}".split(), world_size=2)


@pytest.mark.parametrize(
    ("vocabulary", "flags", "message"),
    [
        ({}, "--vocab-parallel 2", "costs.json has no costs of a spread vocabulary, and --vocab-parallel is 2: measure them"),
        ({"S": 1e-3, "T": 1e-3}, "", "costs.json has costs of a spread vocabulary, whose stages are without it"),
        ({"S": 1e-3, "T": 1e-3}, "--vocab-parallel 2", None),
    ],
)
def test_costs_are_of_stages_with_or_without_the_vocabulary(
    tmp_path: Path, vocabulary: dict[str, float], flags: str, message: str | None
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"stages": [STAGE] * 2, **({"vocabulary": vocabulary} if vocabulary else {})}))
    given = f"{MODEL} --pipeline-costs {path} {flags}".split()
    if message is None:
        _, _, pipeline = program.prepare(given, world_size=2)
        assert pipeline.plans.costs is not None and pipeline.plans.costs.vocabulary.S == 1e-3
    else:
        with pytest.raises(ValueError, match=re.escape(message)):
            program.prepare(given, world_size=2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"stages": [{"forward": 1}]}', ": stage 0: missing backward, weight"),
        (b'{"unit": "MiB", "stages": [{"forward": 1, "backward": 1, "weight": 1}]}', ": unit: expected bytes or microbatches"),
    ],
)
def test_bad_costs_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"--pipeline-costs {path}{message}"):
        program.prepare(f"{MODEL} --pipeline-costs {path}".split(), world_size=2)


def test_costs_may_leave_out_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text('{"stages": [{"forward": 1, "backward": 2, "weight": 1}, {"forward": 1, "backward": 1, "weight": 1}]}')
    program.prepare(f"{MODEL} --pipeline-costs {path}".split(), world_size=2)


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ("--pipeline-schedule zb-v --num-layers 20", [5, 5, 5, 5]),
        ("--pipeline-schedule v-min --num-layers 22", [5, 5, 6, 6]),
        ("--pipeline-schedule zb-h1 --num-layers 6", [1, 2, 2, 1]),
        ("--pipeline-schedule zb-v --num-layers 18 --account-for-embedding-in-pipeline-split", [3, 5, 5, 5]),
    ],
)
def test_layers_left_over_go_to_the_lightest_ranks(flags: str, layers: list[int]) -> None:
    args, _, pipeline = program.prepare(f"{MODEL} {flags} --pipeline-model-parallel-size 4".split(), world_size=4)
    stages = [stage.count(LayerType.decoder) for stage in stage_layers(args, pipeline.placement)]
    assert [sum(stages[stage] for stage in row) for row in pipeline.placement.stages] == layers


LARGE_VOCABULARY = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --micro-batch-size 1 --lr 1e-2 --mock-data "
    "--train-iters 1 --tokenizer-type NullTokenizer --vocab-size 8000 --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 4 --global-batch-size 12"
)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "zb-auto", "v-auto"])
def test_a_training_that_fits_under_stock_fits_under_schedules_of_its_memory(name: str) -> None:
    """The last stage holds the logits of a large vocabulary, and a V's first rank both of the vocabulary's weights."""
    args, _, pipeline = program.prepare(f"{LARGE_VOCABULARY} --pipeline-schedule {name}".split(), world_size=4)
    ours, stock = predicted_memory(args, pipeline), stock_memory(args)
    assert stock is not None
    most = max(rank.allocated for rank in stock)
    assert max(rank.allocated for rank in ours) <= most * 1.001
    assert more_than_stock(args, ours, stock) is None
    whole = predict(describe(args), Request(name, 4, 12).plan().schedule, decoder_layers(args, pipeline.placement))
    assert max(rank.allocated for rank in whole) > 1.1 * most, "as if stages were equal"


def test_a_profile_in_fp8_has_the_bytes_of_the_formulas() -> None:
    args, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule zb-v --pipeline-costs profile".split(), world_size=2)
    assert uncounted_sizes(args, pipeline) is None
    args |= {"fp8": "hybrid"}  # of Megatron-LM's own script
    sizes = uncounted_sizes(args, pipeline)
    assert sizes is not None and len(sizes.stages) == 4
    microbatch = {stage.activation for stage in sizes.stages[:-1]}
    measured = with_sizes(replace(uniform(pipeline.placement), hop=2.0), sizes)
    assert microbatch == {stage.activation for stage in measured.stages[:-1]} and measured.unit == "bytes"
    assert [stage.forward for stage in measured.stages] == [0.5] * 4 and measured.hop == 2.0
    with pytest.raises(
        ValueError, match=r"^--pipeline-costs profile in FP8 takes bytes from formulas, .* give --vocab-size N, or"
    ):
        uncounted_sizes(args | {"padded_vocab_size": None}, pipeline)
