"""The table of what does not go together: its features are written right, and every entrance says the same sentence."""

from __future__ import annotations

import string

import pytest

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.facts import of_flags
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.combinations import rows
from megatron.pipeline.planner.combinations.table import Combination, Facts
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Offload, Vocabulary
from megatron.pipeline.planner.schedule.transforms.offload import offload

TOPICS = {name: topic for name, topic in vars(rows).items() if name.isupper() and name[0] != "_" and name != "RECIPES"}
GPT = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 8 --lr 1 "
    "--train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --pipeline-model-parallel-size 4 "
)


def of_program(flags: str) -> str:
    with pytest.raises(ValueError, match="--") as refused:
        validate(parse(f"{GPT} {flags}".split()), 4)
    return str(refused.value)


def of_plan(**options: object) -> str:
    with pytest.raises(ValueError, match="--") as refused:
        planning.plan("seq-1f1b", 4, 8, **options)  # type: ignore[arg-type]
    return str(refused.value)


def test_a_spread_vocabulary_of_slices_is_refused_with_one_sentence() -> None:
    asked = of_program("--pipeline-schedule seq-1f1b --vocab-parallel 2")
    assert asked.startswith("--vocab-parallel 2 needs") and "into 2 slices" in asked
    assert asked == of_plan(vocabulary=Vocabulary("2"))


def test_offloaded_slices_are_refused_with_one_sentence() -> None:
    schedule = planning.plan("seq-1f1b", 4, 8)
    with pytest.raises(ValueError, match="--offload full") as refused:
        offload(schedule, uniform(families.placement("seq-1f1b", 4)), Offload("full"))
    asked = of_program("--pipeline-schedule seq-1f1b --offload full")
    assert asked == str(refused.value) == of_plan(offload=Offload("full"))


@pytest.mark.parametrize("topic", TOPICS)
def test_what_a_row_says_is_known(topic: str) -> None:
    """A name in braces that nobody fills would be said as None."""
    derived = set(of_flags(parse([]), launch=True, stages=3)) | {"one", "other", "flag", "splits", "data_parallel_size"}
    derived |= {"asks", "stages_there", "models", "file_vocabulary", "unwritten", "vocab_parallel"}
    for row in TOPICS[topic]:
        texts = (row.reason, row.instead, row.price)
        names = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
        assert names <= derived, row
        assert row.other and row.reason


def test_values_switch_features_on() -> None:
    to = Facts(a="off", b=[0.0, 0.1], c=3, d=None, e=["moe", "mlp"])
    for feature, is_met in {
        "a": False, "no a": True, "b": True, "c>2": True, "c>3": False, "c=3": True, "d": False, "d>1": False, "e=mlp": True,
        "unknown": False, "no unknown": False, "a | c": True,
    }.items():  # fmt: skip
        assert bool(to.met(feature)) == is_met, feature


def test_releases_limit_a_row() -> None:
    row = Combination("a", "b", "is not {other}", "take {core}", since="0.17", mended="0.19")
    cores = {"0.16.1": [], "0.17.0": ["--a 1 is not --b 2: take 0.17.0"], "0.19.2": []}
    assert {core: Facts(a=1, b=2, core=core).sentences([row]) for core in cores} == cores
    assert list(Facts(a=1, b=2).found([row])) == []  # no release is known


def test_every_feature_is_named_once_with_all_that_is_given() -> None:
    several = [Combination("a | b", "c", "with {other}"), Combination("a | b", "d", "is later"), Combination("e", "c", "too", "")]
    with pytest.raises(ValueError, match=r"^--a 1 and --b 2 with --c: leave one of the two out\. --e too$"):
        Facts(a=1, b=2, c=True, d=1, e=True).refuse(several)
