"""Every file in ``configs/`` loads, can be planned, and says what memory its ranks need; docs/memory.md lists them all.

``python tests/test_configs.py`` writes what is predicted now into the files and the document.
"""

from __future__ import annotations

import json
import re
import textwrap
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import yaml
from pool import Pool

from megatron.pipeline.cli.memory import STOCK_1F1B, Prediction, predicted, report
from megatron.pipeline.tune.memory import GIB

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs").rglob("*.yaml"), key=lambda path: (path.parent.name, len(path.name), path.name))
DOCUMENT = ROOT / "docs" / "memory.md"
GPU = 80 * GIB
FIRST_LINE = "# Predicted GiB of every pipeline rank (mpipe memory), for GPUs of 80:"
HEAD = "| file | billion parameters | GPUs | PP x TP | schedule | GiB | GiB under `stock` |\n|---|---:|---:|---|---|---:|---:|\n"

# GB of the fullest GPU under stock, interleaved with so many chunks, ZB-1p and ZB-2p (arXiv 2401.10241, table 4). Attention is
# not fused there. ZB-2p may hold 16 microbatches, of which zb-h2 takes 15.
ZERO_BUBBLE = {"1.5B": (3, 30, 40, 32, 59), "6.2B": (4, 39, 48, 42, 70)}
# GiB of the fullest GPU with 32k, 64k, 128k and 256k rows, by --seq-length and --vocab-parallel (arXiv 2411.05288, table 5).
VOCABULARY = {
    (2048, "off"): (14.86, 16.32, 19.25, 25.64),
    (2048, "1"): (15.63, 16.02, 16.84, 18.59),
    (2048, "2"): (14.83, 15.23, 16.04, 17.78),
    (4096, "off"): (21.39, 22.85, 25.78, 31.64),
    (4096, "1"): (24.04, 24.47, 25.41, 27.34),
    (4096, "2"): (22.44, 22.89, 23.80, 25.73),
}


@cache
def predictions(path: Path) -> tuple[Prediction, Prediction]:
    """Under the file's own schedule, and under megatron-core's 1F1B.

    No iteration has more microbatches than two for every rank: longer ones take longer to plan and hold no more.
    """
    told = yaml.safe_load(path.read_text(encoding="utf-8"))
    unit = told["micro-batch-size"]
    samples = min(told["global-batch-size"], 2 * told["pipeline-model-parallel-size"] * unit)
    flags = ["--config", str(path), "--global-batch-size", str(samples)]
    return predicted(flags), predicted(flags, changes=STOCK_1F1B)


