"""Predictions from what others keep flags in: config.json of Hugging Face, and shell scripts."""

from __future__ import annotations

import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest
import torch
from command import refusal
from flags.others import of_file

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.importers.bash import Script, unknown_in

SCRIPT = """\
#!/bin/bash
# --num-layers 99
TP=2
export PP=${PP:-4}
DISTRIBUTED_ARGS=(--nproc_per_node 8 --nnodes $NNODES)
GPT_ARGS=(
    --num-layers 8   # of them
    --hidden-size 512 --num-attention-heads 8
    --seq-length 1024
    --tokenizer-type NullTokenizer --vocab-size 50256
    --moe-layer-freq "([0]*4+[1]*4)" --num-experts 4
    --bf16
)
MORE="--micro-batch-size 4 --global-batch-size 32"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_ARGS[@]} $MORE \\
    --tensor-model-parallel-size ${TP} --sequence-parallel --disable-bias-linear \\
    --pipeline-model-parallel-size $PP --save $(pwd)/checkpoints | tee log
"""


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    args = of_file(file, "--pipeline-schedule stock").args
    sizes = args.num_layers, args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.micro_batch_size
    assert sizes == (8, 2, 4, 4)
    assert args.moe_layer_freq == [0, 0, 0, 0, 1, 1, 1, 1]


MORE = """\
case $1 in --mine) shift ;; --yours|--theirs) shift ;; esac
LOADER=(--dataloader ${FILE} --allgather-cp)
torchrun --nproc_per_node 8 --master-port 1 pretrain_gpt.py --tensor_model_parallel_size 8 --sequence_parallel true \\
    --swiglu false --use_distributed_optimizer=true --load_safetensors true ${GPT_ARGS[@]} ${LOADER[@]} --dataloader again \\
    --micro_batch_size 4 --global_batch_size 32 --pipeline_model_parallel_size $PP --disable-bias-linear
"""


@pytest.mark.parametrize("command", ["memory", "costs", "tune"])
def test_flags_of_others_are_read_with_underscores_and_what_is_unknown_is_listed_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not torchrun's, nor those that a script reads itself."""
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT.partition("torchrun")[0] + MORE)
    args = of_file(file, "").args
    assert (args.tensor_model_parallel_size, args.sequence_parallel, args.swiglu) == (8, True, False)
    assert args.use_distributed_optimizer and args.pipeline.schedule == "stock"
    own = {"costs": "--gpu H100-80GB", "tune": "--gpu H100-80GB --gpus 64 --tensor 8 --pipeline 8 --schedules 1f1b --processes 1"}
    assert main([command, "--config", str(file), *own.get(command, "").split(), "-o", str(tmp_path / "report.txt")]) == 0
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("planning ")]
    listed = "--load-safetensors, --dataloader, --allgather-cp"
    assert errors == [f"mpipe: not in this prediction: left out, unknown to Megatron-LM 0.16 to 0.19: {listed}"]
    assert "unknown flag --dataloader" in refusal(capsys, command, "--config", str(file), "--dataloader", own.get(command, ""))


def test_a_value_that_needs_running_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT.replace("TP=2", "TP=$(nproc)"))
    assert "--tensor-model-parallel-size $" in refusal(capsys, "memory", "--config", str(file))


def test_what_the_command_line_gives_needs_no_running(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT.replace("TP=2", "TP=$(nproc)"))
    assert of_file(file, "--tensor-model-parallel-size 2").args.tensor_model_parallel_size == 2


