"""Predictions from what others keep flags in: config.json of Hugging Face, and shell scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import Prediction, predicted
from megatron.pipeline.costmodel.parameters import total_parameters
from megatron.pipeline.shape.gpt import Shape

# Sizes of published models, and billions of parameters; DeepSeek-V3's with the layer of multi-token prediction.
LLAMA = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
}
QWEN = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
DEEPSEEK = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
}
LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
}
MODELS: list[tuple[dict[str, Any], float]] = [
    ({"model_type": "llama", "vocab_size": 128256} | LLAMA, 8.03),
    ({"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2} | LLAMA, 46.7),
    (
        {
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        }
        | {"intermediate_size": 6144, "decoder_sparse_step": 1}
        | QWEN,
        30.5,
    ),
    (
        {
            "model_type": "deepseek_v3",
            "vocab_size": 129280,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
        }
        | {"n_shared_experts": 1, "first_k_dense_replace": 3}
        | DEEPSEEK
        | LATENT,
        685.0,
    ),
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
    assert total_parameters(Shape.of(args), tied=False) / 1e9 == pytest.approx(billions, rel=0.005)


def test_an_unknown_kind_of_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "mamba"}')
    assert main(["memory", "--config", str(file), *BATCH.split()]) == 2
    assert "model_type mamba: known are llama," in capsys.readouterr().err


def test_a_script_is_read_and_not_run(tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    args = of_file(file, "--pipeline-schedule stock").args
    sizes = args.num_layers, args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.micro_batch_size
    assert sizes == (8, 2, 4, 4)
    assert args.moe_layer_freq == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_value_that_needs_running_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT.replace("TP=2", "TP=$(nproc)"))
    assert main(["memory", "--config", str(file)]) == 2
    assert "--tensor-model-parallel-size $" in capsys.readouterr().err
