"""Lines that NVIDIA has published, with small sizes, start under our schedules, and losses are those of megatron-core's own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from launch.launched import STAND_IN, launch, run
from marked import rest


class Recipe(NamedTuple):
    """A published line.

    Attributes:
        source: where it was read.
        line: its flags.
        sizes: the flags of which a shrunken model has smaller values, or none.
        left_out: the flags that --adapt leaves out under ``schedule``, in the order in which it says so.
        schedule: that the test trains it under.
        ranks: processes that it takes, of which 4 are a pipeline.
    """

    source: str
    line: str
    sizes: dict[str, str]
    left_out: tuple[str, ...]
    schedule: str
    ranks: int


# What a CPU cannot have: the flag, and what stands for it.
NOT_HERE = {
    "--transformer-impl": "--transformer-impl local",
    "--expert-model-parallel-size": "--expert-model-parallel-size 2",
    "--multi-latent-attention": "--group-query-attention --num-query-groups 2",  # needs Transformer Engine's attention
    "--moe-token-dispatcher-type": "--moe-token-dispatcher-type alltoall",  # flex is DeepEP
    "--clip-grad": "--clip-grad 0",  # norms are summed over ranks in their order
    "--train-samples": "--train-iters 3",
    "--lr": "--lr 1e-2",
    "--min-lr": "--min-lr 1e-2",
    "--make-vocab-size-divisible-by": "--make-vocab-size-divisible-by 64",
}
# What only Megatron-LM's own script has: the stand-in has no such flag.
OF_THE_SCRIPT = {
    "--use-mcore-models": "",
    "--manual-gc": "",
    "--manual-gc-interval": "",
    "--enable-experimental": "",
    "--distributed-timeout-minutes": "",
    "--no-check-for-nan-in-loss-and-grad": "--no-check-for-nan-in-loss-and-grad",
    "--rotary-seq-len-interpolation-factor": "",
}
# What has no code without a GPU under megatron-core's own schedules either.
UNDER_STOCK = dict.fromkeys(
    (
        "--delay-wgrad-compute --overlap-moe-expert-parallel-comm --tp-comm-overlap --overlap-param-gather-with-optimizer-step "
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit --cuda-graph-impl --cuda-graph-scope"
    ).split(),
    "",
)
_SMALL = (
    "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --kv-channels 8 --seq-length 16 "
    "--max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --pipeline-model-parallel-size 4 --num-experts 4 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32 --moe-router-num-groups 2 "
    "--moe-router-group-topk 1"
)
_LLAMA = (
    "--num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope "
    "--rotary-base 500000 --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --micro-batch-size 1 --global-batch-size 512 --sequence-parallel "
    "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 8 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--overlap-param-gather-with-optimizer-step --tp-comm-overlap --defer-embedding-wgrad-compute --wgrad-deferral-limit 50 "
    "--bf16 --transformer-impl transformer_engine --train-samples 1953125000 --lr 8e-5 --min-lr 8e-7 --lr-decay-style cosine "
    "--clip-grad 1.0 --weight-decay 0.1 --manual-gc --manual-gc-interval 100"
)
_DEEPSEEK = (
    "--distributed-timeout-minutes 60 --pipeline-model-parallel-size 8 --expert-model-parallel-size 64 "
    "--expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--use-mcore-models --sequence-parallel --disable-bias-linear --micro-batch-size 1 --global-batch-size 8192 --train-samples "
    "585937500 --no-check-for-nan-in-loss-and-grad --manual-gc --manual-gc-interval 10 --transformer-impl transformer_engine "
    "--seq-length 4096 --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --kv-channels 128 "
    "--max-position-embeddings 4096 --position-embedding-type rope --rotary-base 10000 --make-vocab-size-divisible-by 3232 "
    "--normalization RMSNorm --norm-epsilon 1e-6 --swiglu --untie-embeddings-and-output-weights --multi-latent-attention "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --qk-layernorm --lr 3.9e-6 --min-lr 3.9e-7 "
    "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 256 --moe-layer-freq ([0]*3+[1]*58) "
    "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-router-topk 8 --moe-aux-loss-coeff 1e-4 --moe-router-group-topk 4 --moe-router-num-groups 8 "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-bias-update-rate 1e-3 --moe-router-dtype fp32 --init-method-std 0.02 --bf16 --enable-experimental "
    "--moe-token-dispatcher-type flex --delay-wgrad-compute --overlap-moe-expert-parallel-comm --mtp-num-layers 1 "
    "--mtp-loss-scaling-factor 0.1 --pipeline-model-parallel-layout Et|(tt|)*30mL"
)
_QWEN = (
    "--distributed-timeout-minutes 210 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 3 "
    "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --use-mcore-models "
    "--sequence-parallel --disable-bias-linear --micro-batch-size 1 --global-batch-size 2048 --train-samples 268554688 "
    "--manual-gc --manual-gc-interval 5 --enable-experimental --transformer-impl transformer_engine "
    "--untie-embeddings-and-output-weights --position-embedding-type rope --rotary-percent 1.0 --rotary-base 1000000 "
    "--rotary-seq-len-interpolation-factor 1 --normalization RMSNorm --swiglu --norm-epsilon 1e-06 --num-layers 94 "
    "--hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 128 --group-query-attention "
    "--num-query-groups 4 --qk-layernorm --seq-length 4096 --max-position-embeddings 40960 --make-vocab-size-divisible-by 1187 "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --clip-grad 1.0 --weight-decay 0.1 --lr 3.9e-6 --min-lr 3.9e-7 "
    "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --num-experts 128 --moe-ffn-hidden-size 1536 "
    "--moe-router-load-balancing-type aux_loss --moe-router-topk 8 --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32 "
    "--init-method-std 0.02 --bf16 --moe-token-dispatcher-type flex --tp-comm-overlap --delay-wgrad-compute "
    "--overlap-moe-expert-parallel-comm --cuda-graph-impl transformer_engine --cuda-graph-scope moe_router moe_preprocess"
)
_MIXTRAL = (
    "--use-mcore-models --disable-bias-linear --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size "
    "4096 --ffn-hidden-size 14336 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0 "
    "--normalization RMSNorm --position-embedding-type rope --swiglu --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 8 --no-masked-softmax-fusion --rotary-base 1000000 --num-experts 8 "
    "--moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-token-dispatcher-type "
    "alltoall --overlap-param-gather --overlap-grad-reduce --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 "
    "--train-samples 128000000 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --clip-grad 1.0 --bf16 "
    "--pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel "
    "--num-virtual-stages-per-pipeline-rank 8"
)
RECIPES = {
    "Llama 3.1 405B": Recipe(
        "Megatron-LM examples/llama/README.md (the row of 1024 GPUs) and Megatron-Bridge scripts/performance/configs/llama; what "
        "overlaps, of NVIDIA's MLPerf submissions",
        _LLAMA,
        {"--num-layers": "14", "--num-virtual-stages-per-pipeline-rank": "4"},
        (
            "--overlap-param-gather-with-optimizer-step",
            "--defer-embedding-wgrad-compute",
            "--tp-comm-overlap",
            "--num-virtual-stages-per-pipeline-rank 4",
        ),
        "zb-v",
        4,
    ),
    "DeepSeek-V3": Recipe(
        "Megatron-MoE-ModelZoo model_configs/benchmarking/DeepSeek-V3.yaml, best_practice/DeepSeekV3/run.sh (1024 H100), "
        "sbatch_benchmarking.sh",
        _DEEPSEEK,
        {"--num-layers": "15", "--moe-layer-freq": "([0]*3+[1]*12)", "--pipeline-model-parallel-layout": "Et|(t|)*14mL"},
        ("--delay-wgrad-compute", "--pipeline-model-parallel-layout Et|(t|)*14mL"),
        "zb-v",
        8,
    ),
    "Qwen3-235B-A22B": Recipe(
        "Megatron-MoE-ModelZoo model_configs/benchmarking/Qwen3-235B-A22B.yaml, best_practice/qwen3/run_h100_235b.sh, "
        "sbatch_benchmarking.sh",
        _QWEN,
        {"--num-layers": "14", "--num-layers-per-virtual-pipeline-stage": "2"},
        ("--delay-wgrad-compute", "--tp-comm-overlap", "--cuda-graph-impl", "--num-layers-per-virtual-pipeline-stage 2"),
        "zb-h1",
        8,
    ),
    "Mixtral 8x7B": Recipe(
        "Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh; chunks: Megatron-MoE-ModelZoo "
        "runtime_configs/benchmarking/runtime.conf",
        _MIXTRAL,
        {"--num-layers": "8", "--num-virtual-stages-per-pipeline-rank": "2"},
        (),
        "v-half",
        8,
    ),
}


def shrunken(recipe: Recipe, *without: dict[str, str]) -> str:
    """The flags of a recipe that a CPU can have, with small sizes.

    Args:
        without: further flags to leave out or to replace, as in ``NOT_HERE``.
    """
    replaced = NOT_HERE.copy()
    for more in without:
        replaced |= more
    sizes = dict(_by_flag(_SMALL)) | recipe.sizes
    flags = (replaced.get(flag, f"{flag} {sizes.get(flag, values)}") for flag, values in _by_flag(recipe.line))
    return " ".join(flags)


def _by_flag(line: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for token in line.split():
        if token.startswith("--"):
            found.append((token, ""))
        else:
            flag, values = found[-1]
            found[-1] = (flag, f"{values} {token}".strip())
    return found


VOCABULARY = "--vocab-size 61"


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.left_out])
def test_all_that_does_not_go_with_a_schedule_is_refused_at_once(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    flags = f"{shrunken(recipe, OF_THE_SCRIPT)} {VOCABULARY} --pipeline-schedule {recipe.schedule}"
    codes, output, _ = run(tmp_path, STAND_IN, flags, recipe.ranks, started=1)
    assert codes == [2], output
    [line] = [line for line in output.splitlines() if line.startswith("mpipe launch: ")]
    places = [line.index(f"{flag} ") for flag in recipe.left_out]
    assert places == sorted(places)
    assert line.endswith("; the same command with --adapt leaves them out, and says at what price")


@pytest.mark.parametrize("name", [rest(name) if recipe.ranks > 4 else name for name, recipe in RECIPES.items()])
def test_a_shrunken_recipe_trains_as_under_stock(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    flags = f"{shrunken(recipe, OF_THE_SCRIPT)} {VOCABULARY} --pipeline-schedule {recipe.schedule} --adapt"
    stock = f"{shrunken(recipe, OF_THE_SCRIPT, UNDER_STOCK)} {VOCABULARY}"
    alone = launch(tmp_path / "stock", STAND_IN, stock, recipe.ranks)
    adapted = launch(tmp_path / "adapted", STAND_IN, flags, recipe.ranks)
    assert [loss for loss, _ in adapted] == [loss for loss, _ in alone] and len(alone) == 3
    said = [line for line in (tmp_path / "adapted" / "output").read_text().splitlines() if "left out by --adapt. Price: " in line]
    assert [line.startswith(f" {flag} ") for line, flag in zip(said, recipe.left_out, strict=True)] == [True] * len(said)
