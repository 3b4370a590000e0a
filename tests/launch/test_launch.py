"""``mpipe launch``: scripts of Megatron-LM's under our schedules.

Those with a real checkout of Megatron-LM run where MEGATRON_LM names one, with what its scripts import (six, regex, pydantic,
triton); the others with a stand-in that has the functions that our patches look for (stand_in/).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
from launch import launched
from megatron.core import dist_checkpointing
from megatron.pipeline.patches.distrib_optimizer import SavedWrongError
from packaging.version import Version
from pool import Pool, forked, free_port
from releases import reduces_experts_wrong

from megatron.pipeline import patches
from megatron.pipeline.cli import main
from megatron.pipeline.dist import processes
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flags import add_new_flags
from megatron.pipeline.flags.support import FEATURES
from megatron.pipeline.flags.validation_experts import check_overlap
from megatron.pipeline.launch import script
from megatron.pipeline.launch.run import Run
from megatron.pipeline.launch.versions import Versions, version_in
from megatron.pipeline.model import te_linear
from megatron.pipeline.runtime.pipeline import Pipeline

STAND_IN = Path(__file__).parent / "stand_in" / "pretrain_gpt.py"
OWN = Path(__file__).parents[2] / "pretrain_gpt.py"
CHECKOUT = os.environ.get("MEGATRON_LM")
UPSTREAM = Path(CHECKOUT or "nowhere") / "pretrain_gpt.py"
needs_upstream = pytest.mark.skipif(CHECKOUT is None, reason="MEGATRON_LM is not set: it names a checkout of Megatron-LM")
SIZES = (
    "--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 2 "
    "--global-batch-size 16 --lr 1e-2 --vocab-size 61 --attention-dropout 0 --hidden-dropout 0 "
)
ON_UPSTREAM = (
    "--tokenizer-type NullTokenizer --mock-data --num-workers 0 --eval-iters 0 --eval-interval 100 --clip-grad 0 --train-iters 5 "
)
SIZES_OF_RANKS = {"num_experts": None, "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": None}
DISTRIBUTED = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"

Steps = list[tuple[float, float]]


def as_read(**given: object) -> Namespace:
    """What a launched script's parser leaves of no flags of ours, then ``given``."""
    parser = ArgumentParser(allow_abbrev=False)
    add_new_flags(parser)
    return Namespace(**vars(parser.parse_args([])) | given)


def launch(directory: Path, script: Path, flags: str, ranks: int = 2, before: str = "") -> Steps:
    """Losses and gradient norms of a run that must end well."""
    codes, output, metrics = run(directory, script, flags, ranks, before)
    assert codes == [0] * ranks, output
    return metrics


def run(
    directory: Path, script: Path, flags: str, ranks: int, before: str = "", started: int | None = None
) -> tuple[list[int | None], str, Steps]:
    """Exit codes of the ranks that are started, by default all; what they printed; and losses and gradient norms."""
    directory.mkdir(parents=True, exist_ok=True)
    port, output, metrics = free_port(), directory / "output", directory / "metrics.jsonl"
    arguments = [*flags.split(), "--pipeline-model-parallel-size", "2", "--metrics", str(metrics)]
    function = launched.own if script == OWN else launched.rank
    if script != OWN:
        arguments = [*before.split(), str(script), *arguments]
    processes = [forked(function, number, ranks, port, output, arguments) for number in range(started or ranks)]
    for process in processes:
        process.join(timeout=120)
        process.kill()
        process.join()
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    steps = [(step["loss"], step["grad_norm"]) for step in map(json.loads, lines)]
    return [process.exitcode for process in processes], output.read_text(), steps


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """What the stand-in trains under megatron-core's own 1F1B."""
    return launch(tmp_path_factory.mktemp("stock"), STAND_IN, SIZES + "--train-iters 3")


@pytest.mark.parametrize(
    "flags",
    [
        "stock --num-virtual-stages-per-pipeline-rank 4",
        "zb-h1",
        "v-half",
        "interleaved --num-layers-per-virtual-pipeline-stage 2",
        "1f1b --num-layers-in-first-pipeline-stage 3",
        "v-auto --pipeline-costs profile --pipeline-trace {tmp_path}/trace --log-interval 1",
    ],
)
def test_losses_are_those_of_the_script_alone(tmp_path: Path, stock: Steps, flags: str) -> None:
    found = launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 3 --pipeline-schedule {flags.format(tmp_path=tmp_path)}")
    assert [loss for loss, _ in found] == [loss for loss, _ in stock]
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in stock], rel=1e-6)
    assert "--pipeline-trace" not in flags or (tmp_path / "trace" / "iteration_0000003.json").exists()


