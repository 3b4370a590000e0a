"""Train with every release of megatron-core that the patches are made for.

``check_core_versions.py [--quick] [--tests] [RELEASE ..]``

Each release gets an environment of its own under ``build/``, in which pip installs it and what it asks for, over the packages of
the environment that runs this script. Releases from 0.17 on ask for Python 3.12; under an older Python their wheel is unpacked
and its one compiled module built. There the patches are applied, and a few iterations of
``configs/tiny.yaml`` must give the numbers of that release's own schedules, as exactly as docs/numerics.md says, also when they
resume from a checkpoint of the distributed optimizer, buckets padded; and so must those by ``megatron.training``, in wheels
from 0.17 on. ``--quick`` takes a few tests in place of these trainings, and leaves out the release that is installed here, with
which all tests run; ``--tests`` runs tests of the model, the runtime and training there as well. Releases are checked side by
side: ranks wait for each other, and for processes to start.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pybind11
from wheels import NEWER_PYTHON, NotFetched, fetched

ROOT = Path(__file__).parents[1]
RELEASES = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")  # the last of every minor release
_ITERATIONS = 3
_TRAIN = (
    f"--mock-data --train-iters {_ITERATIONS} --eval-iters 0 --log-interval 1 --clip-grad 0 "
    "--pipeline-model-parallel-size 2 --num-layers 4"
)
_LOSS, _ALL = ("loss",), ("loss", "grad_norm")  # another placement adds up the norm of the same gradients in another order


class Row(NamedTuple):
    """Trainings that must give the same numbers.

    Attributes:
        ranks: of the world; the pipeline has 2.
        stock: flags of the training under megatron-core's own schedule.
        ours: flags of the others, with what must be equal in every iteration.
        close: the largest difference of losses, relative; 0 for none.
    """

    ranks: int
    stock: str
    ours: Mapping[str, tuple[str, ...]]
    close: float = 0.0


_ROWS = {
    "schedules": Row(2, "", {"zb-h1": _ALL, "v-half": _LOSS, "gis-h --offload full": _LOSS}),
    "interleaved": Row(2, "--num-virtual-stages-per-pipeline-rank 2", {"interleaved": _ALL}),
    "vocabulary": Row(2, "", {"zb-v --vocab-parallel 2": _LOSS}, close=1e-5),
    "post-validation": Row(2, "--clip-grad 1", {"zb-h2 --post-validation --post-validation-when always": _ALL}),
    "experts": Row(4, "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2", {"zb-h1": _ALL, "v-half": _LOSS}),
    "overlap": Row(
        4,
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --bf16",
        {f"{name} --overlap-moe-expert-parallel-comm": _LOSS for name in ("zb-h1", "dualpipe-v")},
    ),
    "tensor parallel": Row(4, "--tensor-model-parallel-size 2 --sequence-parallel", {"zb-h1": _ALL, "v-half": _LOSS}),
    "distributed optimizer": Row(
        4, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", {"zb-h1": _ALL, "v-half": _LOSS}
    ),
}
_SAVED = "v-half"  # by the distributed optimizer, with a bucket for every parameter: vectors of 64 elements are padded to 128
_DISTRIBUTED = "--use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1 --save-interval 2 --save"
# Also without any row: a release fails if its schedules make a call that the table of answers lacks.
_DUTIES = "tests/patches/test_duties.py"
# Upstream's own parser, validation and loop, which its wheels bring from 0.17 on.
_FRONT_DOOR = "tests/launch/test_front_door.py"
# Schedules of each placement train as stock does, evaluations in between, and resume where buckets end in padding; and W has the
# linears of every letter.
_QUICK = (
    "tests/model/test_letters.py",
    "tests/session/test_patterns.py",
    "tests/runtime/test_numerics.py::test_evaluation",
    "tests/runtime/test_forward_backward.py::test_given_groups_and_non_loss_data",
    "tests/training/test_checkpoint_layouts.py::test_sizes_at_which_buckets_end_in_padding",
)
# megatron-core's own CUDA graphs, which our plans need from 0.19 on; skipped where no Transformer Engine is fetched.
_GRAPHS = ("tests/engine/test_graphs.py", "-k", "by and local and (whole or biases)")
# What newer wheels import of Python 3.12's.
_OVERRIDE = "import typing; typing.override = getattr(typing, 'override', lambda function: function)\n"
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
    """Check the releases side by side; returns 1 if one of them fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help=f"of megatron-core; {' '.join(RELEASES)}")
    parser.add_argument(
        "--quick", action="store_true", help="a few tests in place of all rows, and not the release that is installed"
    )
    parser.add_argument("--tests", action="store_true", help="run tests in each environment, too: minutes")
    args = parser.parse_args(argv)
    here = metadata.version("megatron-core") if args.quick else None
    releases = args.releases or [each for each in RELEASES if each != here]
    failed = False
    with ThreadPoolExecutor(len(releases)) as beside:
        for release, found in zip(
            releases, [beside.submit(check, each, args.quick, args.tests) for each in releases], strict=True
        ):
            try:
                print(f"megatron-core {release}: {found.result()}", flush=True)
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
    folder = ROOT / "build" / "megatron-core" / f"{release}-python{sys.version_info.major}.{sys.version_info.minor}"
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
    core = [f"megatron-core=={release}"]
    if _minor(release) >= (0, 17) and sys.version_info < (3, 12):
        _unpack(release, packages)
        core = ["triton"]  # imported by 0.18 and later; torch's CPU build brings none
    _run([str(python), "-m", "pip", "install", "--quiet", *core, *others], "pip install")
    ready.touch()
    return str(python)