def test_a_script_in_parts(tmp_path: Path) -> None:
    """Flags in the value of a variable, of a script that another one sources; arithmetic; a seed that is not known."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.sh").write_text(
        'NODES=2\nMODEL_ARGS=" \\\n --num-layers $((4 * NODES)) \\\n --hidden-size 512 "\n'
    )
    lines = (
        'DIR="$(cd -- "$(dirname "$0")" && pwd)"',
        'source "${DIR}/models/tiny.sh"',
        "source train.sh  # which a shell would never end",
        "BATCH=$(( (NODES + 2) * 8 / 8 ))",
        'case $1 in --help) shift ;; --tokenizer-model) MODEL="$2" ;; esac',
        'RUN="python pretrain_gpt.py ${MODEL_ARGS} --seed $SEED --micro-batch-size 1 --global-batch-size $BATCH"',
        'bash -c "$RUN --num-attention-heads 8 --seq-length 128 --vocab-size 1000 --tokenizer-type NullTokenizer"',
    )
    file = tmp_path / "train.sh"
    file.write_text("\n".join(lines))
    args = of_file(file, "").args
    assert (args.num_layers, args.hidden_size, args.global_batch_size) == (8, 512, 4)


BY_POSITION = """\
SIZE=$1
SEQ=${2}
TP=${14}
FLASH=${15:-true}
GPUS=$(nvidia-smi -L | wc -l)
if [ $SIZE = small ] && [ -z ${LAYERS} ]; then
    LAYERS=8
elif [ "$SIZE" != small ]; then
    LAYERS=$(( 4 * 4 ))
fi
if [ $FLASH = true ]; then
    attention=" \\
        --attention-backend flash"
fi
sp_option=""
[[ $TP -gt 1 || -n "${ALWAYS}" ]] && sp_option="--sequence-parallel"
more=" --num-layers ${LAYERS} --seq-length ${SEQ} --hidden-size 512 --num-attention-heads 8 --lr ${16} --bf16 --save ${17} \\
    --micro-batch-size 1 --global-batch-size $(( $TP > 1 ? 8 : 16 )) --padded-vocab-size 1024 --patch-tokenizer-type Mine"
run="torchrun --nproc_per_node $GPUS pretrain.py ${more} ${sp_option} ${attention} --tensor-model-parallel-size ${TP}"
echo ${run}
eval ${run}
"""


def test_all_that_a_script_leaves_open_is_asked_for_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters that its conditions, or flags that matter, depend on; then they are given."""
    file = tmp_path / "train.sbatch"
    file.write_text(BY_POSITION)
    line = refusal(capsys, "memory", "--config", str(file))
    assert "--seq-length ${2}, --num-layers ${LAYERS}" in line or "--num-layers ${LAYERS}, --seq-length ${2}" in line
    assert "give --set 1=.. 2=.. 14=.. LAYERS=.. (parameters by number, variables by name), or these flags" in line
    line = refusal(capsys, "memory", "--config", str(file), "--set 1=small 14=2")
    assert "--seq-length ${2}: not known" in line and "--set 2=.. (" in line
    found = predicted(["--config", str(file), "--set", "1=small", "2=128", "14=2"])
    args = found.args
    sizes = args.num_layers, args.seq_length, args.tensor_model_parallel_size, found.microbatches, args.vocab_size
    assert sizes == (8, 128, 2, 8, 1024) and (args.sequence_parallel, args.attention_backend) == (True, "flash")
    args = predicted(["--config", str(file), "--set", "1=large", "2=128", "14=1", "--set", "15=false", "--num-layers", "4"]).args
    assert (args.num_layers, args.sequence_parallel, args.attention_backend) == (4, False, "auto")
    assert predicted(["--config", str(file), "--set", "1=large", "2=128", "14=1"]).args.num_layers == 16