@pytest.mark.parametrize("schedule", ["stock", "zb-v"])
def test_a_rehearsal_has_the_losses_of_the_script_alone(tmp_path: Path, stock: Steps, schedule: str) -> None:
    rehearsal = f"--rehearse --rehearse-dir {tmp_path}/found"
    found = launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 5 --pipeline-schedule {schedule} {rehearsal}")
    assert len(found) == 5
    result = json.loads((tmp_path / "found" / "rehearsal.json").read_text())
    assert result["schedule"] == schedule
    assert result["iteration_seconds"] > 0
    assert found[0][0] == stock[0][0]


@pytest.mark.parametrize("flags", ["stock --num-virtual-stages-per-pipeline-rank 4", "zb-h1", "v-half"])
def test_a_model_that_is_built_from_a_configuration(tmp_path: Path, stock: Steps, flags: str) -> None:
    found = launch(tmp_path, STAND_IN.with_name("pretrain_built.py"), f"{SIZES} --train-iters 3 --pipeline-schedule {flags}")
    assert [loss for loss, _ in found] == [loss for loss, _ in stock]


@pytest.mark.parametrize("flags", ["zb-v --vocab-parallel 2", "seq-1f1b", "gis-h --offload full"])
def test_losses_agree_where_sums_are_reordered(tmp_path: Path, stock: Steps, flags: str) -> None:
    found = launch(tmp_path, STAND_IN, f"{SIZES} --train-iters 3 --pipeline-schedule {flags}")
    assert found == [pytest.approx(step, rel=1e-5) for step in stock]


@pytest.mark.whole
@pytest.mark.parametrize(
    "flags", ["--use-distributed-optimizer --overlap-grad-reduce", "--tensor-model-parallel-size 2", "--bf16"]
)
def test_layouts(tmp_path: Path, flags: str) -> None:
    flags = f"{SIZES} --train-iters 3 --untie-embeddings-and-output-weights {flags}"
    alone, placed = (
        launch(tmp_path / name, STAND_IN, f"{flags} --pipeline-schedule {name}", ranks=4) for name in ("stock", "zb-v")
    )
    assert [loss for loss, _ in placed] == [loss for loss, _ in alone]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("zb-v --post-validation", "--post-validation takes the optimizer's step within the next iteration"),
        ("zb-v --rehearse --rehearse-replicas fake", "--rehearse-replicas fake makes the world with ranks that are not there"),
        ("zb-v --rehearse --rehearse-park", "--rehearse-park moves the optimizer's state, which the training loop has"),
        ("zb-w", "unknown schedule 'zb-w'"),
        ("zb-h1 --position-embedding-type rope --hidden-size 36", "rotates pairs of channels, and a head has 9 (--kv-channels"),
        ("zb-v --num-layers 7 --num-layers-per-virtual-pipeline-stage 2", "is not a multiple of 2 pipeline ranks x 2 layers"),
        ("v-half --pipeline-memory-limit 12GiB", "needs --pipeline-costs with activations in bytes"),
        pytest.param(
            "zb-h1 --num-experts 2 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1",
            "would reduce the experts' gradients over the wrong ranks; give --expert-tensor-parallel-size 2",
            marks=reduces_experts_wrong,
        ),
        ("zb-h1 --config {tmp_path}/none.yaml", "none.yaml: No such file or directory"),
        ("zb-h1 --vocab-parallel 2 --use-mup", "--vocab-parallel 2 computes logits in shards, and --use-mup needs"),
    ],
)
def test_flags_are_refused_in_one_line_before_anything_starts(tmp_path: Path, flags: str, words: str) -> None:
    flags = f"{SIZES} --train-iters 3 --pipeline-schedule {flags.format(tmp_path=tmp_path)}"
    codes, output, _ = run(tmp_path, STAND_IN, flags, ranks=2, started=1)
    assert codes == [2], output
    assert [line for line in output.splitlines() if line.startswith("mpipe launch: ") and words in line], output
    assert "Traceback" not in output


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
        ("zb-h1", {"virtual_pipeline_model_parallel_size": 2}),
        ("zb-h1 --num-layers-in-first-pipeline-stage 3", {}),
        ("zb-h1 --vocab-parallel 1", {}),
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
        ("zb-h1", {}),
        ("interleaved --num-layers-per-virtual-pipeline-stage 2", {"virtual_pipeline_model_parallel_size": 2}),
        ("v-half --no-load-optim", {}),
        ("v-half --finetune", {}),
    ],
)
def test_state_by_bucket_is_loaded_where_it_can_be(
    pool: Pool, tmp_path: Path, stock: Steps, flags: str, saved: dict[str, object]
) -> None:
    """The stand-in itself loads nothing: it trains."""
    checkpoint = saved_by_bucket(pool, tmp_path / "saved", **saved)
    flags = f"{SIZES} --train-iters 3 --use-distributed-optimizer --load {checkpoint} --pipeline-schedule {flags}"
    assert [loss for loss, _ in launch(tmp_path, STAND_IN, flags)] == [loss for loss, _ in stock]


