"""A line of Megatron-LM's as it is: every flag of its releases is ignored, modelled, or said to be left out of a prediction."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import predicted, read_flags
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flags import actions
from megatron.pipeline.flags.importers.upstream import left, table
from megatron.pipeline.flags.support import check_trained

OURS = {option for action in actions().values() for option in action.option_strings}
MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --micro-batch-size 4 --pipeline-schedule stock"
)
LINE = f"{MODEL} --tokenizer-type NullTokenizer --vocab-size 50256 --pipeline-model-parallel-size 4 --global-batch-size 32 --bf16"
# What Megatron-LM's functional tests give beside the model.
HARMLESS = (
    "--log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard --vocab-file ${DATA}/vocab.json "
    "--merge-file merges.txt --async-save --use-persistent-ckpt-worker "
    " --dist-ckpt-strictness log_all --ckpt-format torch --deterministic-mode "
    "--attention-softmax-in-fp32 --lr-decay-samples 1000 --decoupled-lr 2e-4 --train-samples 100 --manual-gc --no-mmap-bin-files "
    "--cuda-graph-impl none --data-path ${DATA}/text --eval-iters 10"
)


def allocated(flags: str) -> list[float]:
    return [rank.allocated for rank in predicted(flags.split(), world_size=8).ranks]


def test_every_flag_is_in_one_class() -> None:
    """Of flags that are not ours; a row of the table that stands for none is a mistake."""
    effects, rows = table("effects"), [row for row in table("upstream") if not OURS & set(row["names"])]
    matters = {flag for row in effects["differs"] for flag in row["flags"]}
    listed = {*effects["nothing"]["flags"], *effects["as"], *matters}
    for row in rows:
        name = row["names"][0][2:]
        found = [pattern for pattern in listed if fnmatch(name, pattern)]
        assert len(found) == 1 or (not found and row["group"] in effects["nothing"]["groups"]), (name, found)
    names = {name[2:] for row in rows for name in row["names"]}
    partly = {name[2:] for name in OURS} & matters  # ours, and something of it is not modelled
    assert [one for one in listed if "=" not in one and not any(fnmatch(name, one) for name in names | partly)] == []
    assert {row["group"] for row in rows} >= set(effects["nothing"]["groups"])


def test_every_flag_is_read() -> None:
    line, names = [], []
    for row in table("upstream"):
        if not OURS & set(row["names"]):
            number = row.get("nargs", 1)
            values = ["1"] * (number if isinstance(number, int) else 3 if number != "?" else 1)
            line += [row["names"][-1], *values]
            names.append(row["names"][0])
    assert sorted(left(parse(line, predicts=True))) == sorted(names) and len(names) > 300


def test_what_changes_nothing_is_ignored(capsys: pytest.CaptureFixture[str]) -> None:
    assert allocated(f"{LINE} {HARMLESS}") == allocated(f"{LINE} --train-iters 50 --lr 1e-4")
    assert main(["memory", *f"{LINE} {HARMLESS}".split(), "--json"]) == 0
    assert capsys.readouterr().err == ""


def test_what_matters_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--tp-comm-overlap --cuda-graph-impl local --optimizer dist_muon --num-distributed-optimizer-instances 1"
    assert main(["memory", *f"{LINE} {flags}".split()]) == 0
    [line] = capsys.readouterr().err.splitlines()
    for words in ("--tp-comm-overlap: time up to", "--cuda-graph-impl: time", "--optimizer dist_muon: time"):
        assert words in line
    assert "instances" not in line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--quick-geglu --ffn-hidden-size 1024", "--swiglu --ffn-hidden-size 1024"),
        ("--attention-backend flash", "--attention-backend auto"),
        ("--expert-tensor-parallel-size 4", ""),
        ("--num-layers-per-virtual-pipeline-stage 1", "--num-virtual-stages-per-pipeline-rank 2"),
        ("--kv-lora-rank 32 --v-head-dim 128", ""),
        ("--seed ${REPEAT} --moe-z-loss-coeff 0", ""),
        (r"--pipeline-model-parallel-layout Ett\|\(tt\|\)*2ttL", "--pipeline-model-parallel-layout Ett|(tt|)*2ttL"),
        ("--moe-layer-recompute --num-experts 4", "--recompute-granularity selective --recompute-modules moe --num-experts 4"),
    ],
)
def test_flags_that_are_as_others(one: str, other: str) -> None:
    assert allocated(f"{LINE} {one}") == allocated(f"{LINE} {other}")


def test_what_a_release_trains_wrongly_is_predicted() -> None:
    """NVIDIA's recipes of experts in MXFP8, which release 0.16 trains with other numbers."""
    mxfp8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --num-experts 4 --use-distributed-optimizer"
    line = f"{LINE} {mxfp8} --overlap-grad-reduce --overlap-param-gather"
    assert allocated(f"{line} --reuse-grad-buf-for-mxfp8-param-ag") == allocated(line)


