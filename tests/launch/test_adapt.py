"""What ``--adapt`` leaves out, what it says, and what is refused without it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest

from megatron.pipeline.flags.flags import MEGATRON
from megatron.pipeline.flags.settings import add_flags
from megatron.pipeline.launch.adapt import adapt, exclusions, refusal
from megatron.pipeline.launch.check import check_flags
from megatron.pipeline.launch.run import Run
from megatron.pipeline.launch.versions import Versions
from megatron.pipeline.planner.combinations.rows import EXCLUDED
from megatron.pipeline.planner.combinations.table import Combination, flag_of

PAGE = Path(__file__).parents[2] / "docs" / "launch.md"
[EXCLUDED_GRAPHS] = [row.reason for row in EXCLUDED if row.one == "cuda_graph_impl"]
PRICED = [row for row in EXCLUDED if row.price]


def upstreams(flags: str) -> Namespace:
    """What a launched script's parser, with some of Megatron-LM's flags, makes of a command line."""
    parser = ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    add_flags(parser, MEGATRON)
    for switch in ("tp-comm-overlap", "delay-wgrad-compute", "sft"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--fp4-format", dest="fp4")
    parser.add_argument("--fp8-format", dest="fp8")
    parser.add_argument("--fp8-recipe", default="delayed")
    parser.add_argument("--cuda-graph-impl", default="none")
    parser.add_argument("--cuda-graph-scope", nargs="+")
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    Run(Versions("0.16.1", Path("core"), Path("training"), "0.16.1")).add_flags(parser)
    return parser.parse_args(["--pipeline-model-parallel-size", "4", "--num-layers", "16", *flags.split()])


GIVEN = (
    "--delay-wgrad-compute --cuda-graph-impl local --cuda-graph-scope full_iteration --num-layers-per-virtual-pipeline-stage 1 "
    "--microbatch-group-size-per-virtual-pipeline-stage 8"
)


def test_what_is_left_out_has_the_value_of_a_command_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    args, without = (upstreams(f"--pipeline-schedule zb-v --adapt {flags}") for flags in (GIVEN, ""))
    assert args == without
    check_flags(args)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": left out by --adapt. Price: ")[0] for line in said] == [
        " --delay-wgrad-compute delays weight gradients within megatron-core's own schedules; ours do so anyway",
        f" --cuda-graph-impl local {EXCLUDED_GRAPHS}",
        " --microbatch-group-size-per-virtual-pipeline-stage 8 sets groups of microbatches, and zb-v has its own or none",
        " --num-layers-per-virtual-pipeline-stage 1 asks for 4 chunks per rank, and zb-v has 2",
    ]


def test_ranks_but_the_first_are_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert not upstreams(f"--pipeline-schedule zb-v --adapt {GIVEN}").delay_wgrad_compute
    assert capsys.readouterr().out == ""


AGREEING = "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Ett|(tt|)*6ttL"


@pytest.mark.parametrize(
    "flags",
    [
        f"--pipeline-schedule stock --adapt {GIVEN}",
        "--pipeline-schedule interleaved --adapt --num-layers-per-virtual-pipeline-stage 1",
        "--pipeline-schedule zb-v --adapt --num-virtual-stages-per-pipeline-rank 2",
        f"--pipeline-schedule zb-v --adapt {AGREEING}",
    ],
)
def test_what_goes_with_the_schedule_stays(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vars(upstreams(flags)) == vars(upstreams(flags.replace("--adapt", ""))) | {"adapt": True}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--delay-wgrad-compute --tp-comm-overlap --num-virtual-stages-per-pipeline-rank 4",
            r"^--delay-wgrad-compute delays .*; --tp-comm-overlap leaves .*; --num-virtual-stages-per-pipeline-rank 4 asks for 4 "
            r"chunks per rank, and zb-v has 2: leave them out, or take --pipeline-schedule stock; the same command with --adapt "
            r"leaves them out, and says at what price$",
        ),
        (
            "--tp-comm-overlap --fp4-format e2m1",
            r"^--tp-comm-overlap leaves .*; --fp4-format e2m1 is not .*: leave them out, .*; the same command with --adapt "
            r"leaves all but --fp4-format e2m1 out, and says at what price$",
        ),
        ("--adapt --tp-comm-overlap --fp4-format e2m1", "^--fp4-format e2m1 is not tested .*: leave it out, or take .* stock$"),
        (
            "--tp-comm-overlap --fp8-format e4m3 --fp8-recipe custom --transformer-impl transformer_engine",
            r"^--fp8-recipe custom loses .*\. --tp-comm-overlap leaves .*: leave it out",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 4 --pipeline-model-parallel-layout Et|(tt|)*6ttL",
            r"^--num-virtual-stages-per-pipeline-rank 4 and --pipeline-model-parallel-layout Et\S+ asks for chunks per rank, of "
            r"which zb-v has 2 \(\S+ \(4\) and \S+ \(2\) each say how many chunks a rank has: give one\): leave it out",
        ),
    ],
)
def test_a_refusal_names_all(flags: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_flags(upstreams(f"--pipeline-schedule zb-v {flags}"))


@pytest.mark.parametrize("row", [row for row in EXCLUDED if row.other == "ours"], ids=lambda row: row.name)
def test_a_setting_is_refused_and_one_with_a_price_can_be_left_out(row: Combination) -> None:
    value = row.one.partition("=")[2] or 2
    args = Namespace(pipeline_schedule="zb-h1", **{row.name: value})
    [found] = exclusions(args)
    said = f"{flag_of(row.name)} {value} {row.reason}"
    assert refusal([found]).startswith(f"{said}: leave it out, or take --pipeline-schedule stock")
    assert ("; the same command with --adapt leaves it out" in refusal([found])) == bool(row.price)
    without, lines = adapt(args, lambda _: None)
    assert lines == ([f"{said}: left out by --adapt. Price: {row.price}"] if row.price else [])
    assert exclusions(Namespace(**vars(args) | without)) == ([] if row.price else [found])


@pytest.mark.parametrize("schedule", ["zb-v", "stock"])
@pytest.mark.parametrize("graphs", ["transformer_engine", "local"])
def test_graphs_of_layers_stay_where_they_are_tested(schedule: str, graphs: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = f"--pipeline-schedule {schedule} --adapt --disable-bias-linear --cuda-graph-impl {graphs}"
    fine = f"{plain} --cuda-graph-scope attn moe_router --num-experts 4 --overlap-grad-reduce"
    assert upstreams(fine).cuda_graph_impl == graphs
    assert capsys.readouterr().out == ""
    for other in ("--fp8-format hybrid", "--recompute-granularity full", "--cuda-graph-scope moe"):
        args = upstreams(f"{plain} {other}")
        said = capsys.readouterr().out
        assert (args.cuda_graph_impl, bool(said)) == (("none", True) if schedule == "zb-v" else (graphs, False))
        assert schedule == "stock" or f"is not tested with {other} under schedules of ours: left out by --adapt" in said
    assert upstreams(f"{plain} --num-experts 4").cuda_graph_impl == ("none" if schedule == "zb-v" else graphs)
    assert ("captures whole layers" in capsys.readouterr().out) == (schedule == "zb-v")


def test_no_row_is_lost() -> None:
    names = (
        "use_torch_fsdp2 use_megatron_fsdp use_transformer_engine_op_fuser use_grouped_gemm_for_dense_mlp inprocess_restart fp4 "
        "use_grouped_gemm_for_shared_expert overlap_p2p_comm_warmup_flush hybrid_override_pattern mtp_hybrid_override_pattern "
        "cuda_graph_impl external_cuda_graph logits_load_dir logits_save_dir export_kd_teacher_load freeze_all_layers "
        "tp_comm_overlap fp8_output_proj hybrid_context_parallel"
    )
    assert set(names.split()) <= {row.name for row in EXCLUDED}


def test_the_page_has_the_prices() -> None:
    page = PAGE.read_text()
    for row in PRICED:
        assert f"| `{flag_of(row.name)}` | {row.price} |" in page