def test_models_that_place_their_own_layers_are_refused(tmp_path: Path) -> None:
    other = STAND_IN.with_name("pretrain_other.py")
    codes, output, _ = run(tmp_path, other, f"{SIZES} --train-iters 3 --pipeline-schedule zb-h1", ranks=2)
    assert codes == [2, 2], output
    [line] = {line for line in output.splitlines() if line.startswith("mpipe launch: ")}
    assert "megatron-core's GPTModel and its subclasses, and this script builds OtherModel" in line


@pytest.mark.parametrize(
    ("core", "training", "words"),
    [
        (
            "env/site-packages/megatron/core",
            "env/site-packages/megatron/training",
            "from pip, env/site-packages/megatron/training",
        ),
        ("Megatron-LM/megatron/core", "Megatron-LM/megatron/training", "of the checkout, Megatron-LM/megatron/training"),
        ("env/site-packages/megatron/core", "LM/megatron/training", "in env/site-packages/megatron/core, LM/megatron/training"),
    ],
)
def test_where_upstream_comes_from_is_said(core: str, training: str, words: str) -> None:
    assert Versions("0.19.2", Path(core), Path(training), None).in_words == f"megatron-core 0.19.2 {words}"


@reduces_experts_wrong
def test_under_stock_what_megatron_core_trains_wrongly_is_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    sizes = {"num_experts": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 1}
    run = Run(Versions("0.16.1", Path("core"), Path("training"), "0.16.1"))
    for parts in (1, 2, None):
        args = as_read(pipeline_schedule="stock", expert_tensor_parallel_size=parts, **sizes)
        run.validate(lambda given: given, args)
        assert ("WARNING: --expert-tensor-parallel-size 1" in capsys.readouterr().out) == (parts == 1)


def test_a_recipe_of_fp8_that_layer_plans_do_not_enter_is_refused() -> None:
    plans = "--overlap-moe-expert-parallel-comm --num-experts 2 --expert-model-parallel-size 2 --bf16 --num-layers 2"
    args = parse([*plans.split(), "--moe-token-dispatcher-type", "alltoall"])
    vars(args).update(fp8="e4m3", fp8_recipe="tensorwise")  # Megatron-LM's
    check_overlap(args)
    args.fp8_recipe = "delayed"
    with pytest.raises(ValueError, match="--fp8-recipe delayed enters it once: give another recipe"):
        check_overlap(args)
    vars(args).update(fp8=None, fp4="e2m1")
    with pytest.raises(ValueError, match="do not enter FP4 and would train in --bf16: give --fp8-format, or leave --fp4-form"):
        check_overlap(args)


def test_what_is_untested_is_warned_of_and_what_would_be_ignored_is_refused() -> None:
    from megatron.pipeline.launch.check import check_flags, untested

    given = {"pipeline_schedule": "zb-h1", "optimizer": "muon", "fp8": "hybrid", "sft": False} | SIZES_OF_RANKS
    warned = untested(as_read(**given))
    assert len(warned) == 1
    assert warned[0].startswith(
        "WARNING: not tested with --pipeline-schedule zb-h1: FP8, optimizers: Muon, Lion, SOAP (mpipe sup"
    )
    assert untested(as_read(**given | {"pipeline_schedule": "stock"})) == []
    with pytest.raises(
        ValueError, match=r"^--microbatch-group-size-per-virtual-pipeline-stage belongs to megatron-core's own in"
    ):
        check_flags(as_read(**given, microbatch_group_size_per_vp_stage=2))


