"""Build a wheel, by way of a source distribution, and use it outside the repository: ``check_wheel.py``.

The wheel goes into two new environments. One has what pip installs for planning, neither torch nor megatron-core: ``mpipe`` must
plan there, and its other commands must say in one line what is missing. The other has the packages of the environment that runs
this script: there a GPT is trained.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PLANS = (
    "plan --schedule zb-v --pp 2 --microbatches 4 -o zb-v.json",
    "plan --schedule auto --pp 2 --microbatches 3",
    "plan zb-v.json --cost F=1,B=2,W=1 --memory --draw zb-v.png",
    "plan zb-v.json --text --draw zb-v.html",
    "export zb-v.json -o zb-v.csv",
    "export zb-v.json -o zb-v.trace.json",
    "compare --pp 2 --microbatches 4 --schedules 1f1b,zb-h1 -o compare.svg",
)
_MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 "
    "--train-iters 3 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 255"
)
# What trains or measures.
_NEEDING = (
    f"memory {_MODEL}",
    f"costs {_MODEL} --gpu A100-80GB",
    f"tune {_MODEL} --gpus 2 --gpu A100-80GB",
    f"launch {ROOT / 'pretrain_gpt.py'}",
    f"launch --nproc-per-node 2 {ROOT / 'pretrain_gpt.py'}",
    f"rehearse -- {_MODEL}",
    f"check -- {_MODEL}",
)
# All modules, but those that start a program.
_IMPORT_ALL = """
import importlib, pkgutil, sys
from megatron.pipeline import patches
patches.install()
import megatron.pipeline
assert megatron.pipeline.__file__.startswith(sys.prefix), megatron.pipeline.__file__
names = [found.name for found in pkgutil.walk_packages(megatron.pipeline.__path__, "megatron.pipeline.")]
for name in names:
    if not name.endswith("__main__") and not name.startswith("megatron.pipeline.patches.training_"):  # of Megatron-LM's checkout
        importlib.import_module(name)
print(len(names))
"""


class Failed(Exception):
    """What does not work, in words."""


def main(argv: Sequence[str]) -> int:
    """Build and use; returns 1 if something does not work."""
    argparse.ArgumentParser(description=(__doc__ or "").partition(": ``")[0]).parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            wheel = build(folder)
            print(f"built {wheel.name}", flush=True)
            print(check_planner(folder / "planner", wheel), flush=True)
            print(check_training(folder / "training", wheel), flush=True)
        except Failed as failure:
            print(f"check_wheel.py: FAILED: {failure}", flush=True)
            return 1
    return 0


def build(folder: Path) -> Path:
    """The wheel, made from a source distribution of the files that git knows or would.

    Raises:
        Failed: one of the two cannot be built.
    """
    listed = _run(["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard", "-z"], ROOT).split("\0")
    for name in filter(None, listed):
        if (ROOT / name).is_file():
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(folder / "source")], folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def check_planner(folder: Path, wheel: Path) -> str:
    """Plan where there is neither torch nor megatron-core; returns what was done, in words.

    Raises:
        Failed: a command does not work, or does not say what it lacks.
    """
    python = _environment(folder)
    _run([python, "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{wheel}[pictures]"], folder)
    mpipe = str(Path(python).with_name("mpipe"))
    version = _run([mpipe, "--version"], folder)
    if not re.search(r"^megatron-pipeline \d.*\nmegatron-core not installed\ntorch not installed\n", version):
        raise Failed(f"mpipe --version prints {version!r}")
    [names] = re.findall(r"^  (\w+(?:\|\w+)+)$", _run([mpipe, "--help"], folder), re.M)
    for name in names.split("|"):
        _run([mpipe, name, "--help"], folder)
    for command in _PLANS:
        _run([mpipe, *command.split()], folder)
    line = (
        r"mpipe: .*this needs the packages torch and megatron-core, which are not installed: "
        r"pip install 'torch.*' 'megatron-core.*'\n"
    )
    for command in _NEEDING:
        done = subprocess.run([mpipe, *command.split()], cwd=folder, env=_alone(), capture_output=True, text=True, check=False)
        if done.returncode != 2 or done.stdout or not re.fullmatch(line, done.stderr):
            raise Failed(f"mpipe {command} without them: exit code {done.returncode}, {done.stdout}{done.stderr}")
    _serve(mpipe, folder)
    return f"planned without torch and megatron-core: {names}"


def _serve(mpipe: str, folder: Path) -> None:
    command = [mpipe, "serve", "--port", "0", "--no-browser", "--workers", "1"]
    with subprocess.Popen(command, cwd=folder, env=_alone(), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            address = re.search(r"http://[^\s/]+", said)
            if address is None:
                raise Failed(f"mpipe serve says {said!r}")
            page = urllib.request.urlopen(address[0], timeout=60).read().decode()
            for path in re.findall(r'(?:src|href)="([^":#]+)"', page):
                urllib.request.urlopen(f"{address[0]}/{path.lstrip('/')}", timeout=60).read()
        finally:
            server.terminate()


def check_training(folder: Path, wheel: Path) -> str:
    """Import all there is, tune, and train; returns what was done, in words.

    Raises:
        Failed: one of them does not work.
    """
    python = _environment(folder)
    _run([python, "-m", "pip", "install", "-q", "--no-deps", str(wheel)], folder)
    # Paths alone: this repository may be installed among them as editable, and must not be found.
    below = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "below.pth").write_text("\n".join(below) + "\n")
    count = _run([python, "-W", "ignore", "-c", _IMPORT_ALL], folder).split()[-1]
    mpipe = [python, "-W", "ignore", "-m", "megatron.pipeline.cli"]
    _run([*mpipe, "memory", *_MODEL.split()], folder)
    tried = ["--gpus", "2", "--gpu", "A100-80GB", "--schedules", "zb-h1", "--processes", "1", "-o", "tuned"]
    _run([*mpipe, "tune", *_MODEL.split(), *tried], folder)
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = "--mock-data --pipeline-model-parallel-size 2 --pipeline-schedule zb-v --eval-iters 0 --metrics metrics.jsonl"
    shutil.copy(ROOT / "pretrain_gpt.py", folder)  # in the repository's root Python would find the package there first
    _run([*torchrun, "pretrain_gpt.py", *_MODEL.split(), *flags.split()], folder)
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if len(losses) != 3:
        raise Failed(f"losses of 3 iterations: {losses}")
    return f"imported {count} modules, tuned and trained: losses {losses}"


def _environment(folder: Path) -> str:
    """The interpreter of a new environment that has pip alone."""
    venv.create(folder, with_pip=True, symlinks=True)
    return str(folder / "bin" / "python")


def _alone() -> dict[str, str]:
    """This environment's variables without what would lead Python back into the repository."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def _run(command: Sequence[str], folder: Path) -> str:
    """What a command prints.

    Raises:
        Failed: it does not end well.
    """
    done = subprocess.run(command, cwd=folder, env=_alone(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
