"""``mpipe check``: what it trains where the model is made smaller, and one line for what is wrong."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import pytest
from command import refusal

from megatron.pipeline.cli import check
from megatron.pipeline.flags.arguments import parse

LARGE = (
    "--hidden-size 7168 --num-attention-heads 128 --seq-length 4096 --micro-batch-size 4 --global-batch-size 4096 --lr 1e-4 "
    "--train-iters 1000 --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --bf16 "
    "--disable-bias-linear"
)
EXPERTS = (
    "--num-experts 256 --moe-router-topk 8 --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-score-function "
    "sigmoid --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-token-dispatcher-type alltoall"
)
DEEP = "--num-layers 61 --moe-layer-freq ([0]*3+[1]*58) --pipeline-model-parallel-size 8 --pipeline-model-parallel-layout"


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def sides(folder: Path, flags: str, own: str = "--shrink") -> tuple[check.Side, check.Side, list[str]]:
    from megatron.pipeline import patches

    patches.install()
    return check.sides(check.parser().parse_args(own.split("_")), parse(flags.split()), folder)


SHARED = ("tensor_model", "pipeline_model", "context")


def given(args: Namespace, *names: str) -> list[object]:
    return [getattr(args, name) for name in names]


def test_layers_of_each_kind_stay_in_every_stage(tmp_path: Path) -> None:
    layout = "Et*4|(t*4|)*14tmL"  # 61 layers: three dense ones and one with experts in the first stage
    flags = f"{DEEP} {layout} --mtp-num-layers 1 --expert-model-parallel-size 4 --pipeline-schedule interleaved"
    reference, checked, words = sides(tmp_path, f"{LARGE} {EXPERTS} {flags}")
    small = checked.whole
    assert small.pipeline_model_parallel_layout == "Ett" + "|t" * 14 + "|tmL"
    assert small.num_layers == 17
    assert small.moe_layer_freq == [0] + [1] * 16
    assert given(small, "num_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk") == [4, 2, 2, 1]
    assert given(small, "hidden_size", "kv_channels", "bf16", "micro_batch_size") == [32, 8, False, 2]
    assert checked.ranks == 8 * 4 and small.data_parallel_size == 4 and small.global_batch_size == 2 * 4 * 16
    assert reference.ranks == 1 and reference.whole.pipeline.schedule == "stock"
    same = ("num_layers", "moe_layer_freq", "mtp_num_layers", "num_experts", "hidden_size", "global_batch_size", "swiglu")
    assert given(reference.whole, *same) == given(small, *same)
    assert words[0] == "checked:   interleaved on 32 ranks (8 pipeline x 4 expert x 4 data parallel)"
    assert "float32 in place of 16 bits" in words[3]


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        ("--tensor-model-parallel-size 8 --sequence-parallel", [16, 1, 128, 32]),
        ("--context-parallel-size 4 --group-query-attention --num-query-groups 8", [4, 2, 32, 32]),
        ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 8", [8, 4, 64, 32]),
        ("--pipeline-schedule seq-1f1b --pipeline-model-parallel-size 2", [2, 1, 32, 32]),
    ],
)
def test_parallelism_divides_what_is_left(flags: str, sizes: list[int], tmp_path: Path) -> None:
    ranks = math.prod(parse(flags.split()).__dict__[f"{kind}_parallel_size"] for kind in SHARED)
    reference, checked, _ = sides(tmp_path, f"{LARGE} --num-layers 32 {flags}", f"--shrink_--ranks_{ranks}")
    small = checked.whole
    assert given(small, "num_attention_heads", "num_query_groups", "hidden_size", "seq_length") == sizes
    assert small.padded_vocab_size == reference.whole.padded_vocab_size
    assert given(small, "tensor_model_parallel_size", "context_parallel_size") == given(
        parse(flags.split()), "tensor_model_parallel_size", "context_parallel_size"
    )


def test_two_processes_share_a_layer_unless_more_are_asked_for(tmp_path: Path) -> None:
    flags = f"{LARGE} --num-layers 32 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --pipeline-schedule zb-v"
    _, checked, words = sides(tmp_path, flags)
    assert checked.ranks == 8 and checked.whole.tensor_model_parallel_size == 2
    assert any("TP 2 in place of 8, which --ranks N keeps" in line for line in words)


def test_the_reference_may_be_another_layout(tmp_path: Path) -> None:
    against = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    reference, checked, _ = sides(
        tmp_path,
        f"{LARGE} --num-layers 32 --pipeline-model-parallel-size 4 --pipeline-schedule zb-v",
        f"--shrink_--against_{against}",
    )
    assert reference.sizes == "megatron-core's own schedule on 4 ranks (2 tensor x 2 pipeline parallel)"
    assert checked.whole.pipeline_model_parallel_layout == "Et|t|t|t|t|t|t|tL" and checked.whole.num_layers == 8
    assert reference.whole.pipeline_model_parallel_layout is None and reference.whole.num_layers == 8


def test_a_model_stays_as_it_is_without_being_asked(tmp_path: Path) -> None:
    flags = "--num-layers 3 --hidden-size 48 --num-attention-heads 2 --seq-length 24 --micro-batch-size 1 --lr 1e-3"
    more = "--train-iters 9 --mock-data --tokenizer-type NullTokenizer --vocab-size 4200 --save runs/never --hidden-dropout 0.2"
    _, checked, _ = sides(tmp_path, f"{flags} {more}", "--iterations_2")
    same = ("num_layers", "hidden_size", "seq_length", "mock_data", "vocab_size", "save", "train_iters", "hidden_dropout")
    assert given(checked.args, *same) == [3, 48, 24, True, 4200, None, 2, 0.2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "which training? mpipe check -- FLAGS"),
        ("--shrink --", "which training? mpipe check -- FLAGS"),
        ("-- --num-layer 2", "unknown flag --num-layer; did you mean --num-layers?"),
        ("-- --num-layers 4", "missing --hidden-size"),
        (f"-- {LARGE} --num-layers 5 --vocab-parallel 2 --z-loss 1e-4", "--z-loss changes the loss"),
        (f"--ranks 3 -- {LARGE} --num-layers 5 --pipeline-model-parallel-size 2", "3 ranks cannot be split into models"),
        (
            f"--shrink -- {LARGE} --num-layers 5 --pipeline-model-parallel-size 2 --pipeline-schedule zbv",
            "unknown schedule 'zbv'",
        ),
    ],
)
def test_what_is_wrong_is_one_line(capsys: pytest.CaptureFixture[str], arguments: str, words: str) -> None:
    assert words in refusal(capsys, "check", arguments)


def test_one_flag_may_be_what_is_compared_against(capsys: pytest.CaptureFixture[str]) -> None:
    assert "expected one argument" not in refusal(
        capsys, "check", "--against", "--pipeline-schedule=nothing", "--", "--num-layers", "2"
    )