@pytest.mark.parametrize(
    ("flag", "becomes", "words"),
    [
        ("external_cuda_graph", {"cuda_graph_impl": "transformer_engine"}, "--external-cuda-graph (CUDA graphs) relies on"),
        ("tensor_parallel_num_weight_shards", {"gtp_weight_remat_size": 2}, "--tensor-parallel-num-weight-shards shards"),
        ("x", {"expert_gtp_weight_remat_size": 2}, "--expert-tensor-parallel-num-weight-shards shards"),
    ],
)
def test_what_upstream_makes_of_a_flag_is_refused_as_well(
    capsys: pytest.CaptureFixture[str], flag: str, becomes: dict[str, object], words: str
) -> None:
    sizes = SIZES_OF_RANKS | {"use_distributed_optimizer": False, "pipeline_model_parallel_size": 2}
    chunks = dict.fromkeys(("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"))
    chunks |= {"pipeline_model_parallel_layout": None}
    run = Run(Versions("0.19.2", Path("core"), Path("training"), "0.19.2"))
    args = as_read(pipeline_schedule="zb-h1", save=None, **{flag: 2}, **sizes, **chunks)
    with pytest.raises(SystemExit):
        run.validate(lambda given: given.__dict__.update(becomes), args)
    assert f"mpipe launch: {words}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, None),
        ({"hidden_dropout": 0.1}, "draw other dropout masks: give --att"),
        ({"moe_input_jitter_eps": 0.1}, "other jitter"),
    ],
)
def test_what_is_drawn_at_random_needs_forwards_that_run_once_and_whole(flags: dict[str, float], words: str | None) -> None:
    from megatron.pipeline.launch.check import check_plan

    args = {"seq_length": 16, "sequence_parallel": False, "context_parallel_size": 1, "transformer_impl": "local"}
    given = Namespace(**args | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | flags)
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_plan(given, cast("Pipeline", Namespace(splits=2, name="seq-1f1b")), [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp_comm_overlap": True}, "--tp-comm-overlap leaves inputs .* take --pipeline-schedule stock"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2 .* take --pipeline-schedule stock"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp .* take --pipeline-schedule stock"),
        ({"cuda_graph_impl": "transformer_engine"}, r"--cuda-graph-impl \(CUDA graphs\) .* take --pipeline-schedule stock"),
        ({"external_cuda_graph": True}, r"--external-cuda-graph \(CUDA graphs\) .* take --pipeline-schedule stock"),
        ({"fp8": "hybrid", "offload": "full"}, "^--offload with FP8: .* recompute activations"),
        (
            {"fp4": "e2m1"},
            r"--fp4-format is not tested with delayed weight gradients \(--fp8-format is\): leave it out, or",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_output_proj": True, "vocab_parallel": "2"},
            "--fp8-output-proj computes the output layer in FP8, which is tested neither .* nor with --vocab-parallel: leave",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "use_distributed_optimizer": True},
            "^--fp8-param-gather with --use-distributed-optimizer: .* leave --fp8-param-gather out, or take --pipeline-sch",
        ),
        ({"fp8": "e4m3", "offload_profile": True}, "^--pipeline-costs profile and --offload-profile with FP8"),
        (
            {"fp8": "e4m3", "transformer_impl": "local"},
            "^--fp8-format e4m3 with --transformer-impl local: .* give --transformer-impl transformer_engine",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "rowwise"},
            "^--fp8-recipe rowwise: .* not tested .* give --fp8-recipe delayed or tensorwise or mxfp8 or blockwise, or ",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "custom"},
            "^--fp8-recipe custom: .* lose the weight gradients .* give --fp8-recipe delayed or tensorwise",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True},
            "^--reuse-grad-buf-for-mxfp8-param-ag gathers weights into the memory of gradients, .* leave it out",
        ),
    ],
)
def test_what_transformer_engine_does_only_under_its_own_order_is_refused(
    flags: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.pipeline.flags.validation import check_new_flags
    from megatron.pipeline.launch.check import check_flags

    monkeypatch.setattr(te_linear, "get_te_version", lambda: Version(te_linear.OLDEST))
    refused = as_read(**SIZES_OF_RANKS | {"pipeline_schedule": "zb-h1", "transformer_impl": "transformer_engine"} | flags)
    with pytest.raises(ValueError, match=words):
        check_flags(refused)
    if words.startswith("^"):  # numbers in FP8: the trainer's own flags are checked alike
        with pytest.raises(ValueError, match=words):
            check_new_flags(refused)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise"])
def test_recipes_of_fp8_are_accepted_but_one_where_forwards_run_again(recipe: str) -> None:
    from megatron.pipeline.flags.validation_quantized import check_quantized
    from megatron.pipeline.launch.check import check_plan

    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": True, "transformer_impl": "transformer_engine"}
    args = as_read(pipeline_schedule="zb-h1", hidden_dropout=0.0, attention_dropout=0.0, **fp8)
    check_quantized(args)
    words = "^--fp8-recipe delayed with a schedule that runs forwards again .* give --fp8-recipe tensorwise"
    for again in (False, True):
        plan = Namespace(schedule=Namespace(reruns=again))
        pipeline = cast("Pipeline", Namespace(splits=1, name="zb-h1", plan=lambda _, plan=plan: plan))
        with pytest.raises(ValueError, match=words) if again and recipe == "delayed" else nullcontext():
            check_plan(args, pipeline, [4])


def test_a_yaml_file_of_megatron_lm_is_refused_before_it_replaces_our_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    parser = ArgumentParser(allow_abbrev=False)
    parser.add_argument("--yaml-cfg")
    Run(Versions("0.16.1", Path("core"), Path("training"), "0.16.1")).add_flags(parser)
    assert parser.parse_args([]).yaml_cfg is None
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--yaml-cfg", "flags.yaml"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "mpipe launch: --yaml-cfg replaces all flags, ours too: give flags, or a --config file of flags\n"
    )