def _unpack(release: str, packages: Path) -> None:
    """Put the wheel of a newer Python into an environment: its sources run under this one, and its helpers are compiled for it.

    Raises:
        Failed: pip cannot fetch it, or the compiler fails.
    """
    try:
        with fetched(f"megatron-core=={release}", *NEWER_PYTHON) as wheel:
            shutil.unpack_archive(wheel, packages, "zip")
    except NotFetched as failure:
        raise Failed(str(failure)) from None
    (packages / "typing_override.pth").write_text(_OVERRIDE)
    helpers = packages / "megatron" / "core" / "datasets" / "helpers.cpp"
    target = helpers.with_name(f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}")
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    _run(["c++", "-O3", "-shared", "-std=c++17", "-fPIC", *includes, str(helpers), "-o", str(target)], "compiling helpers.cpp")


def check(release: str, quick: bool, tests: bool) -> str:
    """Apply the patches and train; returns what was found, in words.

    Raises:
        Failed: a symbol is missing, a training fails, or numbers differ.
    """
    python = environment(release)
    version, file = _run([python, "-W", "ignore", "-c", _PATCHES], "applying the patches").split()[-2:]
    if version.partition("+")[0] != release:  # some wheels name their commit, too
        raise Failed(f"the environment has megatron-core {version} in {file}")
    front_door = [_FRONT_DOOR] if _minor(release) >= (0, 17) else []
    _pytest(python, _DUTIES, *front_door, *(_QUICK if quick else ()), *(_TESTS if tests else ()))
    if quick and _minor(release) >= (0, 19):
        _pytest(python, *_GRAPHS)
    said = ["patches applied", *(["upstream's parser and loop take every schedule"] if front_door else [])]
    if quick:
        return "; ".join([*said, "schedules train as stock does, and resume"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said += [f"{name}: {_equals_stock(python, row, folder / name.replace(' ', '-'))}" for name, row in _ROWS.items()]
        said.append(_resumes(python, folder))
    return "; ".join([*said, *(["tests passed"] if tests else [])])


def _equals_stock(python: str, row: Row, folder: Path) -> str:
    stock = _train(python, f"stock {row.stock}", row.ranks, folder / "stock")
    for number, (schedule, keys) in enumerate(row.ours.items()):
        # The number of chunks that stock is to have is the schedule's own.
        flags = row.stock if "--num-virtual" not in row.stock else ""
        steps = _train(python, f"{schedule} {flags}", row.ranks, folder / str(number))
        _compare(schedule, steps, "stock", stock, keys, row.close)
    return f"{' and '.join(row.ours)} train as stock does: losses {[step['loss'] for step in stock]}"


def _resumes(python: str, folder: Path) -> str:
    saving = f"{_DISTRIBUTED} {folder / 'saved'}"
    whole = _train(python, f"{_SAVED} {saving}", 2, folder / "whole")
    (folder / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = _train(python, f"{_SAVED} {saving} --load {folder / 'saved'}", 2, folder / "resumed")
    _compare(f"{_SAVED} resumed", resumed, "uninterrupted", whole[2:])
    return f"{_SAVED} resumes"


def _compare(name: str, steps: Steps, other: str, expected: Steps, keys: Sequence[str] = _ALL, close: float = 0.0) -> None:
    for key in keys:
        found, wanted = ([step[key] for step in run] for run in (steps, expected))
        if len(found) != len(wanted) or any(abs(a - b) > close * abs(b) for a, b in zip(found, wanted, strict=True)):
            raise Failed(f"{key} of {name} {found}, of {other} {wanted}")


def _train(python: str, schedule: str, ranks: int, folder: Path) -> Steps:
    """The metrics of every iteration.

    Args:
        schedule: its name, and flags that come with it.

    Raises:
        Failed: it fails, or ends before the last iteration.
    """
    folder.mkdir(parents=True)
    torchrun = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    flags = ["--config", str(ROOT / "configs/tiny.yaml"), *_TRAIN.split(), "--pipeline-schedule", *schedule.split()]
    # The datasets' cache is of this folder: other releases may write another format.
    written = ["--metrics", str(folder / "metrics.jsonl"), "--data-cache-path", str(folder / "cache")]
    _run([*torchrun, str(ROOT / "pretrain_gpt.py"), *flags, *written], f"training under {schedule}")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if not steps or steps[-1]["iteration"] != _ITERATIONS:
        raise Failed(f"training under {schedule} logged {steps}")
    return steps


def _pytest(python: str, *tests: str) -> None:
    _run([python, "-c", _PYTEST, "-p", "no:cacheprovider", *tests], "the tests", ROOT)


def _minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


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
