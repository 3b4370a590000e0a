"""A model's config.json of Hugging Face, or its name, in place of the flags of its sizes."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
from command import refusal
from flags.others import BATCH, of_file

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flags import MEGATRON
from megatron.pipeline.flags.importers.upstream import table
from megatron.pipeline.flags.settings import add_flags
from megatron.pipeline.launch.parser import extend
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.planner.costmodel.parameters import total_parameters

# Parameters of published models, of their text and without multi-token prediction, as their cards or weights have them.
COUNTS = {
    "meta-llama/Llama-3.1-8B": 8030261248,
    "mistralai/Mistral-7B-v0.1": 7241732096,
    "mistralai/Mixtral-8x7B-v0.1": 46702792704,
    "Qwen/Qwen2.5-7B": 7615616512,
    "Qwen/Qwen1.5-MoE-A2.7B": 14315784192,
    "Qwen/Qwen3-8B": 8190735360,
    "Qwen/Qwen3-30B-A3B": 30532122624,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79674391296,
    "google/gemma-2-27b": 27227128320,
    "google/gemma-3-27b-it": 27009346304,
    "microsoft/phi-4": 14659507200,
    "zai-org/GLM-4-9B-0414": 9400279040,
    "zai-org/GLM-4.5-Air": 106852245504,
    "deepseek-ai/DeepSeek-V2-Lite": 15706484224,
    "deepseek-ai/DeepSeek-V3": 671026419200,
    "openai/gpt-oss-120b": 116829156672,
    "MiniMaxAI/MiniMax-M2": 228689764352,
    "meta-llama/Llama-4-Scout-17B-16E": 107769861120,
    "baidu/ERNIE-4.5-21B-A3B-PT": 21825437888,
    "tencent/Hunyuan-A13B-Instruct": 80393183232,
    "allenai/OLMoE-1B-7B-0924": 6919161856,
    "bigcode/starcoder2-15b": 15957889024,
    "nvidia/Nemotron-H-8B-Base-8K": 8101000000,
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31600000000,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_a_config_of_hugging_face_is_the_model(name: str, count: int, tmp_path: Path) -> None:
    config = table("published")[name] | {"num_nextn_predict_layers": 0}
    content = json.dumps(config | {"architectures": ["X"], "torch_dtype": "bfloat16"})
    (tmp_path / "config.json").write_text(content, encoding="utf-8-sig")  # with the mark of Windows' editors
    for path in (tmp_path, tmp_path / "config.json"):
        args = predicted(["--model", str(path), *BATCH.replace("-size 4", "-size 1").split()]).args
    assert total_parameters(shape_of(args), not args.untie_embeddings_and_output_weights) == pytest.approx(count, rel=0.001)


def test_a_model_by_its_name_is_below_all_other_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of a file, which may name the model, and of the command line."""
    (tmp_path / "flags.yaml").write_text("model: /data/Qwen3-8B-Base\nnum-layers: 30\nhidden-size: 2048\n")
    args = of_file(tmp_path / "flags.yaml", f"{BATCH} --num-layers 32").args
    assert (args.num_layers, args.hidden_size, args.ffn_hidden_size, args.qk_layernorm) == (32, 2048, 12288, True)
    assert main(["flags", "Qwen/Qwen2.5-VL-7B-Instruct", "--num-layers", "4", "--json"]) == 0
    words, errors = capsys.readouterr()
    read = parse(json.loads(words)["flags"], predicts=True)
    assert (read.num_layers, read.add_qkv_bias, read.vocab_size) == (4, True, 152064)
    assert "--model Qwen/Qwen2.5-VL-7B-Instruct: the model of its text alone\nmpipe: a name stands for sizes" in errors
    assert "--model ~someone-else/x: no such file or folder" in refusal(capsys, "flags", "~someone-else/x")
    assert "did you mean --model with" in refusal(capsys, "memory", "--hf", "Qwen/Qwen3-8B", BATCH)


EXPERTS = (
    '{"model_type": "mixtral", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9, "num_local_experts": 4, '
    '"num_hidden_layers": %s}'
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "ll', "not a config.json: invalid JSON"),
        ("[]", "no config.json of a model of Hugging Face, which has a model_type"),
        ('{"model_type": "mamba", "hidden_size": 8}', "without num_hidden_layers, num_attention_heads, vocab_size, which"),
        ('{"model_type": "clip_vision_model", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}', "vocab_size"),
        (EXPERTS % '4, "decoder_sparse_step": "2"', "its experts' layers, or their sizes, are not whole numbers, or missing ("),
        (EXPERTS % '4, "n_shared_experts": 2', "or missing ('moe_ffn_hidden_size')"),
        (EXPERTS % "1000000000", "--num-layers: expected a whole number from 1 to 10,000, got 1000000000"),
        (
            EXPERTS.replace("8", "1" + "0" * 400) % 4,
            "--hidden-size: expected a whole number of at least 1 and at most 1,000,000,000,000,000",
        ),
        ('{"model_type": ["llama"]}', "without num_hidden_layers, hidden_size, num_attention_heads, vocab_size"),
        (None, "a folder without a config.json"),
    ],
)
def test_what_is_no_model_is_refused(text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    line = refusal(capsys, "memory", "--model", str(tmp_path), BATCH)
    assert words in line and (f"--model {tmp_path}: " in line or "expected" in words)
    assert "; known kinds are llama," in line or "model_type" not in line or text == "[]"


def test_an_unknown_kind_is_read_by_its_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the file leaves out are those of transformers' class, where that is installed; here of a stand-in."""
    own = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_tomorrow"} | own))
    made = Namespace(to_dict=lambda: own | {"vocab_size": 1000, "intermediate_size": 128})
    package = ModuleType("transformers")
    vars(package)["CONFIG_MAPPING"] = {"of_tomorrow": lambda **given: made if given == own else None}
    monkeypatch.setitem(sys.modules, "transformers", package)
    args = predicted(["--model", str(tmp_path), *BATCH.split()]).args
    assert (args.num_layers, args.ffn_hidden_size, args.vocab_size) == (4, 128, 1000)
    assert args.not_modelled == [f"--model {tmp_path}: model_type of_tomorrow is not known here, and read as Llama's"]


def test_a_model_in_the_cache_of_hugging_face(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hub" / "models--some--Model-1B" / "snapshots" / "1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(table("published")["Qwen/Qwen3-8B"] | {"num_hidden_layers": 3}))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert predicted(["--model", "some/Model-1B", *BATCH.replace("-size 4", "-size 1").split()]).args.num_layers == 3
    assert "no such file or folder: give the config.json" in refusal(capsys, "memory", "--model", "some/Qwen3-80B", BATCH)


def test_launch_says_what_a_model_stands_for() -> None:
    parser, lines = argparse.ArgumentParser(), list[str]()
    add_flags(parser, MEGATRON)
    extend(parser, lines.extend)
    assert parser.parse_known_args(["--model", "Qwen/Qwen3-8B", "--num-layers", "4"])[0].num_layers == 4
    assert lines[0].startswith("--model Qwen/Qwen3-8B stands for --tokenizer-type=HuggingFaceTokenizer --normalization=RMSNorm")
