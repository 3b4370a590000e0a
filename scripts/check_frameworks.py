"""Train in the loops of frameworks, with their own packages, under our schedules and megatron-core's own.

Each package and what it imports is fetched into ``build/frameworks``, without what else it asks for, over the environment with
megatron-core 0.19.2 that ``check_core_versions.py`` makes. Its program in ``scripts/frameworks`` trains on 4 ranks under each
schedule; losses must equal those of megatron-core's own schedule bit for bit, and so must norms of gradients without replicas and
with one chunk per rank.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import fetch_transformer_engine
from check_core_versions import environment
from wheels import NEWER_PYTHON, fetched

ROOT = Path(__file__).parents[1]
CORE = "0.19.2"
RANKS = 4
SCHEDULES = ("stock", "zb-h1", "zb-h2", "zb-auto", "zb-v", "v-half")
Numbers = list[list[float]]  # the loss and the norm of every iteration


class Framework(NamedTuple):
    """A framework's package.

    Attributes:
        wheels: it and what it imports, without what pip has for megatron-core.
        program: in ``scripts/frameworks``.
        pipelines: numbers of pipeline ranks to train on.
        trains: what: "" for all weights, or a word of the program's.
    """

    wheels: Sequence[str]
    program: str
    pipelines: tuple[int, ...]
    trains: tuple[str, ...]


FRAMEWORKS = {
    "Megatron Bridge 0.6.2": Framework(
        (
            "megatron-bridge==0.6.2 transformers==5.10.2 tokenizers==0.22.2 huggingface_hub==1.5.0 safetensors==0.8.0 "
            "peft==0.21.2 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.8 datasets==5.2.0 accelerate==1.15.0 "
            "mistral-common==1.13.1 regex tqdm psutil requests urllib3 certifi idna charset-normalizer rich pygments "
            "markdown-it-py mdurl httpx httpcore httpx2 httpcore2 truststore anyio h11 typer shellingham click einops"
        ).split(),
        "bridge_loop.py",
        (4, 2),
        ("", "lora"),
    )
}


def main() -> int:
    """Print a line for each framework, pipeline and schedule; returns 1 if numbers differ or a training fails."""
    engine = fetch_transformer_engine.fetch(fetch_transformer_engine.NEWEST)
    if engine is None:
        return 1
    failed = False
    for name, framework in FRAMEWORKS.items():
        python, packages = environment(CORE), _fetched(name, framework)
        for ranks, trains in itertools.product(framework.pipelines, framework.trains):
            given = [str(ranks), str(fetch_transformer_engine.FOLDER / engine), *trains.split()]
            runs = {schedule: _train(python, packages, framework.program, schedule, *given) for schedule in SCHEDULES}
            stock = runs[SCHEDULES[0]]
            for schedule, found in runs.items():
                equal = bool(stock) and _same(found, stock, exact=ranks == RANKS and schedule in SCHEDULES[:4])
                failed |= not equal
                words = f"losses {[loss for loss, _ in found]}" if equal else f"DIFFERENT: {found}, not {stock}"
                print(f"{name}, megatron-core {CORE}, PP {ranks} DP {RANKS // ranks}, {trains} {schedule}: {words}", flush=True)
    return int(failed)


def _fetched(name: str, framework: Framework) -> Path:
    """The folder with a framework's packages; the wheels of a newer Python are unpacked."""
    folder = ROOT / "build" / "frameworks" / name.replace(" ", "-")
    ready = folder / ".ready"
    if not ready.exists():
        own, *others = framework.wheels
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *others], check=True)
        with fetched(own, *NEWER_PYTHON) as wheel:
            shutil.unpack_archive(wheel, folder, "zip")
        ready.touch()
    return folder


def _train(python: str, packages: Path, program: str, *given: str) -> Numbers:
    """The numbers of a training; none, after the end of what it said, if it fails."""
    script = str(ROOT / "scripts" / "frameworks" / program)
    launch = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    ended = subprocess.run(
        [*launch, script, *given],
        env=os.environ | {"PYTHONPATH": str(packages), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    lines = ended.stdout.splitlines()
    found: list[Numbers] = [json.loads(line.removeprefix("found ")) for line in lines if line.startswith("found ")]
    if ended.returncode or len(found) != 1:
        print("\n".join(line for line in lines if "Error" in line)[-2000:], flush=True)
        return []
    return found[0]


def _same(found: Numbers, stock: Numbers, exact: bool) -> bool:
    """Losses are equal, and norms, up to the order of their sum over other buckets or ranks."""
    close = 0.0 if exact else 1e-6
    return len(found) == len(stock) and all(
        loss == other and abs(norm - expected) <= close * expected
        for (loss, norm), (other, expected) in zip(found, stock, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