BY_LOOPS = """\
set -ex
: "${SEQ:=256}"
: "${BATCH:=$((4 * 2))}"
LAYERS="${MY_LAYERS:-6}"
DENSE=2
arr=()
for ((i=0; i<LAYERS; i++)); do
  if (( i < DENSE )); then arr+=(0); else arr+=(1); fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
declare -a MODEL=(
   --num-layers $LAYERS --hidden-size 256   # of them
   # --micro-batch-size 8
   --num-attention-heads 8 --moe-layer-freq "$FREQ" --num-experts 4 --moe-router-topk 2 --vocab-size 1000
)
MODEL+=(--disable-bias-linear --tokenizer-type NullTokenizer)
for size in tensor pipeline; do
  PARALLEL="$PARALLEL --$size-model-parallel-size 1"
done
"""
SLIME = "ray job submit -- python3 train.py ${MODEL[@]} ${PARALLEL} --hf-checkpoint /m --global-batch-size $BATCH --rollout 8\n"


def test_loops_that_build_lists_and_sizes_that_a_framework_leaves_to_the_data(tmp_path: Path) -> None:
    (tmp_path / "sizes.sh").write_text(BY_LOOPS)
    file = tmp_path / "run.sh"
    file.write_text('DIR="$(cd -- "$(dirname "$0")" &>/dev/null && pwd)"\nsource "${DIR}/sizes.sh"\n' + SLIME)
    args = of_file(file, "").args
    assert args.moe_layer_freq == [0, 0, 1, 1, 1, 1] and (args.seq_length, args.micro_batch_size) == (4096, 1)
    assert args.not_modelled[:2] == [
        "--seq-length 4096: slime's own, which leaves it to the data",
        "--micro-batch-size 1: slime's own, which leaves it to the data",
    ]
    assert args.not_modelled[2].endswith(": --hf-checkpoint, --rollout")
    args = of_file(tmp_path / "sizes.sh", "--set MY_LAYERS=4 --seq-length 64 --micro-batch-size 2 --global-batch-size 8").args
    assert (args.moe_layer_freq, args.hidden_size, args.global_batch_size) == (
        [0, 0, 1, 1],
        256,
        8,
    )  # of a script that runs nothing


def test_words_of_ms_swift(tmp_path: Path) -> None:
    file = tmp_path / "sft.sh"
    file.write_text(
        "NPROC_PER_NODE=8 \\\nmegatron sft \\\n --model Qwen/Qwen3-30B-A3B-Instruct-2507 \\\n --dataset 'a#1' \\\n"
        " --pipeline_model_parallel_size 2 --expert_model_parallel_size 4 --moe_permute_fusion true --finetune true \\\n"
        " --loss_scale ignore_empty_think --max_length 8192 --sequence_parallel true --recompute_granularity selective\n"
    )
    args = of_file(file, "").args
    sizes = args.num_layers, args.num_experts, args.seq_length, args.expert_model_parallel_size, args.micro_batch_size
    assert sizes == (48, 128, 8192, 4, 1)
    assert args.not_modelled == [
        "--micro-batch-size 1: ms-swift's own, which leaves it to the data",
        "--global-batch-size 16: ms-swift's own, which leaves it to the data",
        "--expert-tensor-parallel-size 1: ms-swift's own, which leaves it to the data",
        "left out, unknown to Megatron-LM 0.16 to 0.19: --dataset",
    ]


def test_settings_for_hydra(tmp_path: Path) -> None:
    """Of verl; those of the reference model are not the trained model's."""
    actor, file = "actor_rollout_ref.actor", tmp_path / "grpo.sh"
    file.write_text(
        "PP=${PP:-4}\nHOME_OF=${HOME_OF:-/data}\npython3 -m verl.trainer.main_ppo --config-path=config \\\n"
        " data.max_prompt_length=$((1024 * 2)) data.max_response_length=1024 actor_rollout_ref.rollout.n=8 \\\n"
        f' actor_rollout_ref.model.path="$HOME_OF/Qwen2-7B-Instruct" {actor}.ppo_mini_batch_size=16 \\\n'
        f" {actor}.megatron.pipeline_model_parallel_size=${{PP}} {actor}.megatron.tensor_model_parallel_size=2 \\\n"
        f" {actor}.megatron.virtual_pipeline_model_parallel_size=null {actor}.ppo_micro_batch_size_per_gpu=4 \\\n"
        f" +{actor}.megatron.override_transformer_config.recompute_granularity=selective \\\n"
        " actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8 trainer.logger=['console','wandb']\n"
    )
    args = of_file(file, "").args
    sizes = args.num_layers, args.seq_length, args.micro_batch_size, args.tensor_model_parallel_size
    assert sizes == (28, 3072, 4, 2) and of_file(file, "").microbatches == 32
    assert (args.pipeline_model_parallel_size, args.recompute_granularity, args.sequence_parallel) == (4, "selective", True)


