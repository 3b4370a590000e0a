"""What ``mpipe`` says of itself: help, examples, completion, versions, and the packages that it misses."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import runpy
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron.pipeline.cli import COMMANDS, main, parse

ROOT = Path(__file__).parents[2]
SCRIPTS = [path for room in ("scripts", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    words = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: mpipe {command}" in words
    usage, _, behind = words.partition("\nexamples:\n")
    assert [line for line in usage.splitlines() if line.startswith(" ")] == []  # the usage is one line, and examples come first
    shown = behind.partition("\n\n")[0].splitlines()
    assert len(shown) >= 2 and all(f" {command}" in line for line in shown)
    for example in shown:
        name, *arguments = shlex.split(example)
        if command not in ("check", "launch", "rehearse"):  # they read torchrun's flags, or a script's
            assert name == "mpipe" and parse(arguments).run


def test_flags_stand_in_groups_the_usual_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    words = capsys.readouterr().out
    titles = re.findall(r"^(\S.*):$", words, re.M)
    assert titles[:4] == ["examples", "positional arguments", "the usual", "costs in detail"]
    assert titles[-1] == "options" and words.partition("\noptions:\n")[2].strip().startswith("-h, --help")
    words = words.partition("\nthe usual:\n")[2]
    assert (
        words.index("--schedule NAME ") < words.index("--cost F=") < words.index("--vocab-cost S=") < words.index("--replicas D ")
    )
    assert len(re.findall(r"^  (?:-\w, |-o FILE, )?--", words, re.M)) >= 36  # each once, and none is lost


@pytest.mark.parametrize(("command", "first"), [("check --shrink", "--config"), ("rehearse", "--config")])
def test_missing_dashes_before_a_training_s_flags_are_named(capsys: pytest.CaptureFixture[str], command: str, first: str) -> None:
    assert main([*command.split(), "--config", "F"]) == 2
    name = command.split(maxsplit=1)[0]
    assert f"{first} is no flag of mpipe {name} itself: put -- before a training's" in capsys.readouterr().err


def test_support_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["support", "lora"]) == 0
    found = capsys.readouterr().out
    assert "LoRA" in found and "Muon" not in found and "latent" not in found  # whose --kv-lora-rank it is not
    assert main(["support", "cp"]) == 0
    found = capsys.readouterr().out
    assert "context parallelism" in found and "offload" not in found
    assert main(["support", "fp8"]) == 0
    assert "FP8" in capsys.readouterr().out
    assert main(["support", "quantum"]) == 2
    assert "no feature is called 'quantum'" in capsys.readouterr().err


def test_examples_of_files_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        assert main(["plan", "--schedule", "zb-h1", "--pp", "4", "--microbatches", "4", "-o", "plan.json"]) == 0
        assert main(["export", "plan.json", "-o", "torch.csv"]) == 0
        for command in ("certify", "export"):
            with pytest.raises(SystemExit):
                main([command, "--help"])
            for example in capsys.readouterr().out.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines():
                assert main(shlex.split(example)[1:]) == 0, example


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_flags(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as end:
        main(["--print-completion", shell])
    printed = capsys.readouterr().out
    assert end.value.code == 0 and all(word in printed for word in (*COMMANDS, "--microbatches", "--memory-limit"))


def test_bash_completes() -> None:
    pytest.importorskip("shtab")
    script = f"""
eval "$({sys.executable} -m megatron.pipeline.cli --print-completion bash)"
complete -p mpipe | grep -o _shtab_mpipe
COMP_WORDS=(mpipe plan --memory-); COMP_CWORD=2; _shtab_mpipe; echo "${{COMPREPLY[@]}}"
COMP_WORDS=(mpipe cer); COMP_CWORD=1; _shtab_mpipe; echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.split() == ["_shtab_mpipe", "--memory-limit", "certify"], done.stderr


def test_completion_without_its_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "shtab" else real(name))
    assert main(["--print-completion", "bash"]) == 2
    assert "needs the package shtab" in capsys.readouterr().err


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_has_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A file of a shared module prints nothing, and no program acts."""
    monkeypatch.setattr("sys.argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(path.parent)
    program = "__main__" in path.read_text(encoding="utf-8")
    with pytest.raises(SystemExit) if program else contextlib.nullcontext() as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end is None or end.value.code == 0
    assert capsys.readouterr().out.partition(" ")[0] == ("usage:" if program else "")


@pytest.mark.parametrize("path", ["scripts/install_chromium.sh", "scripts/slurm/local_cluster.sh"])
def test_shell_scripts_that_a_person_runs_have_help(path: str) -> None:
    done = subprocess.run(["bash", path, "--help"], capture_output=True, text=True, check=False, cwd=ROOT)
    head = (ROOT / path).read_text(encoding="utf-8").splitlines()[1]
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(head.removeprefix("# ") + "\n")


def test_versions_are_printed_and_nothing_is_imported_for_that(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    versions = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert versions["megatron-pipeline"] == metadata.version("megatron-pipeline")
    assert versions["torch"] == metadata.version("torch")
    done = python(
        "import sys; from megatron.pipeline.cli import main\ntry: main(['--version'])\nexcept SystemExit: print([*sys.modules])"
    )
    assert "'torch'" not in done.stdout and "'megatron.core'" not in done.stdout


MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 255"
)


TRAINS = "packages torch and megatron-core, which are not installed: pip install 'torch.*' 'megatron-core.*'"


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("memory --num-layers 2", TRAINS),
        (f"tune {MODEL} --gpus 2 --gpu A100-80GB", TRAINS),
        (f"launch {ROOT / 'pretrain_gpt.py'}", TRAINS),
        (f"launch --nproc-per-node 2 {ROOT / 'pretrain_gpt.py'}", TRAINS),
        (f"rehearse -- {MODEL}", TRAINS),
        ("serve --no-browser --port 0", "package uvicorn, which is not installed: pip install 'uvicorn.*'"),
    ],
)
def test_what_is_not_installed_is_named_in_one_line(tmp_path: Path, command: str, needed: str) -> None:
    program = f"""
import importlib.util, os, sys
missing = ("torch", "megatron.core", "uvicorn")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in missing else found(name, *rest)
os.chdir({str(tmp_path)!r})
from megatron.pipeline.cli import main
sys.exit(main({command.split()!r}))
"""
    done = python(program)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"mpipe: .*this needs the {needed}\n", done.stderr)


def python(program: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
