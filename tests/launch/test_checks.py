"""What ``mpipe launch`` checks and says of flags before a script runs, and what Megatron-LM does only by itself."""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import pytest
from megatron.pipeline.patches import compat
from packaging.version import Version
from releases import reduces_experts_wrong

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.facts import cautions, of_flags
from megatron.pipeline.flags.flags import CHUNK_FLAGS
from megatron.pipeline.flags.settings import NEW, Settings, add_flags
from megatron.pipeline.flags.validation import of_new_flags
from megatron.pipeline.launch.ahead import follows_at_once
from megatron.pipeline.launch.check import check_flags, check_plan, untested
from megatron.pipeline.launch.run import Run
from megatron.pipeline.launch.versions import Versions
from megatron.pipeline.model import te_linear
from megatron.pipeline.planner.combinations.rows import FLAGS, MODELS, QUANTIZED, WRONG
from megatron.pipeline.runtime.pipeline import Pipeline

SIZES_OF_RANKS = {"num_experts": None, "tensor_model_parallel_size": 1, "expert_tensor_parallel_size": None}


def as_read(**given: object) -> Namespace:
    """What a launched script's parser leaves of no flags of ours, then ``given``."""
    parser = ArgumentParser(allow_abbrev=False)
    add_flags(parser, NEW)
    return Namespace(**vars(parser.parse_args([])) | given)


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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"sft": False}, "packs sequences of --sft, which is not given"),
        ({"sft": False, "dataloader_inter_document_masking": True}, None),
        ({"pipeline_schedule": "file:zb.json"}, "and --pipeline-schedule file:zb.json, a file, is for one"),
        ({}, None),
    ],
)
def test_packing_needs_packed_sequences_that_are_read_batch_by_batch(given: dict[str, object], words: str | None) -> None:
    flags = {"sft": True, "micro_batch_size": 1, "pipeline_schedule": "zb-v", "pipeline_packing": True} | given
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        of_flags(as_read(**flags)).refuse(FLAGS)


def test_a_recipe_of_fp8_that_layer_plans_do_not_enter_is_refused() -> None:
    plans = "--overlap-moe-expert-parallel-comm --num-experts 2 --expert-model-parallel-size 2 --bf16 --num-layers 2"
    args = parse([*plans.split(), "--moe-token-dispatcher-type", "alltoall"]) | {"fp8": "e4m3"}  # Megatron-LM's
    of_flags(args | {"fp8_recipe": "tensorwise"}).refuse(MODELS)
    with pytest.raises(ValueError, match="--fp8-recipe delayed enters it once: give another recipe"):
        of_flags(args | {"fp8_recipe": "delayed"}).refuse(MODELS)


def test_what_is_untested_is_warned_of_and_what_would_be_ignored_is_refused() -> None:

    given = {"pipeline_schedule": "zb-h1", "optimizer": "muon", "fp8": "hybrid", "sft": False} | SIZES_OF_RANKS
    warned = untested(as_read(**given))
    assert len(warned) == 1
    assert warned[0].startswith(
        "WARNING: not tested with --pipeline-schedule zb-h1: FP8, optimizers: Muon, Lion, SOAP (mpipe sup"
    )
    assert untested(as_read(**given | {"pipeline_schedule": "stock"})) == []
    with pytest.raises(ValueError, match=r"^--experimental-attention-variant dsa uses the weight of a linear without its forwar"):
        check_flags(as_read(**given, experimental_attention_variant="dsa"))


def test_what_does_not_go_with_steps_ahead_is_refused() -> None:
    given, words = {"optimizer": "muon"}, "--optimizer muon with --post-validation, which rolls back steps of adam and sgd: take"
    flags = {"pipeline_schedule": "zb-v", "optimizer": "adam"} | SIZES_OF_RANKS | given
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        check_flags(as_read(post_validation=True, **flags))