NEMO = """\
trainer: {devices: 8, precision: bf16, max_steps: 50}
exp_manager: {name: x, checkpoint_callback_params: {model_parallel_size: 4}}
model:
  micro_batch_size: 2
  global_batch_size: 32
  encoder_seq_length: 512
  num_layers: 8
  hidden_size: 512
  num_attention_heads: 8
  num_query_groups: 4
  kv_channels: null
  bias: false
  activation: fast-swiglu
  normalization: rmsnorm
  share_embeddings_and_output_weights: false
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 2
  activations_checkpoint_granularity: null
  masked_softmax_fusion: false
  onnx_safe: false
  tokenizer: {library: megatron, type: GPT2BPETokenizer, model: null}
  fp8: true
  fp8_hybrid: true
  optim: {name: mcore_distributed_optim, lr: 0.0001, grad_sync_dtype: bf16, overlap_grad_sync: true}
  data: {seq_length: "${model.encoder_seq_length}", data_prefix: "${data:x}"}
"""
NESTED = """\
model:
  config: {num_layers: 8, hidden_size: 512, num_attention_heads: 8, vocab_size: 1000}
trainer:
  strategy: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 4, sequence_parallel: true}
data: {seq_length: 512, micro_batch_size: 2, global_batch_size: 32}
"""


def test_settings_within_settings(tmp_path: Path) -> None:
    """NeMo's of its first and its second kind."""
    file = tmp_path / "train.yaml"
    file.write_text(NEMO)
    args = of_file(file, "").args
    sizes = args.num_layers, args.seq_length, args.num_query_groups, args.chunks, args.vocab_size
    assert sizes == (8, 512, 4, 2, 50257)
    assert (args.swiglu, args.add_bias_linear, args.normalization, args.bf16, args.fp8) == (
        True,
        False,
        "RMSNorm",
        True,
        "hybrid",
    )
    assert (args.use_distributed_optimizer, args.grad_reduce_in_bf16, args.masked_softmax_fusion) == (True, True, False)
    assert args.untie_embeddings_and_output_weights and args.group_query_attention
    file.write_text(NESTED)
    args = of_file(file, "--num-layers 12").args
    assert (args.num_layers, args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (12, 2, 4)


def test_a_script_does_nothing_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, made = tmp_path / "train.sh", tmp_path / "made"
    file.write_text(f"touch {made}\nA=$(touch {made})\neval touch {made}\nfor ((i=0; i<2; )); do B=$((2 ** 99999999)); done\n")
    assert "its loops do not end" in refusal(capsys, "memory", "--config", str(file))
    file.write_text(f"touch {made}\nsource models/$1.sh\npython train.py $@ ${{A[@]}} ${{!B}} ${{C//x/y}}\n")
    assert "nor in what it sources; models/${1}.sh is not there; give --set 1=.. (" in refusal(
        capsys, "memory", "--config", str(file)
    )
    assert not made.exists()


BOMB = 'A=aaaaaaaaaaaaaaaa\nfor ((i=0; i<60; i++)); do A="$A$A"; done\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "it is too long, or its loops do not end"),
        (
            BOMB.replace("=a", "=(a").replace("aa\n", "aa a)\n").replace('"$A$A"', '("${A[@]}" "${A[@]}")'),
            "it is too long, or its",
        ),
        ("# a comment\n" * 100_000, "it is too long"),
        ("A=1\nA=${}\n", "line 2 cannot be read as bash: change it, or give flags instead"),
        ("source circle\n", "nor in what it sources; circle is not there"),
        (f"source a\0b\nsource {'a' * 5000}\n", "b is not there; aaaa"),
    ],
)
def test_scripts_that_are_odd_are_refused_in_a_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    file = tmp_path / "train.sh"
    file.write_text(text)
    assert words in refusal(capsys, "memory", "--config", str(file))


