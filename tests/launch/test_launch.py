"""``mpipe launch``: a script of Megatron-LM's under our schedules. A stand-in for it has the functions that our patches look for
(stand_in/); test_front_door.py has the real one, test_checks.py what is checked without any script."""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.launched import OWN, SIZES, STAND_IN, Steps, launch, run, written_board
from marked import rest
from megatron.core import dist_checkpointing
from pool import Pool
from releases import reduces_experts_wrong

from megatron.pipeline import patches
from megatron.pipeline.launch.script import prepare
from megatron.pipeline.session import save_lock


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """What the stand-in trains under megatron-core's own 1F1B."""
    return launch(tmp_path_factory.mktemp("stock"), STAND_IN, SIZES + "--train-iters 3")


@pytest.mark.parametrize(
    "flags",
    [
        "v-half",
        rest("1f1b --num-layers-in-first-pipeline-stage 5"),
        "zb-v --num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Ett|(t|)*6L",
        "v-auto --pipeline-costs profile --pipeline-trace {tmp_path}/trace --log-interval 1",
        "zb-auto --pipeline-plan every-batch --log-interval 3",
    ],
)
def test_losses_are_those_of_the_script_alone(tmp_path: Path, stock: Steps, flags: str) -> None:
    flags = f"--pipeline-model-parallel-size 4 --pipeline-schedule {flags.format(tmp_path=tmp_path)}"
    found = launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 3 {flags}", ranks=4)
    assert [loss for loss, _ in found] == [loss for loss, _ in stock]
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in stock], rel=1e-6)
    assert "--pipeline-trace" not in flags or (tmp_path / "trace" / "iteration_0000003.json").exists()
    gain = r"^ every batch: of 3 iterations [01] ran in an order .*, 2 lengths were not known ahead, 0 had"
    assert "every-batch" not in flags or re.search(gain, (tmp_path / "output").read_text(), re.M)


@pytest.mark.parametrize("schedule", ["zb-v", rest("stock")])
def test_our_values_are_where_megatron_lm_writes_its_own(tmp_path: Path, schedule: str) -> None:
    boards = f"--tensorboard-dir {tmp_path}/board --wandb-project {tmp_path}/wandb --tensorboard-log-interval 2"
    launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 4 --pipeline-schedule {schedule} {boards}")
    scalars = written_board(tmp_path / "board").Scalars
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1::2]
    logged = [json.loads(line) for line in (tmp_path / "wandb").read_text().splitlines()]
    assert [one["at"] for one in logged] == [2, 4]
    for name in ("tokens-per-second", *(() if schedule == "stock" else ("bubble-rate", "peak-activation-bytes"))):
        points = [(point.step, point.value) for point in scalars(name)]
        written = [one[name.replace("-", "_")] for one in metrics]
        whole = [max(value) if isinstance(value, list) else value for value in written]
        assert points == [(step, pytest.approx(value)) for step, value in zip((2, 4), whole, strict=True)]
        assert [one[name] for one in logged] == whole


