"""The lines that a training prints as it starts say what was planned, and warn of what may not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from releases import EXTRA_TOKENS
from session.test_planning import LARGE_VOCABULARY, MODEL, SEVERAL_TOKENS

from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.session import startup_lines
from megatron.pipeline.session.planning import plan_pipeline
from megatron.pipeline.session.startup_lines import plan_in_words
from megatron.pipeline.trainer import program


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--vocab-parallel 2: 64 rows on each of 2 ranks, in all {tokens} tokens, {padding} rows of padding that count"),
        ("--vocab-mask-padding", "0 rows of padding that count in the softmax, {padding} that do not"),
        ("--make-vocab-size-divisible-by 1", "56 rows on each of 2 ranks, in all {tokens} tokens"),
    ],
)
def test_the_log_says_how_the_vocabulary_is_cut(flags: str, words: str) -> None:
    flags = f"{MODEL} --tokenizer-type NullTokenizer --vocab-size 99 --vocab-parallel 2 {flags}"
    args, _, pipeline = program.prepare(flags.split(), world_size=2)
    tokens = 99 + EXTRA_TOKENS
    assert words.format(tokens=tokens, padding=128 - tokens) in plan_in_words(args, pipeline)[0]


def test_the_log_counts_what_there_is_one_of() -> None:
    flags = f"{MODEL} --pipeline-model-parallel-size 1 --global-batch-size 2"
    args, _, pipeline = program.prepare(flags.split(), world_size=1)
    line = plan_in_words(args, pipeline)[0]
    assert line.startswith(" layers of the model's 1 stage: 8; planned at equal costs for 1 microbatch: ")
    assert line.endswith(" activations of at most 1 microbatch on a rank")


def test_the_log_says_which_optimizer_steps_in_one_piece() -> None:
    flags = f"{MODEL} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    args, _, pipeline = program.prepare(flags.split(), world_size=2)
    offloaded = args | {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    said = [[line for line in plan_in_words(each, pipeline) if "steps all weights" in line] for each in (args, offloaded)]
    assert said[0] == [] and len(said[1]) == 1
    assert said[1][0].startswith(" --optimizer-cpu-offload with --overlap-param-gather: a rank steps all weights before")


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-schedule v-half",
        "--pipeline-schedule interleaved --num-layers-per-virtual-pipeline-stage 2 --num-experts 4 --disable-bias-linear",
        f"--pipeline-schedule zb-h1 {SEVERAL_TOKENS}",
        "--pipeline-schedule zb-v --vocab-parallel 2",
    ],
)
def test_the_log_predicts_the_memory_of_every_rank(flags: str) -> None:
    args, _, pipeline = program.prepare(f"{MODEL} {flags}".split(), world_size=2)
    number = r"(\d\S*)"
    words = rf" predicted memory by pipeline rank: {number} {number} GiB, of which activations {number} {number} GiB"
    [found] = filter(None, (re.match(words, line) for line in plan_in_words(args, pipeline)))
    first, last, first_held, last_held = map(float, found.groups())
    assert first > first_held > 0 and last > last_held > 0
    assert first_held * 2**30 > args.seq_length * args.micro_batch_size * args.hidden_size * 4 * args.num_layers / 2


@pytest.mark.parametrize(("interval", "warned"), [("", True), ("--log-interval 4", True), ("--log-interval 3", False)])
def test_traces_that_will_not_be_written_are_said_at_the_start(interval: str, warned: bool, tmp_path: Path) -> None:
    flags = f"{MODEL} --train-iters 9 --exit-interval 3 --pipeline-trace {tmp_path} {interval}"
    args, _, pipeline = program.prepare(flags.split(), world_size=2)
    line = " WARNING: --pipeline-trace: none of 3 iterations is logged: give --log-interval 3 or less"
    assert (line in plan_in_words(args, pipeline)) == warned


def test_the_log_leaves_out_a_split_that_stock_alone_trains() -> None:
    """Layers for further tokens before the last stage, which our placements refuse."""
    args, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule stock".split(), world_size=2)
    assert any("layers of the model" in line for line in plan_in_words(args, pipeline))
    args |= {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Ettttttttm|L"}
    assert not any("layers of the model" in line for line in plan_in_words(args, pipeline))


def test_the_log_says_where_transformer_engine_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    args, _, pipeline = program.prepare(MODEL.split(), world_size=2)
    assert not any("transformer-engine" in line for line in plan_in_words(args, pipeline)), "it is not expected without a GPU"
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(startup_lines, "has_transformer_engine", lambda: False)
    assert "the package transformer-engine is not installed" in plan_in_words(args, pipeline)[-1]


def test_the_log_warns_where_a_gpu_may_be_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of ``mpipe memory``: a prediction may take 95 % of a GPU, with 2 GiB of it for CUDA and NCCL."""
    args, _, pipeline = program.prepare(MODEL.split(), world_size=2)
    on_a_gpu(monkeypatch)
    needed = max(rank.total for rank in startup_lines.predicted_memory(args, pipeline))
    for spare, warns in ((1.04, True), (1.06, False)):
        monkeypatch.setattr(startup_lines, "device_memory", lambda _, spare=spare: int(spare * needed))
        warnings = [line for line in plan_in_words(args, pipeline) if "the fullest rank needs" in line]
        assert bool(warnings) is warns
        assert not warns or f"{needed / 2**30:.4g} GiB, more than 95% of this GPU's" in warnings[0]


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 80 GiB, for what the log says."""
    monkeypatch.setattr(startup_lines.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(startup_lines, "this_device", lambda: None)
    monkeypatch.setattr(startup_lines, "device_memory", lambda _: 80 * 2**30)


def test_the_log_says_what_messages_take_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    args, _, pipeline = program.prepare(f"{MODEL} --bf16".split(), world_size=2)
    assert not any("messages take" in line for line in plan_in_words(args, pipeline)), "on a CPU no host runs ahead"
    on_a_gpu(monkeypatch)
    (line,) = (line for line in plan_in_words(args, pipeline) if "messages take" in line)
    size = args.seq_length * args.micro_batch_size * args.hidden_size * 2 / 2**20
    assert line == f" messages take at most {pipeline.plans.plan(4).message_buffers} x {size:.4g} MiB on a rank in addition"


def test_the_log_warns_of_a_rank_that_needs_more_than_under_stock() -> None:
    lines = []
    for flags in ("zb-h2 --post-validation", "zb-h2 --post-validation --vocab-parallel 2", "zb-h1"):
        args, _, pipeline = program.prepare(f"{LARGE_VOCABULARY} --pipeline-schedule {flags}".split(), world_size=4)
        lines.append([line for line in plan_in_words(args, pipeline) if "WARNING: pipeline rank" in line])
    assert [len(line) for line in lines] == [1, 1, 0]
    assert re.search(
        r"rank 0 is predicted to need \S+ GiB, \S+ GiB more than the fullest rank under 1F1B \(stock\); by rank, GiB: ",
        lines[0][0],
    )
    assert "--vocab-parallel 2" in lines[0][0] and "--vocab-parallel 2" not in lines[1][0]
    assert "what takes less: --vocab-parallel off" in lines[1][0]
    args |= {"padded_vocab_size": None}  # as under a script of the user's without a tokenizer
    assert "planned at equal costs, as if stages were equal, for 12" in plan_in_words(args, pipeline)[0]


@pytest.mark.parametrize(
    ("flags", "words"), [("", "% of the makespan, "), ("--post-validation", r"% of the makespan \([\d.]+% of the span\), ")]
)
def test_the_bubble_of_the_plan_is_that_of_the_makespan(flags: str, words: str) -> None:
    args, _, pipeline = program.prepare(f"{MODEL} --pipeline-schedule zb-v {flags}".split(), world_size=2)
    rate = pipeline.plans.plan(4).timeline.bubble_rate
    assert re.search(rf"microbatches: bubble {100 * rate:.1f}{words}", plan_in_words(args, pipeline)[0])


def test_the_log_says_by_what_letters_are_balanced() -> None:
    """Stages that are not equal by their numbers of layers take equally long."""
    flags = f"{MODEL.replace('--num-layers 8', '--hybrid-layer-pattern *-*-*---')} --global-batch-size 12"
    args = predicted([*flags.split(), "--pipeline-schedule", "zb-h1"]).args
    lines = [plan_in_words(each, plan_pipeline(each))[0] for each in (args, args | {"hybrid_layer_pattern": "*-*-|*---"})]
    assert lines[0].startswith(" layers of the model's 2 stages, balanced by what letters are predicted to take: ")
    assert "; planned at equal costs, as stages are balanced, for " in lines[0]
    assert lines[1].startswith(" layers of the model's 2 stages: 4 4; planned at equal costs for ")