def test_comments_counts_and_numbers_of_bash(tmp_path: Path) -> None:
    """A comment behind ``&&``, a count from 1 by ``++i``, an array's end, ``${#}``, and numbers beyond 64 bits."""
    script = Script(tmp_path / "train.sh", {"1": "a"})
    script.run("true && # so\nA=(7 8)\nfor ((i=0; i<3; ++i)); do B=$i; done\nC=${A[-1]}\nD=${#}\nE=9\n")
    assert [script.values[name] for name in "BCD"] == ["2", "8", "1"]
    script.run("for ((i=0; i<20; i++)); do E=$((E * E)); done\n")
    assert unknown_in(str(script.values["E"])) == ["$((E * E))"]


def test_an_experiment_of_primus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Overrides over a model's file, over what it extends, over a trainer's; its own settings do nothing."""
    configs = tmp_path / "primus" / "configs"
    (configs / "models" / "megatron").mkdir(parents=True)
    (configs / "modules" / "megatron").mkdir(parents=True)
    (configs / "modules" / "megatron" / "pre_trainer.yaml").write_text(
        "bf16: true\nmicro_batch_size: 1\noffload: false\nmtp_num_layers: 0\n"
    )
    (configs / "models" / "megatron" / "base.yaml").write_text(
        "hidden_size: 256\nswiglu: true\nkv_lora_rank: 32\nadd_bias_linear: false\n"
    )
    (configs / "models" / "megatron" / "tiny.yaml").write_text(
        "extends:\n  - base.yaml\nhidden_size: 512\n"
        "num_layers: 8\nnum_attention_heads: 8\ntokenizer_model: gpt2\nvocab_size: 1000\n"
    )
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(
        "modules:\n  pre_trainer:\n    framework: megatron\n"
        "    config: pre_trainer.yaml\n    model: ${MODEL:tiny}.yaml\n    overrides:\n"
        "      enable_primus_turbo: true\n      seq_length: 128\n      pipeline_model_parallel_size: ${PP:1}\n"
        "      recompute_granularity: full\n      recompute_method: block\n      recompute_num_layers: 0\n"
    )
    monkeypatch.setenv("PP", "2")
    args = of_file(experiment, "").args
    assert args.not_modelled == ["left out, unknown to Megatron-LM 0.16 to 0.19: --enable-primus-turbo"]
    assert (args.hidden_size, args.pipeline_model_parallel_size, args.swiglu, args.add_bias_linear) == (512, 2, True, False)
    assert (args.recompute_granularity, args.bf16, args.offloading.mode) == (None, True, None)
    for wrong in ("", "  pre_trainer: 1\n", "  pre_trainer:\n    model: tiny.yaml\n"):
        (tmp_path / "wrong.yaml").write_text("modules:\n" + wrong)
        assert "needs framework, config and model" in refusal(capsys, "memory", "--config", str(tmp_path / "wrong.yaml"))
    (configs / "models" / "megatron" / "base.yaml").write_text("extends: [tiny.yaml]\n")
    assert "tiny.yaml extends itself" in refusal(capsys, "memory", "--config", str(experiment))
    other = tmp_path / "elsewhere.yaml"
    other.write_text(experiment.read_text())
    (tmp_path / "primus").rename(tmp_path / "gone")
    assert "its model tiny.yaml is in primus/configs of Primus' repository" in refusal(capsys, "memory", "--config", str(other))


class _Backend(Enum):
    fused = 2


class _Scope(Enum):
    attn = 1


def test_a_recipe_of_bridge_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in for Bridge's package, whose recipe has the sections and names of settings that Bridge's have."""
    model = Namespace(
        num_layers=8, hidden_size=1024, num_attention_heads=16, num_query_groups=4, ffn_hidden_size=4096, kv_channels=64,
        seq_length=2048, gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, position_embedding_type="rope", share_embeddings_and_output_weights=False, vocab_size=32000,
        num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=512, moe_layer_freq=[0, *[1] * 7], moe_grouped_gemm=True,
        expert_model_parallel_size=2, moe_token_dispatcher_type="flex", pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2, tensor_model_parallel_size=1, mtp_num_layers=0, attention_backend=_Backend.fused,
        recompute_granularity="selective", recompute_modules=["moe_act"], bf16=False,
        cuda_graph_impl="transformer_engine", cuda_graph_scope=[_Scope.attn], window_size=(128, 0), window_attn_skip_freq=2,
        pipeline_model_parallel_layout=None, offload_modules=[], use_te_activation_func=False,
    )  # fmt: skip
    recipe = Namespace(
        comm_overlap=Namespace(tp_comm_overlap=True, overlap_grad_reduce=False),  # these count in place of ddp's
        model=model,
        train=Namespace(micro_batch_size=1, global_batch_size=64),
        ddp=Namespace(
            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, grad_reduce_in_fp32=False
        ),
        optimizer=Namespace(optimizer="adam", use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16, lr=3e-4),
        mixed_precision="bf16_with_mxfp8_mixed",
        tokenizer=Namespace(vocab_size=None),
    )
    precision = Namespace(bf16=True, fp8="e4m3", fp8_recipe="mxfp8", fp8_param_gather=True)
    package, mixed = ModuleType("megatron.bridge.recipes"), ModuleType("megatron.bridge.training.mixed_precision")
    inner = ModuleType("megatron.bridge.recipes.tiny")  # a release's package may be empty at its top
    vars(inner)["tiny_pretrain_config"] = lambda: recipe
    vars(package)["__path__"] = [str(tmp_path)]
    (tmp_path / "tiny.py").touch()
    vars(mixed)["get_mixed_precision_config"] = {"bf16_with_mxfp8_mixed": precision}.__getitem__
    for module in (package, inner, mixed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    flags = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --swiglu "
        "--ffn-hidden-size 4096 --kv-channels 64 --seq-length 2048 --disable-bias-linear --normalization RMSNorm --bf16 "
        "--hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope --untie-embeddings-and-output-weights "
        "--vocab-size 32000 --tokenizer-type HuggingFaceTokenizer --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 "
        "--moe-layer-freq ([0]+[1]*7) --moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type flex "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --attention-backend fused "
        "--recompute-granularity selective --recompute-modules moe_act --window-size 128,0 --window-attn-skip-freq 2 "
        "--micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --tp-comm-overlap "
        "--grad-reduce-in-bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 --fp8-format e4m3 --fp8-recipe mxfp8 "
        "--fp8-param-gather --lr 3e-4 --cuda-graph-impl transformer_engine --cuda-graph-scope attn"
    )
    same = ["--pipeline-schedule", "stock"]
    named = vars(parse(["--config", "bridge:tiny_pretrain_config", *same], predicts=True))
    given = vars(parse([*flags.split(), *same], predicts=True))
    assert named | {"config": None} == given
    model.pipeline_model_parallel_layout = [["embedding", "decoder"], *[["decoder"]] * 6, ["decoder", "loss"]]
    assert [rank.layers for rank in predicted(["--config", "bridge:tiny_pretrain_config", *same], world_size=8).ranks] == [2] * 4
    assert "have no another_config" in refusal(capsys, "memory", "--config", "bridge:another_config")
