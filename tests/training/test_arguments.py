"""The command line and the YAML file: what is read, what is refused, and in which words."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.flags.arguments import parse, with_config
from megatron.pipeline.flags.flags import CHUNK_FLAGS, actions, neutral
from megatron.pipeline.flags.settings import Role, Settings, StepSettings, VocabularySettings, flat
from megatron.pipeline.flags.validation import batch_size_steps, batch_sizes, validate
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.session.planning import plan_pipeline

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 10 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 100"
)
FLAGS = Path(__file__).parent / "flags.txt"


def checked(more: str = "", world_size: int = 4) -> Settings:
    return validate(parse((BASE + " " + more).split()), world_size)


def test_flags_are_frozen() -> None:
    """Scripts depend on the names: removing or renaming one is a decision, taken by editing flags.txt."""
    known = {flag for action in actions().values() for flag in action.option_strings}
    assert sorted(known | {"--help", "-h"}) == FLAGS.read_text().split()


def test_derived_values() -> None:
    args = checked("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2")
    assert args.data_parallel_size == 2
    assert args.chunks == 2
    assert args.global_batch_size == 4
    assert args.ffn_hidden_size == 256
    assert args.kv_channels == 16
    assert args.max_position_embeddings == 32
    assert args.lr_decay_iters == 10
    assert args.split == "969,30,1"
    assert args.pipeline.timeout == 300
    assert checked("--distributed-timeout-minutes 2").pipeline.timeout == 60
    assert checked("--swiglu").ffn_hidden_size == 128
    assert checked("--num-virtual-stages-per-pipeline-rank 1").chunks == 1


def test_ramp_up() -> None:
    args = checked("--global-batch-size 16 --rampup-batch-size 8 4 100", world_size=2)
    assert batch_sizes(args) == [8, 12, 16]


@given(start=st.integers(1, 4), step=st.integers(1, 4), steps=st.integers(1, 6), samples=st.integers(0, 300))
def test_the_batch_grows_as_it_did_before_megatron_core_0_18(start: int, step: int, steps: int, samples: int) -> None:
    """Batch size as that release's calculator has it: steps of ``samples / steps`` samples each, in floating point."""
    largest = start + step * steps
    grown = batch_size_steps(Namespace(rampup_batch_size=[start, step, samples], global_batch_size=largest))
    for consumed in range(samples + 3):
        done = steps if consumed > samples else int(consumed / (samples / steps)) if samples else 0
        assert [size for least, size in grown if least <= consumed][-1] == start + done * step, (consumed, grown)
    assert batch_size_steps(Namespace(rampup_batch_size=None, global_batch_size=8)) == [(0, 8)]