@needs_upstream
@pytest.mark.slow
def test_features_are_known_by_the_names_that_upstreams_parser_gives_them() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from argparse import ArgumentParser\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "print(*{action.dest for action in add_megatron_arguments(ArgumentParser())._actions})"
    )
    command = [sys.executable, "-c", code, str(UPSTREAM.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    names = set(done.stdout.splitlines()[-1].split())
    unknown = {feature.title for feature in FEATURES if not names & set(feature.names)}
    # Of one release or another: gone from 0.19, or new in 0.18 or 0.19.
    assert unknown <= {"legacy models", "paged stash of experts", "weights gathered again", "batch size by steps"}


def test_a_config_file_supplies_flags_of_both_kinds(tmp_path: Path, stock: Steps) -> None:
    config = tmp_path / "tiny.yaml"
    config.write_text("pipeline-schedule: zb-h2\ntrain-iters: 9\nlr: 1e-2\n")
    sizes = SIZES.replace("--lr 1e-2", "")
    assert launch(tmp_path, STAND_IN, f"{sizes} --config {config} --train-iters 3") == stock


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which script?"),
        (["nowhere/pretrain_gpt.py"], "there is no script nowhere/pretrain_gpt.py"),
        (["--core", "mine", str(STAND_IN)], "invalid choice: 'mine'"),
    ],
)
def test_no_script(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["launch", *arguments])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert words in capsys.readouterr().err


def test_a_state_that_was_saved_wrong_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise SavedWrongError("the state is not that of its weights")

    monkeypatch.setattr(script, "prepare", lambda *_: load)
    assert main(["launch", str(STAND_IN)]) == 2
    assert capsys.readouterr().err == "mpipe: launch: the state is not that of its weights\n"


def test_torchruns_options_are_for_whom_torchrun_has_not_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    monkeypatch.setenv("RANK", "3")
    assert main(["launch", "--nproc-per-node", "4", str(STAND_IN)]) == 2
    assert "which has started this process already (RANK is 3)" in capsys.readouterr().err
    assert slept == [10], "until then torchrun has ended this rank, if rank 0 ends with the same error"


