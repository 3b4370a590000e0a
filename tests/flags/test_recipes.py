"""Predictions from what others keep flags in: config.json of Hugging Face, and shell scripts."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import Prediction, predicted
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.planner.costmodel.parameters import total_parameters

# Sizes of published models, and billions of parameters; DeepSeek-V3's with the layer of multi-token prediction.
LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
}  # fmt: skip
QWEN = {
    "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
}  # fmt: skip
DEEPSEEK = {
    "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1,
}  # fmt: skip
MODELS: list[tuple[dict[str, Any], float]] = [
    ({"model_type": "llama", "vocab_size": 128256} | LLAMA, 8.03),
    ({"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2} | LLAMA, 46.7),
    ({"model_type": "qwen3_moe", "vocab_size": 151936} | QWEN, 30.5),
    ({"model_type": "deepseek_v3", "vocab_size": 129280} | DEEPSEEK, 685.0),
]
BATCH = "--seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --pipeline-model-parallel-size 4 --pipeline-schedule stock"
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


def of_file(file: Path, flags: str) -> Prediction:
    return predicted(["--config", str(file), *flags.split()])


@pytest.mark.parametrize(
    ("config", "billions"), MODELS, ids=lambda value: str(value["model_type"]) if isinstance(value, dict) else ""
)
def test_a_config_of_hugging_face_is_the_model(config: dict[str, Any], billions: float, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"architectures": ["X"], "tie_word_embeddings": False, "torch_dtype": "bfloat16"}))
    args = of_file(file, BATCH).args
    assert total_parameters(shape_of(args), tied=False) / 1e9 == pytest.approx(billions, rel=0.005)


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "mamba"}')
    assert "model_type mamba: known are llama," in refusal(capsys, "memory", "--config", str(file), BATCH)


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
    --swiglu false --use_distributed_optimizer=true --load_safetensors true ${GPT_ARGS[@]} ${LOADER[@]} --dataloader again
"""


@pytest.mark.parametrize("command", ["memory", "costs", "tune"])
def test_flags_of_others_are_read_with_underscores_and_what_is_unknown_is_listed_once(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not torchrun's, nor those that a script reads itself."""
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT.replace("--tensor-model-parallel-size ${TP} ", "") + MORE)
    args = of_file(file, "").args
    assert (args.tensor_model_parallel_size, args.sequence_parallel, args.swiglu) == (8, True, False)
    assert args.use_distributed_optimizer and args.pipeline.schedule == "stock"
    own = {"costs": "--gpu H100-80GB", "tune": "--gpu H100-80GB --gpus 64 --tensor 8 --pipeline 8 --schedules 1f1b --processes 1"}
    assert main([command, "--config", str(file), *own.get(command, "").split(), "-o", str(tmp_path / "report.txt")]) == 0
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("planning ")]
    listed = "--dataloader, --allgather-cp, --load-safetensors"
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


def test_a_recipe_of_bridge_by_its_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
        pipeline_model_parallel_layout=None,
    )  # fmt: skip
    recipe = Namespace(
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
    vars(package)["tiny_pretrain_config"] = lambda: recipe
    vars(mixed)["get_mixed_precision_config"] = {"bf16_with_mxfp8_mixed": precision}.__getitem__
    for module in (package, mixed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    flags = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 4 --swiglu "
        "--ffn-hidden-size 4096 --kv-channels 64 --seq-length 2048 --disable-bias-linear --normalization RMSNorm --bf16 "
        "--hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope --untie-embeddings-and-output-weights "
        "--vocab-size 32000 --tokenizer-type HuggingFaceTokenizer --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 "
        "--moe-layer-freq ([0]+[1]*7) --moe-grouped-gemm --expert-model-parallel-size 2 --moe-token-dispatcher-type flex "
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --attention-backend fused "
        "--recompute-granularity selective --recompute-modules moe_act --window-size 128,0 --window-attn-skip-freq 2 "
        "--micro-batch-size 1 --global-batch-size 64 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
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