@pytest.mark.parametrize(
    ("layers", "flags"),
    [("adapted", "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"), ("whole", "")],
)
def test_what_a_script_leaves_to_train_is_equal_to_stocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: str, flags: str
) -> None:
    """The first layer's input needs no gradient, and two ranks have no weight that trains."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(STAND_IN.parent), str(OWN.parent / "examples")])
    monkeypatch.setenv("LAYERS", layers)
    given = f"{SIZES} --train-iters 3 --pipeline-model-parallel-size 4 {flags}"
    stock, line, on_a_v = (
        launch(tmp_path / name, STAND_IN.with_name("pretrain_adapters.py"), f"{given} --pipeline-schedule {name}", ranks=4)
        for name in ("stock", "zb-h1", "zb-v")
    )
    assert line == stock and len({loss for loss, _ in stock}) == 3
    assert [loss for loss, _ in on_a_v] == [loss for loss, _ in stock]
    assert [norm for _, norm in on_a_v] == pytest.approx([norm for _, norm in stock], rel=1e-6)


def test_packing_loses_no_sequence(tmp_path: Path) -> None:
    flags = f"{SIZES} --train-iters 2 --micro-batch-size 1 --sft --calculate-per-token-loss --position-embedding-type none "
    given = launch(tmp_path / "stock", STAND_IN, flags, ranks=4)
    ours = "--pipeline-schedule zb-v --pipeline-packing --pipeline-plan every-batch"
    packed = launch(tmp_path / "ours", STAND_IN, flags + ours, ranks=4)
    assert [loss for loss, _ in packed] == pytest.approx([loss for loss, _ in given], rel=1e-5)


@pytest.fixture(scope="module")
def on_one_stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    """Losses without a pipeline, of flags that end with the tensor-parallel size."""

    @functools.cache
    def losses(flags: str) -> list[float]:
        flags = f"{SIZES} --train-iters 3 --pipeline-model-parallel-size 1 {flags}"
        steps = launch(tmp_path_factory.mktemp("one"), STAND_IN, flags, ranks=int(flags[-1]))
        return [loss for loss, _ in steps]

    return losses


@pytest.mark.parametrize(
    ("flags", "variable", "found"),
    [
        ("--bf16", {}, "expandable_segments:True"),
        ("--bf16", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ("--bf16", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, None),
        ("--use-nccl-ub", {}, None),
        ("--cuda-graph-impl local", {}, None),
        ("--config {tmp_path}/graphs.yaml --bf16", {}, None),
        ("--config={tmp_path}/graphs.yaml", {}, None),
        ("--config {tmp_path}/none.yaml", {}, "expandable_segments:True"),
    ],
)
def test_segments_grow_unless_a_user_or_a_flag_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, variable: dict[str, str], found: str | None
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # both are undone behind the test
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pretrain.py").touch()
    (tmp_path / "graphs.yaml").write_text("bf16: true\ncuda_graph_impl: local\n")
    prepare(["--nproc-per-node", "2"], [str(tmp_path / "pretrain.py"), *flags.format(tmp_path=tmp_path).split()])
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == found


UNTIED = "--untie-embeddings-and-output-weights"


@pytest.mark.parametrize(
    ("flags", "model", "tolerance"),
    [
        ("zb-v --pipeline-model-parallel-size 4", f"{UNTIED} --tensor-model-parallel-size 1", 0.0),
        rest("zb-v --pipeline-model-parallel-size 2", f"{UNTIED} --tensor-model-parallel-size 2", 0.0),
        rest("zb-v --pipeline-model-parallel-size 4 --vocab-parallel 2", "--tensor-model-parallel-size 1", 1e-5),
    ],
)
def test_attention_stays_within_documents_on_every_stage(
    tmp_path: Path, on_one_stage: Callable[[str], list[float]], flags: str, model: str, tolerance: float
) -> None:
    # Upstream's script reads data for the first and the last stage alone.
    within, across = on_one_stage(f"--reset-attention-mask {model}"), on_one_stage(model)
    steps = launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 3 --reset-attention-mask {model} --pipeline-schedule {flags}", 4)
    losses = [loss for loss, _ in steps]
    assert losses == pytest.approx(within, rel=tolerance, abs=0)
    assert losses != pytest.approx(across, rel=1e-3), "documents are too long to tell the masks apart"


def test_a_rehearsal_has_the_losses_of_the_script_alone(tmp_path: Path, stock: Steps) -> None:
    schedule = "zb-v"
    rehearsal = f"--rehearse --rehearse-dir {tmp_path}/found"
    found = launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 5 --pipeline-schedule {schedule} {rehearsal}")
    assert len(found) == 5
    result = json.loads((tmp_path / "found" / "rehearsal.json").read_text())
    assert result["schedule"] == schedule
    assert result["iteration_seconds"] > 0
    assert found[0][0] == stock[0][0]


def test_losses_agree_where_sums_are_reordered(tmp_path: Path, stock: Steps) -> None:
    flags = "zb-v --vocab-parallel 2"
    flags = f"{SIZES} --train-iters 3 --pipeline-model-parallel-size 4 --pipeline-schedule {flags}"
    assert launch(tmp_path, STAND_IN, flags, ranks=4) == [pytest.approx(step, rel=1e-5) for step in stock]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("zb-w", "unknown schedule 'zb-w'"),
        ("zb-v --num-layers 7 --num-layers-per-virtual-pipeline-stage 2", "is not a multiple of 2 pipeline ranks x 2 layers"),
        pytest.param(
            "zb-h1 --num-experts 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            "would reduce the experts' gradients over the wrong ranks: give --expert-tensor-parallel-size 2",
            marks=reduces_experts_wrong,
        ),
        ("zb-h1 --config {tmp_path}/none.yaml", "none.yaml: No such file or directory"),
    ],
)
def test_flags_are_refused_in_one_line_before_anything_starts(tmp_path: Path, flags: str, words: str) -> None:
    flags = f"{SIZES} --train-iters 3 --pipeline-schedule {flags.format(tmp_path=tmp_path)}"
    codes, output, _ = run(tmp_path, STAND_IN, flags, ranks=2, started=1)
    assert codes == [2], output
    assert [line for line in output.splitlines() if line.startswith("mpipe launch: ") and words in line], output
    assert "Traceback" not in output and " is on: " not in output


def saved_by_bucket(pool: Pool, directory: Path, **flags: object) -> Path:
    """A checkpoint as Megatron-LM writes it by default, as far as it is read before anything starts."""
    saved = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "num_layers": 8,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
    }
    pool.run(1, save_common, directory / "iter_0000003", {"args": Namespace(**saved | flags)})
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    return directory


def save_common(directory: Path, state: dict[str, object]) -> None:
    """Without any tensor; runs on a rank of the pool."""
    patches.install()
    directory.mkdir(parents=True)
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    dist_checkpointing.save(state, str(directory), ("torch_dist", 1), content_metadata=metadata)


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ("v-half", {}),
        ("v-half", {"virtual_pipeline_model_parallel_size": 2}),
        ("zb-h1 --num-layers-in-first-pipeline-stage 3", {}),
        ("zb-h1 --vocab-parallel 1", {}),
        ("zb-h1 --overlap-grad-reduce", {"overlap_grad_reduce": True}),
        ("stock", {"pipeline_schedule": "zb-v"}),
    ],
)
def test_state_by_bucket_of_another_placement_is_refused(
    pool: Pool, tmp_path: Path, flags: str, saved: dict[str, object]
) -> None:
    checkpoint = saved_by_bucket(pool, tmp_path / "saved", **saved)
    flags = f"{SIZES} --train-iters 3 --use-distributed-optimizer --load {checkpoint} --pipeline-schedule {flags}"
    codes, output, _ = run(tmp_path, STAND_IN, flags, ranks=2, started=1)
    assert codes == [2], output
    [line] = [line for line in output.splitlines() if line.startswith("mpipe launch: ")]
    assert f"{checkpoint}/iter_0000003 has the distributed optimizer's state by bucket (dp_reshardable)" in line
    assert "with --dist-ckpt-optim-fully-reshardable and --save" in line and "or give --no-load-optim" in line


@pytest.mark.parametrize(
    ("flags", "saved"),
    [
        ("interleaved --num-layers-per-virtual-pipeline-stage 2", {"virtual_pipeline_model_parallel_size": 2}),
        rest("v-half --no-load-optim", {}),
        ("v-half --finetune", {}),
    ],
)
def test_state_by_bucket_is_loaded_where_it_can_be(
    pool: Pool, tmp_path: Path, stock: Steps, flags: str, saved: dict[str, object]
) -> None:
    """The stand-in itself loads nothing: it trains."""
    checkpoint = saved_by_bucket(pool, tmp_path / "saved", **saved)
    flags = f"{SIZES} --train-iters 1 --use-distributed-optimizer --load {checkpoint} --pipeline-schedule {flags}"
    assert [loss for loss, _ in launch(tmp_path, STAND_IN, flags)] == [stock[0][0]]


def test_models_that_place_their_own_layers_are_refused(tmp_path: Path) -> None:
    other = STAND_IN.with_name("pretrain_other.py")
    codes, output, _ = run(tmp_path, other, f"{SIZES} --train-iters 3 --pipeline-schedule zb-h1", ranks=2)
    assert codes == [2, 2], output
    [line] = {line for line in output.splitlines() if line.startswith("mpipe launch: ")}
    assert "megatron-core's GPTModel and HybridModel and their subclasses, and this script builds OtherModel" in line


def test_a_config_file_supplies_flags_of_both_kinds(tmp_path: Path, stock: Steps) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text("pipeline-schedule: zb-h2\ntrain-iters: 9\nlr: 1e-2\n")
    sizes = SIZES.replace("--lr 1e-2", "")
    assert launch(tmp_path, STAND_IN, f"{sizes} --config {config} --train-iters 3") == stock


def test_a_checkout_whose_modules_are_missing_is_told_in_one_line(tmp_path: Path) -> None:
    for name, text in {
        "pretrain_gpt.py": "raise SystemExit('it must not run')",
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 12\nPATCH = 0\nPRE_RELEASE = ''\n",
        "megatron/training/__init__.py": "import megatron.core.models.retro_of_old",
        "megatron/legacy/fused_kernels/__init__.py": "def load(args): ...",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    codes, output, _ = run(tmp_path / "run", tmp_path / "pretrain_gpt.py", "", ranks=1, before="--core pip")
    assert codes == [2], output
    errors = [line for line in output.splitlines() if line.startswith("mpipe: launch: megatron.training cannot be imported")]
    assert len(errors) == 1 and "retro_of_old" in errors[0] and "belongs to megatron-core 0.12.0, and 0." in errors[0], output


@pytest.mark.parametrize("schedule", [rest("stock"), "zb-v"])
def test_a_second_run_that_saves_there_trains_nothing(tmp_path: Path, schedule: str) -> None:
    flags = f"{SIZES} --train-iters 2 --pipeline-schedule {schedule} --save {tmp_path}/saved --save-interval 1"
    (tmp_path / "saved").mkdir()
    save_lock.check(str(tmp_path / "saved"))
    codes, output, steps = run(tmp_path / "second", STAND_IN, flags, ranks=2)
    assert codes == [2, 2] and not steps, output
    assert output.count(f"mpipe launch: another run saves into {tmp_path}/saved: host ") == 2, output
    assert "Traceback" not in output
    save_lock.release(str(tmp_path / "saved"))
    assert len(launch(tmp_path / "alone", STAND_IN, flags)) == 2
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == [f"{iteration}_of_rank_{rank}.pt" for iteration in (1, 2) for rank in (0, 1)]