def comment(path: Path) -> str:
    """The lines that say it in the file."""
    lines = [FIRST_LINE]
    for prediction in reversed(predictions(path)):
        misfit = ", which does not fit" if prediction.fullest.total > GPU else ""
        numbers = " ".join(f"{rank.total / GIB:.1f}" for rank in prediction.ranks)
        text = f"{prediction.args.pipeline_schedule}{misfit}: {numbers}"
        lines += textwrap.wrap(text, 120, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join(lines) + "\n"


def said(text: str) -> str:
    """These lines as they stand in a file."""
    found = re.search(rf"^{re.escape(FIRST_LINE)}\n(#   .*\n)+", text, re.M)
    return found[0] if found else ""


def table() -> str:
    """All files, as docs/memory.md lists them."""
    rows = []
    for path in FILES:
        own, stock = predictions(path)
        told, args = report(own), own.args
        values = {"--vocab-parallel": args.vocab_parallel, "--offload": args.offload}
        extras = [f"`{flag} {value}`" for flag, value in values.items() if value != "off"]
        size = [f"{one.fullest.total / GIB:.1f}" + (", too much" if one.fullest.total > GPU else "") for one in (own, stock)]
        gpus = told["pp"] * told["tp"]
        schedule = ", ".join([f"`{args.pipeline_schedule}`", *extras])
        name = path.relative_to(ROOT)
        rows.append(
            f"| [{name.relative_to('configs')}](../{name}) | {told['parameters'] / 1e9:.3g} | {gpus} "
            f"| {told['pp']} x {told['tp']} | {schedule} | {size[0]} | {size[1]} |\n"
        )
    return HEAD + "".join(rows)


@cache
def published() -> str:
    """What was published, beside what is predicted without the constant for CUDA and NCCL: the tables of docs/memory.md."""
    lines = ["| Zero Bubble, GB, predicted / published | 1F1B | interleaved | ZB-1p | ZB-2p |\n|---|---:|---:|---:|---:|\n"]
    for name, (chunks, *figures) in ZERO_BUBBLE.items():
        flags = ["--config", str(ROOT / f"configs/zero_bubble/{name}.yaml"), "--transformer-impl", "local", "--pipeline-schedule"]
        wanted = (["stock"], ["stock", "--num-virtual-stages-per-pipeline-rank", str(chunks)], ["zb-h1"], ["zb-h2"])
        sizes = [max(rank.allocated for rank in predicted([*flags, *more]).ranks) / 1e9 for more in wanted]
        cells = (f"{size:.1f} / {figure} ({size / figure - 1:+.0%})" for size, figure in zip(sizes, figures, strict=True))
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    lines.append(
        "\n| Vocabulary Parallelism 4B, GiB, predicted / published | 32k | 64k | 128k | 256k |\n|---|---:|---:|---:|---:|\n"
    )
    for (seq, spread), peaks in VOCABULARY.items():
        flags = ["--config", str(ROOT / "configs/vocabulary_parallelism/4B.yaml"), "--global-batch-size", "16"]
        flags += ["--seq-length", str(seq), "--vocab-parallel", spread, "--vocab-size"]
        sizes = [
            max(rank.allocated for rank in predicted([*flags, str(rows * 1024 - 1)]).ranks) / GIB for rows in (32, 64, 128, 256)
        ]
        cells = (f"{size:.2f} / {figure:.2f} ({size / figure - 1:+.1%})" for size, figure in zip(sizes, peaks, strict=True))
        lines.append(f"| {seq}, `--vocab-parallel {spread}` | {' | '.join(cells)} |\n")
    return "".join(lines)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT / "configs")))
def test_a_file_says_what_is_predicted(path: Path) -> None:
    """And its model has the size that its name promises."""
    own, _ = predictions(path)
    text = path.read_text(encoding="utf-8")
    assert said(text) == comment(path)
    assert text.startswith("# ") and not own.args.data_path and not own.args.tokenizer_model
    if path.stem.endswith("B"):
        billions = 7.62 if path.parent.name == "qwen2" else float(path.stem.removesuffix("B"))
        assert report(own)["parameters"] / 1e9 == pytest.approx(billions, rel=0.03)


def test_what_was_published_is_predicted() -> None:
    """Within 4 %, and ZB-2p within 8 %: it holds a microbatch more than zb-h2."""
    deviations = [abs(int(float(each))) for each in re.findall(r"\(([+-][\d.]+)%\)", published())]
    assert len(deviations) == 2 * 4 + 6 * 4
    assert max(deviations) <= 7 and sum(each > 3 for each in deviations) <= 2


def test_the_document_has_all_of_it() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table() in text and published() in text


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
    from megatron.pipeline import patches

    patches.install()
    from megatron.pipeline.patches import schedules

    from megatron.pipeline.training import program

    schedules.restore()
    args, tokenizer, pipeline = program.prepare(flags.split(), 4)
    program.run(args, tokenizer, pipeline, guard=lambda *_, **__: nullcontext())


def _write() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(said(text) or "# memory\n", comment(path), 1), encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    for first, now in ((HEAD.splitlines()[0], table()), (published().splitlines()[0], published())):
        end = r"(?:\|.*\n|\n(?=\| Vocab))+" if now is published() else r"(?:\|.*\n)+"
        text = re.sub(rf"^{re.escape(first)}\n{end}", now, text, flags=re.M)
    DOCUMENT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _write()