def test_config_file_is_overridden_by_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "num_layers: 8\nhidden-size: 64\nlr: 3.0e-4\nswiglu: true\nbf16: false\nmin-lr: 1e-5\n"
        "data-path: [0.3, A, 0.7, B]\nrampup-batch-size: 2 2 8\nsave: null\n"
    )
    args = parse(["--config", str(config), "--hidden-size", "128"])
    assert (args.num_layers, args.hidden_size, args.lr, args.min_lr) == (8, 128, 3e-4, 1e-5)
    assert (args.swiglu, args.bf16, args.save) == (True, False, None)
    assert args.data_path == ["0.3", "A", "0.7", "B"]
    assert args.rampup_batch_size == [2, 2, 8]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("num-layer: 4", "unknown flag num-layer; did you mean --num-layers?"),
        ("zzzzzz: 4", "unknown flag zzzzzz; --help lists all flags, and mpipe launch runs Megatron-LM's own script with"),
        ("num-layers: 4\nlr: 1\nnum_layers: 8", "config.yaml, line 3: num-layers is in line 1 already: leave one of them out"),
        ("num-layers: 4\n lr: 1", "config.yaml, line 2: mapping values are not allowed here"),
        ("swiglu: 3", "--swiglu is on or off: expected true or false, got 3"),
        ("num-layers: true", "--num-layers takes one value, got True"),
        ("num-layers: [1, 2]", "--num-layers takes one value"),
        ("num-layers: many", "--num-layers: expected a whole number from 1 to 10,000, got 'many'"),
        ("num-layers: 1000000000", "--num-layers: expected a whole number from 1 to 10,000, got 1000000000"),
        ("- 1", "expected a mapping of flags to values"),
        ("a: b: c", "mapping values are not allowed here"),
        ("config: other.yaml", "unknown flag config"),
    ],
)
def test_bad_config_file(tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse(["--config", str(config)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags_given", "message"),
    [
        ("--num-layer 4", "unknown flag --num-layer; did you mean --num-layers?"),
        ("--num-layers 0", "--num-layers: expected a whole number from 1 to 10,000, got 0"),
        ("--hidden-dropout 1.5", "--hidden-dropout: expected a number from 0 to 1, got 1.5"),
        ("--optimizer lion", "invalid choice: 'lion'"),
        ("--clip-grad nan", "--clip-grad: expected a number of at least 0, got nan"),
        ("--adam-beta1 2", "--adam-beta1: expected a number from 0 to 1, got 2"),
        ("--moe-layer-freq [[1]]", "expected a number or a list such as"),
        ("--config /nowhere.yaml", "--config /nowhere.yaml: No such file or directory"),
        ("--use-legacy-models", "--use-legacy-models is not needed: models are always megatron-core's; leave it out"),
        ("--use-megatron-fsdp", "(FSDP, of torch or of Megatron) does not work with our schedules: leave it out"),
        ("--delay-wgrad-compute", "(delayed weight gradients) does not work with our schedules: leave it out (W pa"),
        ("--train-samples 8", "unknown flag --train-samples; --help lists all flags, and mpipe launch runs Megatron-LM's own"),
        ("--vocab-parallel 3", "invalid choice: '3'"),
        ("--vocab-logits-limit 256", "expected bytes above 0 such as 256MiB, in one of KiB, MiB, GiB, MB, GB, got '256'"),
        ("--vocab-logits-limit 0MiB", "expected bytes above 0"),
        ("--label-smoothing 1", "--label-smoothing: expected a number of at least 0 and below 1, got 1"),
        ("--z-loss -1", "--z-loss: expected a number of at least 0, got -1"),
    ],
)
def test_bad_flags(flags_given: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        parse(flags_given.split())


EXPERTS = "--num-experts 4 --disable-bias-linear --sequence-parallel"


@pytest.mark.parametrize(
    ("flags_given", "world_size", "message"),
    [
        ("--pipeline-model-parallel-size 3", 4, "4 ranks cannot be split into models of 1 x 3 x 1 = 3 ranks"),
        ("--num-layers-per-virtual-pipeline-stage 3", 1, "is not a multiple of 1 pipeline ranks x 3 layers"),
        ("--global-batch-size 12", 4, "is 1.5 microbatches: --micro-batch-size 2 x data-parallel size 4 = 8"),
        ("--global-batch-size 12", 4, "use 8 or 16"),
        ("--global-batch-size 16 --rampup-batch-size 8 3 9", 1, "steps of 3 do not lead to --global-batch-size 16"),
        ("--tensor-model-parallel-size 8", 8, "--num-attention-heads 4 is not a multiple of --tensor-model-parallel"),
        ("--num-attention-heads 5", 4, "--hidden-size 64 is not a multiple of --num-attention-heads 5"),
        ("--position-embedding-type rope --kv-channels 25", 4, "a head has 25 (--kv-channels, or --hidden-size / --num"),
        ("--position-embedding-type rope --hidden-size 60", 4, "give an even --kv-channels, such as 16"),
        ("--max-position-embeddings 16", 4, "--max-position-embeddings 16 is less than --seq-length 32"),
        ("--min-lr 1", 4, "--min-lr 1.0 must be from 0 to --lr 0.001"),
        ("--lr-warmup-iters 10", 4, "the warm-up of 10 iterations must be shorter than --lr-decay-iters 10"),
        ("--recompute-activations --recompute-modules layernorm", 4, "layernorm needs the package transformer-engine"),
        ("--data-path A", 4, "more than one data source"),
        ("--split 1,x", 4, "--split 1,x: expected up to three shares"),
        ("--metrics /tmp", 4, "--metrics /tmp is a directory: name a file"),
        ("--pipeline-costs-cache costs.json", 4, "is where --pipeline-costs profile writes"),
        ("--distributed-backend nccl", 4, "needs a CUDA device"),
        ("--pipeline-timeout 600", 4, "600 seconds must be less than --distributed-timeout-minutes 10 = 600 seconds"),
        ("--pipeline-costs profile --timing-log-level 2", 4, "--timing-log-level 2 waits for the whole GPU"),
        ("--pipeline-watch replan --pipeline-schedule stock", 4, "take one of these, or leave --pipeline-watch out"),
        ("--pipeline-watch replan --offload full --pipeline-schedule zb-v", 2, "needs to know what copies take"),
        ("--pipeline-watch report --rehearse", 4, "--rehearse has them in turns"),
        (f"{EXPERTS} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", 4, "2, or --expert-model-parallel"),
        (f"{EXPERTS} --expert-tensor-parallel-size 2", 4, "gradients over the wrong ranks: give --expert-tensor"),
    ],
)
def test_flags_that_do_not_fit_together(flags_given: str, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        checked(flags_given, world_size)
    assert "\n" not in str(error.value)


PP = "--pipeline-model-parallel-size 2 "
SEVERAL_TOKENS = "--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope"


@pytest.mark.parametrize(
    ("flags_given", "message"),
    [
        (PP + "--layer-redistribution --num-layers-in-first-pipeline-stage 2", "--num-layers-in-first-pipeline-stage 2 would"),
        (
            PP + "--layer-redistribution --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split would fix",
        ),
        (PP + "--label-smoothing 0.1 --z-loss 1e-4", "--label-smoothing 0.1 and --z-loss 0.0001: only the output layer of --voc"),
    ],
)
def test_flags_of_the_vocabulary_layers_that_do_not_fit(flags_given: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        checked(flags_given)
    assert "\n" not in str(error.value)


OVERLAP = "--overlap-moe-expert-parallel-comm --bf16 --disable-bias-linear "
ALL_TO_ALL = OVERLAP + "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "


@pytest.mark.parametrize(
    ("flags_given", "message"),
    [
        (ALL_TO_ALL.replace("--bf16 ", ""), "needs --bf16 or --fp16"),
        (ALL_TO_ALL + SEVERAL_TOKENS, "raise --pipeline-model-parallel-size"),
        (ALL_TO_ALL + "--moe-layer-freq 2", "leave the final norm out: change --moe-layer-freq"),
        (ALL_TO_ALL + PP + "--pipeline-schedule stock", "needs several chunks per rank: give --num-virtual-stages"),
    ],
)
def test_flags_that_layer_plans_exclude(flags_given: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"--overlap-moe-expert-parallel-comm.*{re.escape(message)}") as error:
        checked(flags_given)
    assert "\n" not in str(error.value)


def test_flags_of_layer_plans() -> None:
    for flags_given in ("", PP, PP + SEVERAL_TOKENS, PP + "--pipeline-schedule stock --num-virtual-stages-per-pipeline-rank 2"):
        assert checked(ALL_TO_ALL + flags_given).overlap_moe_expert_parallel_comm
    with pytest.raises(ValueError, match="cuts them into 2 slices: take another schedule"):
        plan_pipeline(checked(ALL_TO_ALL + PP + "--pipeline-schedule seq-1f1b --position-embedding-type rope"))


def test_flags_of_the_vocabulary_layers() -> None:
    args = checked(PP + "--vocab-parallel 2 --vocab-logits-limit 0.5GiB --label-smoothing 0.1 --z-loss 1e-4 --vocab-mask-padding")
    assert args.vocabulary == VocabularySettings(Vocabulary("2"), False, 2**29, True, 0.1, 1e-4)
    assert checked().vocabulary.spread is None


def test_validation_writes_nothing_and_settings_are_frozen() -> None:
    read, before = (parse(f"{BASE} {PP}".split()) for _ in range(2))
    args = validate(read, 4)
    assert read == before and read.ffn_hidden_size is None and args.ffn_hidden_size == 256
    for one in (read, args):
        with pytest.raises(AttributeError, match=r"make others with flags \| {\'seq_length\': ...}"):
            one.seq_length = 64
    with pytest.raises(FrozenInstanceError):
        args.offloading.mode = None  # type: ignore[misc]


def test_other_settings_are_made_by_the_names_of_flags() -> None:
    args = checked(PP)
    other = args | {"vocab_parallel": "2", "offload": None, "seq_length": 64}
    assert (other.vocabulary.spread, other.seq_length) == (Vocabulary("2"), 64)
    assert (args.vocabulary.spread, args.seq_length) == (None, 32)
    assert (flat(other)["vocab_parallel"], flat(other)["offload"]) == ("2", "off")  # as checkpoints have them
    assert flat(Settings.of(parse(BASE.split()))) == vars(parse(BASE.split()))
    assert Settings.of(Namespace(steps=100)).steps == StepSettings(), "a script may have a flag of a topic's name"


def test_missing_flags_are_listed_together() -> None:
    with pytest.raises(ValueError, match=r"missing --num-layers, --hidden-size, .*--lr"):
        validate(parse([]), 1)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[2] / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_configs_of_the_repository(path: Path) -> None:
    ranks = yaml.safe_load(path.read_text())["pipeline-model-parallel-size"]
    args = parse(["--config", str(path), "--data-path", "A"])
    validate(args, ranks)


def test_false_in_a_file_switches_off_what_is_on(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
    (tmp_path / "flags.yaml").write_text("fused: false")
    tokens = with_config(parser, ["--config", str(tmp_path / "flags.yaml")])
    assert parser.parse_args(tokens).fused is False


def test_neutral_values_are_defaults_of_known_flags_and_schedules_are_stock() -> None:
    given = parse([])
    for role in Role:
        values = neutral(role)
        assert values
        assert {name: getattr(given, name) for name in values} == values | (
            {"pipeline_schedule": "zb-h1"} if role is Role.SCHEDULE else {}
        )
    assert neutral(Role.SCHEDULE)["pipeline_schedule"] == "stock"
    assert {*CHUNK_FLAGS, "microbatch_group_size_per_vp_stage"} == set(neutral(Role.CHUNKS))
