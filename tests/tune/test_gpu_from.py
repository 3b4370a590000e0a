"""``--gpu-from``: the GPU on which a run measured its passes, for ``mpipe costs`` and ``mpipe tune``."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import refusal

from megatron.pipeline.cli import main
from megatron.pipeline.cli.memory import predicted
from megatron.pipeline.model.description import describe
from megatron.pipeline.planner.costmodel import estimate, origin
from megatron.pipeline.planner.costmodel.device import named, read
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.shape.gpt import Shape

MODEL = (
    "--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --vocab-size 127 --train-iters 1 --lr 1e-4 --global-batch-size 32 --micro-batch-size 2"
).split()
EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --swiglu".split()
F, B, W = 4e-3, 6e-3, 2e-3  # of a layer


def written(folder: Path, *flags: str, count: int = 4, weight: float = W, **of: Any) -> Path:
    """What a run of this model writes to costs.json, two layers a stage; ``of``: what it says else of the training."""
    inner = StageCosts(2 * F, 2 * B, 2 * weight, 8e6, 3e6)
    ends = replace(inner, forward=9.0, backward=9.0)
    costs = Costs((ends, *[inner] * (count - 2), ends), hop=1e-4)
    model, gpu = describe(predicted([*MODEL, *flags]).args), "NVIDIA A100-SXM4-80GB"
    about = origin.described(model, "none", [8 // count] * count, gpu) | of
    path = folder / "costs.json"
    path.write_text(json.dumps(costs.fields() | {"of": {name: value for name, value in about.items() if value != "left out"}}))
    return path


@pytest.mark.parametrize("flags", [[], EXPERTS])
def test_a_layer_takes_what_was_measured_and_others_in_proportion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    path = written(tmp_path, *flags)
    pipeline = "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h1".split()
    assert main(["costs", *MODEL, *flags, *pipeline, "--gpu-from", str(path), "--json"]) == 0
    told = capsys.readouterr()
    assert re.match(r"mpipe: from --gpu-from: a layer takes F 4 ms, B 6 ms, W 2 ms, together \S+ times as long as by", told.err)
    assert "A100-80GB with an efficiency of" in told.err and told.err.count("\n") == 1
    gpu, model = named("A100-80GB"), describe(predicted([*MODEL, *flags]).args)
    found, took, by_formulas = origin.measured(gpu, model, origin.read(path.read_text()))
    assert took == pytest.approx((F, B, W)) and by_formulas == pytest.approx(estimate.computing_seconds(Shape.of(model), gpu))
    alone = found.with_links(1e30)
    assert estimate.layer_seconds(Shape.of(model), alone, Links.within(alone)) == pytest.approx((F, B, W))
    assert found.efficiency == pytest.approx(gpu.efficiency * by_formulas.total / (F + B + W))
    longer = Shape.of(replace(model, micro_batch_size=4))
    times = [one / other for one, other in zip(*(estimate.computing_seconds(longer, each) for each in (found, gpu)), strict=True)]
    assert times == pytest.approx([one / other for one, other in zip(took, by_formulas, strict=True)])
    assert json.loads(told.out)["stages"][1]["weight"] == pytest.approx(2 * W + found.latency)


def test_the_layers_engine_is_the_measured_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As ``mpipe tune`` has it, unless the flags name another; a file with none keeps that of GPUs."""
    path, nameless = written(tmp_path, transformer_impl="local"), tmp_path / "nameless"
    nameless.mkdir()
    engines = []
    for flags in ([], ["--transformer-impl", "transformer_engine"]):
        assert main(["costs", *MODEL, *flags, "--gpu-from", str(path), "--json"]) == 0
        engines.append(json.loads(capsys.readouterr().out)["of"]["transformer_impl"])
    assert engines == ["local", "transformer_engine"]
    odd = written(nameless, transformer_impl="another")
    assert main(["costs", *MODEL, "--gpu-from", str(odd), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["of"]["transformer_impl"] == "transformer_engine"


@pytest.mark.parametrize(
    ("of", "more", "words"),
    [
        ({"count": 2}, "", "2 stages, and the first and the last have embedding and output layer besides"),
        ({"weight": 0.0}, "", "F, B and W must each take time, and some take none: measure a schedule that splits the backward"),
        ({"hidden_size": 128}, "", "the file is of --hidden-size 128, not 2048: give the flags of its training"),
        ({"numbers": "fp32"}, "", "the file is of numbers fp32, not bf16"),
        ({"ffn_hidden_size": "left out"}, "", "does not say of which training .*: mpipe rehearse -- FLAGS writes one"),
        ({"layers": [2, 2]}, "", r"layers: expected those of each of 4 stages, got \[2, 2\]"),
        ({"collectives": "run"}, "", "its seconds contain what ranks of a layer exchange"),
        ({"collectives": "predicted"}, "", "its seconds were predicted, not measured: mpipe rehearse"),
        ({"recompute_granularity": "full"}, "", "its backwards make activations again"),
        ({"gpu": None}, "", "the file does not name a GPU: say whose memory and links to take with --gpu A100-40GB or"),
        ({"gpu": "NVIDIA GH200 480GB"}, "", "the file was measured on NVIDIA GH200 480GB: say whose"),
        ({"gpu": "NVIDIA GH200 480GB", "hidden_size": 128}, "--gpu H100-80GB", "the file is of --hidden-size 128"),
    ],
)
def test_files_that_do_not_say_what_a_layer_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of: dict[str, Any], more: str, words: str
) -> None:
    refused = refusal(capsys, "costs", *MODEL, "--gpu-from", str(written(tmp_path, **of)), more)
    assert re.search(f"--gpu-from: .*{words}", refused), refused


def test_costs_of_another_origin_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text(Costs((StageCosts(1, 1, 1),) * 4).to_json())
    assert "does not say of which training" in refusal(capsys, "costs", *MODEL, "--gpu A100-80GB --gpu-from", str(path))
    assert "known GPUs are A100-40GB" in refusal(capsys, "costs", *MODEL)


@pytest.mark.usefixtures("here")
def test_a_search_writes_a_file_of_that_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "--gpus 2 --pipeline 2 --tensor 1 --micro-batch-sizes 2 --schedules zb-h1 --processes 1 --json".split()
    path = written(tmp_path)
    assert main(["tune", *MODEL, *few, "--gpu-from", str(path), "-o", str(tmp_path / "tuned")]) == 0
    first = json.loads(capsys.readouterr().out)
    file = tmp_path / "tuned" / "gpu.json"
    gpu = read(str(file))
    assert gpu.is_measured and gpu.memory == named("A100-80GB").memory
    assert gpu.source.endswith("F, B and W of a layer were measured on NVIDIA A100-SXM4-80GB")
    assert main(["tune", *MODEL, *few, "--gpu", str(file), "-o", str(tmp_path / "again")]) == 0
    assert json.loads(capsys.readouterr().out)["best"] == first["best"]