def test_versions_that_differ_are_named(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 17\nPATCH = 1\nPRE_RELEASE = 'rc2'\n")
    assert version_in(tmp_path / "core") == "0.17.1rc2"
    assert version_in(tmp_path) is None
    different = Versions("0.16.1", Path("/pip/core"), tmp_path / "training", "0.17.1rc2").difference
    assert different and "training belongs to megatron-core 0.17.1rc2, and 0.16.1 runs: take the checkout's own" in different
    assert Versions("0.16.1", tmp_path / "core", tmp_path / "training", "0.16.0").difference is None


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


@needs_upstream
@pytest.mark.slow
def test_upstreams_own_script(tmp_path: Path) -> None:
    # Upstream draws weights by rank, so a placement starts from a checkpoint.
    checkpoint = f"{SIZES} {ON_UPSTREAM} {DISTRIBUTED} --{{}} {tmp_path}/checkpoint "
    launch(tmp_path / "start", UPSTREAM, checkpoint.format("save") + "--save-interval 1 --exit-interval 1", before="--core pip")
    found = {
        name: launch(tmp_path / name, UPSTREAM, f"{checkpoint.format('load')} --pipeline-schedule {name}", before="--core pip")
        for name in ("stock", "zb-h1", "v-half")
    }
    assert len(found["stock"]) == 4  # and one before the checkpoint
    for steps in found.values():
        assert [loss for loss, _ in steps] == [loss for loss, _ in found["stock"]]
        assert [norm for _, norm in steps] == pytest.approx([norm for _, norm in found["stock"]], rel=1e-6)


@needs_upstream
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "equal"), [("zb-h1", "stock"), ("zb-v", "zb-v")])
def test_layer_plans_of_upstreams_own_script(tmp_path: Path, schedule: str, equal: str) -> None:
    experts = "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --disable-bias-linear --bf16"
    overlap = "--overlap-moe-expert-parallel-comm"
    found = [
        launch(tmp_path / f"{name}{flag}", UPSTREAM, flags, ranks=4, before="--core pip")
        for name, flag in ((equal, ""), (schedule, overlap))
        for flags in [f"{SIZES} {ON_UPSTREAM} {experts} --pipeline-schedule {name} {flag}"]
    ]
    assert found[0] == found[1] and len(found[0]) == 5


@needs_upstream
@pytest.mark.slow
def test_checkpoints_of_upstreams_own_script_and_of_ours_go_on_in_the_other(tmp_path: Path) -> None:
    flags = f"{SIZES} {ON_UPSTREAM} "
    theirs, ours = f"--save {tmp_path}/theirs --save-interval 1 --exit-interval 1", f"--save {tmp_path}/ours --exit-interval 3"
    launch(tmp_path / "start", UPSTREAM, flags + theirs, before="--core pip")
    whole = launch(tmp_path / "whole", UPSTREAM, f"{flags} --load {tmp_path}/theirs", before="--core pip")
    here = launch(tmp_path / "here", OWN, f"{flags} --pipeline-schedule v-half --load {tmp_path}/theirs {ours}")
    back = f"{flags} --pipeline-schedule zb-h1 --load {tmp_path}/ours"
    codes, output, there = run(tmp_path / "there", UPSTREAM, back, 2, before="--core pip")
    assert codes == [0, 0], output
    assert [loss for loss, _ in (*here, *there)] == [loss for loss, _ in whole] and len(whole) == 4
    assert "checkpoint version 3.0" in output
    for warning in ("could not find arguments", "fixed query-key-values ordering", "not found in checkpoint args"):
        assert warning not in output


@needs_upstream
@pytest.mark.slow
def test_upstreams_own_script_with_its_own_core(tmp_path: Path) -> None:
    pytest.importorskip("pybind11", reason="a checkout compiles its datasets with pybind11")
    command = [sys.executable, "-m", "megatron.pipeline.cli", "launch", "--standalone", "--nproc-per-node", "2", str(UPSTREAM)]
    # In a virtual environment the python3-config that make finds may be another Python's.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MAKEFLAGS": "-e", "LIBEXT": sysconfig.get_config_var("EXT_SUFFIX")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    losses = []
    for schedule in ("stock", "zb-h1"):
        metrics = tmp_path / f"{schedule}.jsonl"
        flags = f"{SIZES} {ON_UPSTREAM} --pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --metrics {metrics}"
        done = subprocess.run(
            [*command, *flags.split()], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"of the checkout, {UPSTREAM.parent}" in done.stdout
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert losses[0] == losses[1] and len(losses[0]) == 5