@pytest.mark.parametrize(
    ("given", "pauses"),
    [
        ({}, [100]),
        ({"save_interval": 4}, [100]),
        ({"save_interval": 4, "save": "there"}, [4, 8, 100]),
        ({"exit_interval": 9, "phase_transition_iterations": [5]}, [5, 9, 99, 100]),
        ({"save_wgrads_interval": 5}, [4, 9, 99, 100]),
        ({"iterations_to_skip": [6], "profile": True, "profile_step_start": 1, "profile_step_end": 3}, [1, 3, 5, 6, 100]),
    ],
)
def test_iterations_that_nothing_but_a_log_parts(given: dict[str, object], pauses: list[int]) -> None:
    args = Namespace(**{"train_iters": 100, "eval_interval": 1000, "save": None} | given)
    assert [done for done in (*range(1, 10), 98, 99, 100) if not follows_at_once(args, done)] == pauses


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"external_cuda_graph": True}, "--external-cuda-graph (CUDA graphs) relies on"),
        ({"tensor_parallel_num_weight_shards": 4}, "--tensor-parallel-num-weight-shards 4 shards parameters"),
        ({"expert_tensor_parallel_num_weight_shards": 4}, "--expert-tensor-parallel-num-weight-shards 4 shards parameters"),
        ({"tensor_parallel_num_weight_shards": 2, "expert_tensor_parallel_num_weight_shards": 2}, ""),  # the ranks there are
        ({}, ""),
    ],
)
def test_what_a_user_gives_is_refused_and_what_upstream_fills_in_is_not(
    capsys: pytest.CaptureFixture[str], given: dict[str, object], words: str
) -> None:
    sizes = {"use_distributed_optimizer": False, "overlap_grad_reduce": False, "pipeline_model_parallel_size": 2, "save": None}
    sizes |= SIZES_OF_RANKS | dict.fromkeys(CHUNK_FLAGS) | {"tensor_model_parallel_size": 2}
    filled_in: dict[str, object] = dict.fromkeys(
        ("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"), 2
    )
    filled_in |= {"gtp_weight_remat_size": 1, "expert_gtp_weight_remat_size": 1, "moe_load_factor": 2.0, "tp_comm_overlap": True}
    run = Run(Versions("0.19.2", Path("core"), Path("training"), "0.19.2"))
    with pytest.raises(SystemExit) if words else nullcontext():
        run.validate(lambda args: args.__dict__.update(filled_in), as_read(pipeline_schedule="zb-h1", **sizes | given))
    said = capsys.readouterr().err
    assert f"mpipe launch: {words}" in said if words else not said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, None),
        ({"hidden_dropout": 0.1}, "draw other dropout masks: give --att"),
        ({"moe_input_jitter_eps": 0.1}, "other jitter"),
        ({"moe_router_force_load_balancing": True}, "other logits"),
    ],
)
def test_what_is_drawn_at_random_needs_forwards_that_run_once_and_whole(flags: dict[str, float], words: str | None) -> None:

    args = {"seq_length": 16, "sequence_parallel": False, "context_parallel_size": 1, "transformer_impl": "local"}
    given = Namespace(**args | {"hidden_dropout": 0.0, "attention_dropout": 0.0} | flags)
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_plan(given, cast("Pipeline", Namespace(plans=Namespace(splits=2), name="seq-1f1b")), [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True, "use_distributed_optimizer": True},
            "^--fp8-param-gather with --fp8-recipe mxfp8: .* give --reuse-grad-buf-for-mxfp8-param-ag as well, or leave",
        ),
        (
            {"fp8": "e4m3", "transformer_impl": "local"},
            "^--fp8-format e4m3 with --transformer-impl local: .* give --transformer-impl transformer_engine",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "rowwise"},
            "^--fp8-recipe rowwise is not tested .* give --fp8-recipe delayed or tensorwise or mxfp8 or blockwise, or ",
        ),
        (
            {"fp8": "e4m3", "fp8_recipe": "custom"},
            "^--fp8-recipe custom loses weight gradients: .* give --fp8-recipe delayed or tensorwise",
        ),
        (
            {
                "fp8": "e4m3",
                "fp8_recipe": "tensorwise",
                "fp8_param_gather": True,
                "use_distributed_optimizer": True,
                "reuse_grad_buf_for_mxfp8_param_ag": True,
            },
            "^--reuse-grad-buf-for-mxfp8-param-ag gathers weights in 16 bits, .* give these, or leave it out",
        ),
    ],
)
def test_what_transformer_engine_does_only_under_its_own_order_is_refused(
    flags: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(te_linear, "get_te_version", lambda: Version(te_linear.OLDEST))
    refused = as_read(**SIZES_OF_RANKS | {"pipeline_schedule": "zb-h1", "transformer_impl": "transformer_engine"} | flags)
    with pytest.raises(ValueError, match=words):
        check_flags(refused)
    if words.startswith("^"):  # numbers in FP8: the trainer's own flags are checked alike
        with pytest.raises(ValueError, match=words):
            of_new_flags(Settings.of(refused))


@pytest.mark.parametrize("version", [None, Version("0.0.0")])  # what releases of megatron-core say where none is installed
def test_a_transformer_engine_that_is_not_installed(version: Version | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_linear, "get_te_version", lambda: version)
    with pytest.raises(ValueError, match=r"transformer-engine >= \S+, and it is not installed: pip install"):
        te_linear.check_version()
    with pytest.raises(ValueError, match=r"^--fp8-format e4m3 needs Transformer Engine, which is not installed: pip"):
        check_flags(as_read(**SIZES_OF_RANKS, pipeline_schedule="zb-h1", transformer_impl="local", fp8="e4m3"))


@pytest.mark.parametrize(
    ("flags", "release", "words"),
    [
        ({"reset_attention_mask": True}, "0.16.1", "^--reset-attention-mask: .* first and the last of 4 stages alone"),
        ({"reset_attention_mask": True}, "0.19.2", "^--reset-attention-mask: "),
        ({"sft": True}, "0.16.1", "^--sft: .* the layers of all others attend across them"),
        ({"sft": True}, "0.17.1", None),  # upstream's script reads packed sequences everywhere
        ({"dataloader_inter_document_masking": True}, "0.19.2", None),
        ({"reset_attention_mask": True, "pipeline_model_parallel_size": 2}, "0.16.1", None),
        ({"reset_attention_mask": True, "pipeline_model_parallel_size": 2, "chunks": 2}, "0.16.1", "first and the last of 4"),
        ({"reset_position_ids": True, "eod_mask_loss": True}, "0.16.1", None),
    ],
)
def test_under_stock_documents_that_run_together_are_told(
    flags: dict[str, object], release: str, words: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "version", lambda: release)
    monkeypatch.setenv("RANK", "0")
    sizes = SIZES_OF_RANKS | {"pipeline_schedule": "stock", "pipeline_model_parallel_size": 4, "reset_attention_mask": False}
    args = as_read(**sizes | flags)
    Run(Versions(release, Path("core"), Path("training"), release)).validate(
        lambda given: setattr(given, "virtual_pipeline_model_parallel_size", flags.get("chunks")), args
    )
    said = [line.removeprefix(" WARNING: ") for line in capsys.readouterr().out.splitlines()]
    assert (said == []) if words is None else (len(said) == 1 and re.search(words, said[0])), said


@pytest.mark.parametrize(
    ("flags", "release", "words"),
    [
        ({"sft": True, "tensor_model_parallel_size": 2}, "0.16.1", "^--sft with --tensor-model-parallel-size 2: .* 0.17 or"),
        (
            {"sft": True, "reset_attention_mask": True, "tensor_model_parallel_size": 2},
            "0.16.1",
            "^--sft with --tensor-model-parallel-size 2: .* 0.17 or",
        ),
        ({"sft": True, "tensor_model_parallel_size": 2}, "0.17.1", None),
        ({"reset_attention_mask": True, "tensor_model_parallel_size": 2}, "0.16.1", None),
    ],
)
def test_documents_that_no_stage_can_keep_apart_are_refused(
    flags: dict[str, object], release: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda: release)
    args = as_read(**SIZES_OF_RANKS | {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_size": 4} | flags)
    vars(args).update(dict.fromkeys(CHUNK_FLAGS), **flags)
    with nullcontext() if words is None else pytest.raises(ValueError, match=words):
        check_flags(args)


@pytest.mark.parametrize(
    ("flags", "release", "words"),
    [
        ({}, "0.16.1", None),
        ({"overlap_param_gather": True}, "0.19.2", None),
        ({"overlap_param_gather": True}, "0.18.2", "with --overlap-param-gather: .* 0.18.2 adds weights to the gradients "),
        ({"num_experts": 8}, "0.16.1", "with --num-experts 8: Megatron-LM 0.16.1 takes gradients of experts for their weights"),
    ],
)
def test_weights_that_mix_with_gradients_are_refused(
    flags: dict[str, object], release: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda: release)
    sizes = SIZES_OF_RANKS | {"expert_model_parallel_size": 2}
    args = as_read(**sizes | {"reuse_grad_buf_for_mxfp8_param_ag": True} | flags)
    wrong = of_flags(args, launch=True).sentences(WRONG)
    assert wrong == [] if words is None else re.match(f"--reuse-grad-buf-for-mxfp8-param-ag {words}", "".join(wrong))
    args.reuse_grad_buf_for_mxfp8_param_ag = False
    assert of_flags(args, launch=True).sentences(WRONG) == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--reset-attention-mask --transformer-impl local", None),
        ("--reset-attention-mask --transformer-impl transformer_engine", "has no effect: Transformer Engine's causal attention"),
    ],
)
def test_flags_that_do_less_than_they_say_are_told(flags: str, words: str | None) -> None:
    found = cautions(parse(flags.split()))
    assert (found == []) if words is None else (len(found) == 1 and re.search(words, found[0])), found
    launched = parse(flags.split()) | {"create_attention_mask_in_dataloader": False}
    assert len(cautions(launched)) == max(len(found), "--reset-attention-mask" in flags)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8", "blockwise"])
def test_recipes_of_fp8_are_accepted_but_one_where_forwards_run_again(recipe: str) -> None:

    fp8 = {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": True, "transformer_impl": "transformer_engine"}
    gathered = {"use_distributed_optimizer": True, "reuse_grad_buf_for_mxfp8_param_ag": recipe == "mxfp8"}
    args = as_read(pipeline_schedule="zb-h1", hidden_dropout=0.0, attention_dropout=0.0, **fp8, **gathered, **SIZES_OF_RANKS)
    of_flags(args).refuse(QUANTIZED)
    args.pipeline_costs = "profile"
    of_flags(args).refuse(QUANTIZED)
    words = "^--fp8-recipe delayed with a schedule that runs forwards again .* give --fp8-recipe tensorwise"
    for again in (False, True):
        plan = Namespace(schedule=Namespace(reruns=again))
        pipeline = cast("Pipeline", Namespace(name="zb-h1", plans=Namespace(splits=1, plan=lambda _, plan=plan: plan)))
        with pytest.raises(ValueError, match=words) if again and recipe == "delayed" else nullcontext():
            check_plan(args, pipeline, [4])


@pytest.mark.parametrize(
    ("release", "given", "words"),
    [
        ("0.17.1", {"hybrid_layer_pattern": "M*"}, "--hybrid-layer-pattern M* lists the layers of a class that our schedu"),
        (
            "0.19.2",
            {"hybrid_override_pattern": "M*"},
            "--hybrid-override-pattern M* is what releases before 0.18 call --hybrid-layer-pattern, whose layers our",
        ),
        ("0.19.2", {"mtp_hybrid_override_pattern": "*-"}, "--mtp-hybrid-override-pattern *- is what older releases have for"),
        ("0.19.2", {"hybrid_layer_pattern": "MD"}, "--hybrid-layer-pattern MD with D uses the weight of a linear without its"),
        ("0.19.2", {"hybrid_layer_pattern": "MX"}, "--hybrid-layer-pattern MX with X: known are"),
        (
            "0.19.2",
            {"hybrid_layer_pattern": "M|*|-"},
            "--hybrid-layer-pattern M|*|- has 3 stages, and the schedule has 2: leave | out, or write it 1 time",
        ),
        (
            "0.19.2",
            {"hybrid_layer_pattern": "M|*", "account_for_embedding_in_pipeline_split": True},
            "--hybrid-layer-pattern M|* says where every layer goes, by | or by what letters take, and --account-for-embedding",
        ),
        (
            "0.19.2",
            {"hybrid_layer_pattern": "M*", "overlap_moe_expert_parallel_comm": True},
            "--overlap-moe-expert-parallel-comm runs megatron-core's plans of layers, which it has for GPTModel alone",
        ),
    ],
)
def test_patterns_that_do_not_train_are_refused(
    release: str, given: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "version", lambda: release)
    chunks = dict.fromkeys(CHUNK_FLAGS) | {"pipeline_model_parallel_size": 2}
    args = as_read(pipeline_schedule="zb-h1", **SIZES_OF_RANKS, **chunks, **given)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        check_flags(args)
    args.pipeline_schedule = "stock"
    check_flags(args)