def test_the_largest_batch_of_a_schedule_counts() -> None:
    flags = LINE.replace("--global-batch-size 32", "--step-batch-size-schedule").split()
    flags.insert(flags.index("--step-batch-size-schedule") + 1, "0:64 200B:128")
    assert predicted(flags, world_size=8).microbatches == 16


def test_vocabularies(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(flags: str) -> int:
        return int(predicted(f"{MODEL} --global-batch-size 4 {flags}".split()).args.padded_vocab_size)

    assert rows("--vocab-file vocab.json") == 50304
    assert rows("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B") == 128256
    assert rows("--tokenizer-type HuggingFaceTokenizer --tokenizer-model some/other --vocab-size 1000") == 1024
    unknown = f"{MODEL} --global-batch-size 4 --tokenizer-type SentencePieceTokenizer --tokenizer-model some.model"
    assert main(["memory", *unknown.split()]) == 0
    assert (
        "--tokenizer-model some.model: not known here, and taken as 131072 tokens: give --vocab-size" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flag", "end"),
    [
        ("--log-param-norms", "; did you mean --log-params-norm?"),
        ("--tp", "; did you mean --tensor-model-parallel-size?"),
        ("--lora_rank", "; did you mean megatron.pipeline.install in a loop with adapters?"),
        ("--lora", "; did you mean megatron.pipeline.install in a loop with adapters?"),
        ("--wandb", "; did you mean --wandb-project with mpipe launch, or --metrics FILE?"),
        ("--dry-run", "; did you mean mpipe memory, which starts no training?"),
        ("--allgather-cp", "; --help lists ours"),
    ],
)
def test_unknown_to_all_releases(flag: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"unknown flag {flag}: no Megatron-LM from 0.16 to 0.19 has it{end}" in refusal(capsys, "memory", LINE, flag)


def test_files_of_functional_tests(tmp_path: Path) -> None:
    """Their flags stand under MODEL_ARGS, some of them twice, and lists are text."""
    keys = LINE.replace("--bf16", "").split()
    lines = [f"  {name}: {value}" for name, value in zip(keys[::2], keys[1::2], strict=True)]
    lines += [
        "  --bf16: true",
        "  --hidden-size: 512",
        "  --log-params-norm: true",
        '  --hierarchical-context-parallel-sizes: "[2 2]"',
        "  --of-tomorrow: 1",
    ]
    file = tmp_path / "model_config.yaml"
    file.write_text("\n".join(["ENV_VARS:", "  NCCL_ALGO: Ring", "MODEL_ARGS:", *lines, "METRICS: [lm loss]"]))
    assert allocated(f"--config {file}") == allocated(LINE)
    [note] = read_flags(["--config", str(file)]).not_modelled
    assert note == "left out, unknown to Megatron-LM 0.16 to 0.19: --of-tomorrow"


@pytest.mark.parametrize("flag", ["--log-params-norm", "--attention-backend unfused", "--cross-entropy-loss-fusion"])
def test_training_refuses_what_it_refused(flag: str) -> None:
    with pytest.raises(ValueError, match=flag.split(maxsplit=1)[0]) as refusal:
        check_trained(parse([*LINE.split(), *flag.split()]))
    assert "mpipe launch" in str(refusal.value)


@pytest.mark.parametrize(
    ("more", "schedule"),
    [
        ("", "stock"),
        ("--num-virtual-stages-per-pipeline-rank 2", "stock"),
        ("--metrics runs/metrics.json", "stock"),
        ("--pipeline-schedule zb-h1", "zb-h1"),
        ("--vocab-parallel 2", "zb-h1"),
    ],
)
def test_a_line_of_megatron_lm_is_predicted_as_it_runs(more: str, schedule: str) -> None:
    """Under megatron-core's own schedule, unless it has a flag of ours about another one."""
    line = LINE.replace(" --pipeline-schedule stock", "")
    assert predicted(f"{line} {more}".split()).args.pipeline.schedule == schedule


def test_ours_stands_beside_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    line = LINE.replace(" --pipeline-schedule stock", "").split()
    assert main(["memory", *line]) == 0
    text = capsys.readouterr().out
    assert text.startswith("stock: ") and "\n\nfor comparison, zb-h1: our default\n\nrank" in text
    assert main(["memory", *line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["schedule"], told["baseline"], told["ours"]["schedule"]) == ("stock", None, "zb-h1")


def test_widths_of_latent_attention_that_upstream_has() -> None:
    args = predicted(f"{LINE} --multi-latent-attention --q-lora-rank 96".split()).args
    assert (args.kv_lora_rank, args.qk_head_dim, args.qk_pos_emb_head_dim, args.v_head_dim) == (32, 128, 64, 128)
