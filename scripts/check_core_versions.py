"""Train with every release of megatron-core that the patches are made for: ``check_core_versions.py [--tests] [RELEASE ...]``.

Each release gets an environment of its own under ``build/``, in which pip installs it and what it asks for (0.14 and 0.15: numpy
below 2), over the packages of the environment that runs this script. There the patches are applied, and a few iterations of
``configs/tiny.yaml`` must give the same numbers under our schedules as under stock, bit for bit, also when they resume from a
checkpoint of the distributed optimizer, buckets padded. ``--tests`` runs those of the model, the runtime
and training there as well.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RELEASES = ("0.14.0", "0.15.3", "0.16.1")  # the last of every minor release
RANKS = 2
_ITERATIONS = 3
_TRAIN = (
    f"--mock-data --train-iters {_ITERATIONS} --eval-iters 0 --log-interval 1 --clip-grad 0 "
    f"--pipeline-model-parallel-size {RANKS} --num-layers 4"
)
_SCHEDULES = ("stock", "zb-h1", "v-half")
_ANOTHER_PLACEMENT = ("v-half",)  # the norm of the same gradients is added up in another order
_SAVED = "v-half"  # by the distributed optimizer, with a bucket for every parameter: vectors of 64 elements are padded to 128
_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1 --save-interval 2 --save"
_NOT_SAVED = ("0.14",)  # releases in which these checkpoints are refused
_TESTS = (
    "tests/patches",
    "tests/model",
    "tests/optimizer",
    "tests/runtime/test_numerics.py",
    "tests/runtime/test_schedules_and_layouts.py",
    "tests/runtime/test_forward_backward.py",
    "tests/runtime/test_vocabulary.py",
    "tests/runtime/test_offload.py",
    "tests/training/test_training_runs.py",
    "tests/training/test_checkpoint_layouts.py",
)
_PATCHES = """
import megatron.core
from megatron.pipeline import patches
patches.install()
print(megatron.core.__version__, megatron.core.__file__)
"""
# The tests' own imports are those of a program that has applied the patches.
_PYTEST = """
import sys
from megatron.pipeline.patches import older_releases
older_releases.install()
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


Steps = list[dict[str, Any]]


class Failed(Exception):
    """What went wrong with a release, in words."""


def main(argv: Sequence[str]) -> int:
    """Check the releases one after another; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "releases", nargs="*", default=RELEASES, metavar="RELEASE", help=f"of megatron-core; {' '.join(RELEASES)}"
    )
    parser.add_argument("--tests", action="store_true", help="run tests in each environment, too: minutes")
    args = parser.parse_args(argv)
    failed = False
    for release in args.releases:
        try:
            python = environment(release)
            print(f"megatron-core {release}: {check(python, release)}", flush=True)
            if args.tests:
                _run([python, "-c", _PYTEST, "-p", "no:cacheprovider", *_TESTS], "the tests", ROOT)
                print(f"megatron-core {release}: tests passed", flush=True)
        except Failed as failure:
            failed = True
            print(f"megatron-core {release}: FAILED: {failure}", flush=True)
    return int(failed)


def environment(release: str) -> str:
    """The interpreter of an environment with this release: this one, or another, which is made if it is not there.

    Raises:
        Failed: pip cannot install the release with what this package requires.
    """
    if release == metadata.version("megatron-core"):
        return sys.executable
    folder = ROOT / "build" / "megatron-core" / release
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return str(python)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, symlinks=True)
    below = sysconfig.get_path("purelib")
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    required = [text for text in metadata.requires("megatron-pipeline") or [] if "extra ==" not in text]
    others = [text for text in required if not text.startswith("megatron-core")]
    install = [str(python), "-m", "pip", "install", "--quiet", f"megatron-core=={release}", *others]
    _run(install, "pip install")
    ready.touch()
    return str(python)


def check(python: str, release: str) -> str:
    """Apply the patches and train; returns what was found, in words.

    Raises:
        Failed: a symbol is missing, a training fails, or numbers differ.
    """
    version, file = _run([python, "-W", "ignore", "-c", _PATCHES], "applying the patches").split()[-2:]
    if version != release:
        raise Failed(f"the environment has megatron-core {version} in {file}")
    resumes = not release.startswith(_NOT_SAVED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saving = f"{_DISTRIBUTED} {folder / 'saved'}" if resumes else ""
        metrics = {
            schedule: _train(python, schedule, folder / schedule, saving if schedule == _SAVED else "") for schedule in _SCHEDULES
        }
        if resumes:
            (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
            resumed = _train(python, _SAVED, folder / "resumed", f"{saving} --load {folder / 'saved'}")
            _compare(f"{_SAVED} resumed", resumed, "uninterrupted", metrics[_SAVED][2:])
    stock = metrics.pop("stock")
    for schedule, steps in metrics.items():
        _compare(schedule, steps, "stock", stock, ("loss",) if schedule in _ANOTHER_PLACEMENT else ("loss", "grad_norm"))
    found = f"patches applied; {' and '.join(metrics)} train as stock does: losses {[step['loss'] for step in stock]}"
    return f"{found}; {_SAVED} resumes" if resumes else found


def _compare(name: str, steps: Steps, other: str, expected: Steps, keys: Sequence[str] = ("loss", "grad_norm")) -> None:
    for key in keys:
        found, wanted = ([step[key] for step in run] for run in (steps, expected))
        if found != wanted:
            raise Failed(f"{key} of {name} {found}, of {other} {wanted}")


def _train(python: str, schedule: str, folder: Path, more: str = "") -> Steps:
    """The metrics of every iteration.

    Raises:
        Failed: it fails, or ends before the last iteration.
    """
    folder.mkdir()
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    flags = ["--config", str(ROOT / "configs/tiny.yaml"), *_TRAIN.split(), "--pipeline-schedule", schedule, *more.split()]
    # The datasets' cache is of this folder: other releases may write another format.
    written = ["--metrics", str(folder / "metrics.jsonl"), "--data-cache-path", str(folder / "cache")]
    _run([*torchrun, str(ROOT / "pretrain_gpt.py"), *flags, *written], f"training under {schedule}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not steps or steps[-1]["iteration"] != _ITERATIONS:
        raise Failed(f"training under {schedule} logged {steps}")
    return steps


def _run(command: Sequence[str], name: str, folder: Path | None = None) -> str:
    """What a command prints.

    Raises:
        Failed: with the end of what it said, if it fails.
    """
    ended = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise Failed(f"{name} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")
    return ended.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
