"""How ``mpipe launch`` finds a script and the releases that belong to it, and begins it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import cast

import pytest
from command import refusal
from launch.launched import SIZES, STAND_IN
from marked import rest
from megatron.pipeline.patches.distrib_optimizer import SavedWrongError

from megatron.pipeline.cli import main
from megatron.pipeline.distributed import processes
from megatron.pipeline.launch import script
from megatron.pipeline.launch.progress import LaunchProgress
from megatron.pipeline.launch.run import Run
from megatron.pipeline.launch.versions import Versions, version_in
from megatron.pipeline.model.layout import PlacementLayout


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


def test_a_wrong_choice_is_one_line_of_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    parser = ArgumentParser(allow_abbrev=False)
    Run(Versions("0.16.1", Path("core"), Path("training"), "0.16.1")).add_flags(parser)
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(["--pipeline-watch", "loud"])
        assert ended.value.code == 2 and bool(waited) == (rank == "1")
        said = capsys.readouterr().err
        assert said.startswith("mpipe launch: argument --pipeline-watch: invalid choice: 'loud'") and said.count("\n") == 1


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "which script?"),
        (["nowhere/pretrain_gpt.py"], "there is no script nowhere/pretrain_gpt.py"),
        (["--core", "mine", str(STAND_IN)], "invalid choice: 'mine'"),
    ],
)
def test_no_script(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, "launch", *arguments)


@pytest.mark.parametrize(
    ("flags", "config", "words"),
    [
        ("--pipeline-schedule zb-w", "", "unknown schedule 'zb-w'; known are 1f1b"),
        ("--save runs/x --save-interval=5", "pipeline_schedule: zb-w", "unknown schedule 'zb-w'"),
        ("--save=runs/x", "", "--save runs/x without --save-interval: Megatron-LM's scripts need both: give --save-interval N"),
        ("--pipeline-schedule zb-v", "save: runs/x", "--save runs/x without --save-interval"),
        (
            "--pipeline-schedule zb-v",
            "{hybrid_layer_pattern: M|*, pipeline_model_parallel_size: 2}",
            "--hybrid-layer-pattern M|* has 2 stages, and the schedule has 4: leave | out, or write it 3 times",
        ),
    ],
)
def test_what_every_rank_would_refuse_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, config: str, words: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(script, "_start", lambda _: pytest.fail("ranks are started"))
    (tmp_path / "flags.yaml").write_text(config)
    flags += f" --config {tmp_path}/flags.yaml"
    assert words in refusal(capsys, "launch --nproc-per-node 2", str(STAND_IN), flags)
    whole = ("--hybrid-layer-pattern", "M*")
    script._refuse_early(
        [*flags.replace("zb-w", "zb-v").split(), "--save-interval", "5", "--pipeline-schedule", "v-half", *whole]
    )


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


def test_in_training_a_configuration_is_made_once() -> None:
    """Scripts ask for it with every microbatch."""
    run = Run(Versions("0.16.1", Path("core"), Path("training"), "0.16.1"))
    names = ("delay_wgrad_compute", "overlap_moe_expert_parallel_comm")
    args = Namespace(transformer_impl="local", **dict.fromkeys(names, False))
    run._cut = cast(PlacementLayout, object())

    def make(args: Namespace, *_: object) -> Namespace:
        return Namespace(layout=args.pipeline_model_parallel_layout)

    built = run.configure(make, args)
    assert built.layout is run._cut and run.configure(make, args) is not built, "each chunk may change its own"
    run._progress = cast(LaunchProgress, object())
    asked = run.configure(make, args)
    assert asked == built and run.configure(make, args) is asked
    assert run.configure(make, args, "another class") is not asked


# The last rank that torchrun starts: a signal before that would leave it running, without what started it.
SAYS = "import os, sys, time; os.environ['RANK'] == '1' or time.sleep(60); {}"


@pytest.mark.parametrize(
    ("code", "ends", "says"),
    [
        ("sys.exit(print('one line', file=sys.stderr) or 2)", 2, r"one line\n"),
        rest("sys.exit(3)", 1, r"(?s).*closing signal SIGTERM.*Root Cause.*exitcode  : 3 .*"),
        ("time.sleep(1); os.kill(os.getppid(), 15); time.sleep(60)", 128 + 15, r"(?s)(?!.*Traceback).*closing signal SIGTERM.*"),
    ],
)
def test_how_ranks_end_is_how_their_start_ends(code: str, ends: int, says: str) -> None:
    """A rank that ends with 2 has said what is wrong."""
    ranks = ["--nproc-per-node", "2", "--no-python", sys.executable, "-c", SAYS.format(code)]
    start = [sys.executable, "-c", "import sys; from megatron.pipeline.launch.script import _start; _start(sys.argv[1:])", *ranks]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(start, env=alone, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == ends and re.fullmatch(says, done.stderr), done


@pytest.mark.rest
def test_a_signal_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The whole command; what starts the ranks gets SIGTERM and passes it on."""
    flags = f"{SIZES} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --train-iters 100000 --save {tmp_path} "
    flags += f"--save-interval 100000 --metrics {tmp_path}/metrics.jsonl"
    command = [sys.executable, "-m", "megatron.pipeline.cli", "launch", "--nproc-per-node", "2", str(STAND_IN), *flags.split()]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True) as launched:
        while launched.poll() is None and not (tmp_path / "metrics.jsonl").is_file():
            time.sleep(0.1)
        launched.terminate()
        assert launched.stdout
        output = launched.stdout.read()
    assert output.count("--exit-signal-handler is on") == 1, output
    assert len(names := [path.name for path in tmp_path.glob("*_of_rank_*.pt")]) == 2, (names, output)
    assert launched.returncode == 128 + signal.SIGTERM
