"""Every file in ``configs/`` loads, can be planned, and says what memory its ranks need; configs/README.md lists them all.

``python tests/test_configs.py`` writes what is predicted now into the files and the document.
"""

from __future__ import annotations

import json
import re
import textwrap
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from marked import rest, whole
from megatron.pipeline.patches import schedules
from pool import Pool

from megatron.pipeline.cli.memory import Prediction, predicted, report
from megatron.pipeline.flags.flags import STOCK_1F1B
from megatron.pipeline.model.description import shape_of
from megatron.pipeline.planner.costmodel.memory import GIB
from megatron.pipeline.planner.costmodel.parameters import total_parameters
from megatron.pipeline.trainer import program

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").rglob("*.yaml"), key=lambda path: (path.parent.name, len(path.name), path.name))
DOCUMENT = ROOT / "configs" / "README.md"
GPU = 80 * GIB
FIRST_LINE = "# Predicted GiB of every pipeline rank (mpipe memory), for GPUs of 80:"
HEAD = "| file | billion parameters | GPUs | PP x TP | schedule | GiB | GiB under `stock` |\n|---|---:|---:|---|---|---:|---:|\n"


# Billions that are published with the models, of parameters and of those that a token meets.
PUBLISHED = {
    "deepseek_v3/671B": (671, 37),
    "mixtral/8x7B": (46.7, 12.9),
    "qwen3/30B-A3B": (30.5, 3.3),
    "qwen3/235B-A22B": (235, 22),
}


@cache
def predictions(path: Path) -> tuple[Prediction, Prediction]:
    """Under the file's own schedule, which is pretrain_gpt.py's where it has none, and under megatron-core's 1F1B.

    No iteration has more microbatches than two for every rank: longer ones take longer to plan and hold no more.
    """
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    unit = told["micro-batch-size"]
    replicas = told.get("expert-model-parallel-size", 1)  # of all but experts
    samples = min(told["global-batch-size"], 2 * told["pipeline-model-parallel-size"] * unit * replicas)
    flags = ["--config", str(path), "--global-batch-size", str(samples)]
    flags += ["--pipeline-schedule", told.get("pipeline-schedule", "zb-h1")]
    return predicted(flags, replicas), predicted(flags, replicas, changes=STOCK_1F1B)


def comment(path: Path) -> str:
    """The lines that say it in the file."""
    lines = [FIRST_LINE]
    for prediction in reversed(predictions(path)):
        misfit = ", which does not fit" if prediction.fullest.total > GPU else ""
        numbers = " ".join(f"{rank.total / GIB:.1f}" for rank in prediction.ranks)
        text = f"{prediction.args.pipeline.schedule}{misfit}: {numbers}"
        lines += textwrap.wrap(text, 120, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join(lines) + "\n"


def said(text: str) -> str:
    """These lines as they stand in a file."""
    found = re.search(rf"^{re.escape(FIRST_LINE)}\n(#   .*\n)+", text, re.M)
    return found[0] if found else ""


def row(path: Path) -> str:
    """A file as configs/README.md lists it."""
    own, stock = predictions(path)
    told, args = report(own), own.args
    values = {"--vocab-parallel": args.vocabulary.spread, "--offload": args.offloading.mode}
    extras = [f"`{flag} {value}`" for flag, value in values.items() if value]
    size = [f"{one.fullest.total / GIB:.1f}" + (", too much" if one.fullest.total > GPU else "") for one in (own, stock)]
    gpus, experts = told["pp"] * told["tp"] * told["dp"], args.expert_model_parallel_size
    layout = f"{told['pp']} x {told['tp']}" + (f", EP {experts}" if experts > 1 else "")
    schedule = ", ".join([f"`{args.pipeline.schedule}`", *extras])
    name = path.relative_to(ROOT / "configs")
    return f"| [{name}]({name}) | {told['parameters'] / 1e9:.3g} | {gpus} | {layout} | {schedule} | {size[0]} | {size[1]} |\n"


def listed() -> list[str]:
    """The rows of the table of files in configs/README.md."""
    rows = DOCUMENT.read_text(encoding="utf-8").partition(HEAD)[2].splitlines(keepends=True)
    return list(takewhile(lambda line: line.startswith("|"), rows))


# The smaller ones of those that copy to host memory, or that spread the vocabulary, are planned first.
_LARGE = dict.fromkeys(("18.1B", "42.9B", "66.6B", "83.8B"), whole)
_LARGE |= dict.fromkeys(("30B", "21B", "16B", "10.5B", "30B-A3B"), rest)


@pytest.mark.parametrize(
    "path", [_LARGE.get(path.stem, pytest.param)(path, id=str(path.relative_to(ROOT / "configs"))) for path in FILES]
)
def test_a_file_says_what_is_predicted(path: Path) -> None:
    """And its model has the size that its name promises."""
    own, _ = predictions(path)
    text = path.read_text(encoding="utf-8")
    assert said(text) == comment(path)
    assert row(path) == listed()[FILES.index(path)]
    assert text.startswith("# ") and not own.args.data_path and not own.args.tokenizer_model
    if path.stem.endswith("B") and str(path.relative_to(ROOT / "configs").with_suffix("")) not in PUBLISHED:
        billions = 7.62 if path.parent.name == "qwen2" else float(path.stem.removesuffix("B"))
        assert report(own)["parameters"] / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items(), ids=str)
def test_experts_have_the_sizes_that_are_published(name: str, billions: tuple[float, float]) -> None:
    args = predictions(ROOT / "configs" / f"{name}.yaml")[0].args
    shape, tied = shape_of(args), not args.untie_embeddings_and_output_weights
    assert total_parameters(shape, tied) / 1e9 == pytest.approx(billions[0], rel=0.01)
    assert shape.experts is not None
    visited = replace(shape, experts=replace(shape.experts, count=shape.experts.topk, parallel=1))  # by a token
    assert total_parameters(visited, tied) / 1e9 == pytest.approx(billions[1], rel=0.03)


def test_the_document_has_all_of_them() -> None:
    assert len(listed()) == len(FILES), "and test_a_file_says_what_is_predicted has every row, in their order"


@pytest.mark.rest
@pytest.mark.parametrize("name", ["tiny_experts", "tiny_vocabulary"])
def test_tiny_models_train(pool: Pool, data: str, name: str, tmp_path: Path) -> None:
    """``tiny.yaml`` itself is trained by others."""
    metrics = tmp_path / "metrics.jsonl"
    flags = f"--config {ROOT}/configs/{name}.yaml {data} --train-iters 2 --eval-iters 0 --metrics {metrics}"
    pool.run(4, train, f"{flags} --micro-batch-size 1 --global-batch-size 4")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]


def train(flags: str) -> None:
    """Train on this rank of the pool."""
    schedules.restore()
    args, tokenizer, pipeline = program.prepare(flags.split(), 4)
    program.run(args, tokenizer, pipeline, guard=lambda *_, **__: nullcontext())


def _write() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(said(text) or "# memory\n", comment(path), 1), encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    text = re.sub(rf"^{re.escape(HEAD)}(?:\|.*\n)+", HEAD + "".join(map(row, FILES)), text, flags=re.M)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _write()
