"""Warnings about errors of megatron-core's own: which flags meet one, in which release, and which nearly do."""

from __future__ import annotations

import re

import pytest
from megatron.pipeline.patches import compat
from packaging.version import Version

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.facts import cautions
from megatron.pipeline.model import te_linear

OLDEST, NEWEST = "0.16.1", "0.19.2"
MTP = "--mtp-num-layers 1 --untie-embeddings-and-output-weights --position-embedding-type rope"
EXPERTS = "--num-experts 8 --micro-batch-size 1"
CUT = "--tensor-model-parallel-size 2 --sequence-parallel"
PER_TOKEN = "--calculate-per-token-loss"
BALANCED = f"{EXPERTS} {PER_TOKEN} --moe-aux-loss-coeff 1e-2"
BY_SEQUENCE = f"{BALANCED} --moe-router-load-balancing-type seq_aux_loss"
BIASES = f"--num-experts 8 {CUT} --expert-model-parallel-size 2"
GROUPED = f"{BIASES} --disable-bias-linear --moe-grouped-gemm --transformer-impl transformer_engine"
UP_TO = "(not mended up to megatron-core 0.19)"
IN = "(mended in megatron-core 0.19)"


@pytest.mark.parametrize(
    ("flags", "meets", "release", "words", "end"),
    [
        ("--eod-mask-loss", "--context-parallel-size 2", NEWEST, "--eod-mask-loss with --context-parallel-size 2: ", UP_TO),
        ("--context-parallel-size 2", "--eod-mask-loss", OLDEST, "mean of these means: give --calculate-per-token-loss", UP_TO),
        (MTP, "--context-parallel-size 4", OLDEST, "--mtp-num-layers 1 with --context-parallel-size 4: the losses of", UP_TO),
        (f"{MTP} {PER_TOKEN}", "--context-parallel-size 2", "0.17.0", "on 1 data-parallel x 2 context-parallel ranks", UP_TO),
        (f"{EXPERTS} {PER_TOKEN} {CUT}", "--moe-aux-loss-coeff 1e-2", "0.18.2", "these losses of the router count 2 times", IN),
        (BALANCED, "--context-parallel-size 3", OLDEST, "type aux_loss with --calculate-per-token-loss on 1 tensor x 3", IN),
        (f"{EXPERTS} {PER_TOKEN} {CUT}", "--moe-z-loss-coeff 1e-3", OLDEST, "--moe-z-loss-coeff 0.001 with --calculate-per", IN),
        (BY_SEQUENCE, "--micro-batch-size 4", OLDEST, "this loss counts 4 times too little", IN),
        (BIASES, "--expert-tensor-parallel-size 1", OLDEST, "the last biases of experts on different tensor-parallel", UP_TO),
        (f"{GROUPED} --clip-grad 0", "--clip-grad 1", "0.18.2", "lacks the experts that are not on the first", IN),
    ],
)
def test_flags_that_meet_an_error(
    flags: str, meets: str, release: str, words: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``meets`` there is no warning, and with it there is this one."""
    monkeypatch.setattr(compat, "version", lambda: release)
    monkeypatch.setattr(te_linear, "get_te_version", lambda: Version("2.13.0"))
    assert cautions(parse(flags.split())) == []
    (found,) = cautions(parse(f"{flags} {meets}".split()))
    assert words in found and found.endswith(end)
    mended = re.search(r"mended in megatron-core (\S+)\)$", found)
    monkeypatch.setattr(compat, "version", lambda: f"{mended[1]}.0" if mended else NEWEST)
    assert len(cautions(parse(f"{flags} {meets}".split()))) == (0 if mended else 1)


@pytest.mark.parametrize(("release", "warns"), [("0.18.2", False), (NEWEST, True), ("0.20.0", False)])
def test_a_model_that_is_not_frozen(release: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a flag that our parser has not; under a schedule of ours it is refused."""
    monkeypatch.setattr(compat, "version", lambda: release)
    args = parse([])
    for schedule in ("stock", "zb-h1"):
        found = cautions(args | {"freeze_all_layers": True, "pipeline_schedule": schedule})
        assert [one.partition(":")[0] for one in found] == ["--freeze-all-layers has no effect"] * (warns and schedule == "stock")


@pytest.mark.parametrize(
    ("flags", "release"),
    [
        (f"--eod-mask-loss --context-parallel-size 2 {PER_TOKEN}", NEWEST),
        (f"{MTP} {PER_TOKEN} --context-parallel-size 2", OLDEST),  # it then summed the losses of all tokens
        (f"{MTP} --eod-mask-loss {PER_TOKEN}", NEWEST),  # one data-parallel rank
        (f"--num-experts 8 {CUT} --disable-bias-linear --moe-aux-loss-coeff 1e-2", OLDEST),  # by microbatch
        (f"{BY_SEQUENCE} --micro-batch-size 4", "0.15.0"),
        (f"{EXPERTS} {PER_TOKEN} --micro-batch-size 4 --moe-aux-loss-coeff 1e-2", OLDEST),  # not by sequence
        (f"{EXPERTS} {PER_TOKEN} {CUT}", OLDEST),  # no loss that balances
        (f"{BIASES} --disable-bias-linear --expert-tensor-parallel-size 1", OLDEST),
        (GROUPED, OLDEST),
    ],
)
def test_flags_that_nearly_meet_one(flags: str, release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: release)
    monkeypatch.setattr(te_linear, "get_te_version", lambda: Version("2.13.0"))
    assert cautions(parse(flags.split())) == []


def test_older_engines_count_grouped_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: "0.18.2")
    monkeypatch.setattr(te_linear, "get_te_version", lambda: Version("2.12.1"))
    assert cautions(parse(GROUPED.split())) == []


def test_replicas_with_other_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: NEWEST)
    args = parse(f"{MTP} --eod-mask-loss {PER_TOKEN}".split())
    args |= {"data_parallel_size": 2}
    assert "on 2 data-parallel x 1 context-parallel ranks" in cautions(args)[0]
    assert cautions(args | {"eod_mask_loss": False}) == []


def test_sinks_of_megatron_lms_own_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: NEWEST)
    args = parse(CUT.split())
    assert cautions(args) == []
    args |= {"softmax_type": "learnable"}
    assert "has the attention sinks of the first tensor-parallel rank alone" in cautions(args)[0]
    assert cautions(args | {"clip_grad": 0.0}) == []


@pytest.mark.parametrize(("schedule", "warned"), [("stock", False), ("zb-h1", False), ("zb-v", True), ("interleaved", True)])
def test_logits_drawn_by_rank(schedule: str, warned: bool) -> None:
    args = parse(["--pipeline-schedule", schedule])
    assert cautions(args) == []
    found = cautions(args | {"moe_router_force_load_balancing": True})
    assert len(found) == warned and all("with several chunks per rank layers get others" in text for text in found)


def test_linear_attention_of_megatron_lms_own_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: NEWEST)
    args = parse(["--tensor-model-parallel-size", "2"]) | {"experimental_attention_variant": "gated_delta_net"}
    assert "is that of each tensor-parallel rank's own heads" in cautions(args)[0]
    assert cautions(args | {"sequence_parallel": True}) == []
    assert cautions(args | {"experimental_attention_variant": None}) == []
