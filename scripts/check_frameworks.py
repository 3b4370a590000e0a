"""Train in the loops of frameworks, with their own packages, under our schedules and megatron-core's own.

Each package and what it imports is fetched into ``build/frameworks``, without what else it asks for, over the environment with
megatron-core 0.19.2 that ``check_core_versions.py`` makes. Its program in ``scripts/frameworks`` trains on 4 ranks under each
schedule, in one start; what loss functions report must equal that of megatron-core's own schedule bit for bit, and so must
norms of gradients without replicas and with one chunk per rank; the first log-probabilities, if any, are those of all layouts.
It prints a table, a row as soon as it is known, and ends with 1 if a row differs. ``check_frameworks.py [PROGRAM | SCHEDULE
..]`` runs some, as ``verl_loop.py zb-v``.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import fetch_transformer_engine
from check_core_versions import environment
from wheels import NEWER_PYTHON, fetched

ROOT = Path(__file__).parents[1]
CORE = "0.19.2"
RANKS = 4
SCHEDULES = ("stock", "zb-h1", "zb-h2", "zb-auto", "zb-v", "v-half")
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}  # modules are kept compiled, for the next rank and start
REPLICATED = ("stock", "zb-h1", "zb-v")
BESIDE = 2  # frameworks at once
Numbers = list[list[Any]]  # of every iteration what was reported, and the norm
COLUMNS = ("package", "trains", "ranks", "schedule", "m x length, by step", "result", "s", "CPU s")


class Framework(NamedTuple):
    """A framework's package.

    Attributes:
        unpacked: it, and others that ask for a newer Python, or for what pip has for megatron-core.
        wheels: what these import.
        program: in ``scripts/frameworks``.
        pipelines: numbers of pipeline ranks to train on.
        trains: what, and under which schedules: "" for all weights, or a word of the program's.
    """

    unpacked: Sequence[str]
    wheels: Sequence[str]
    program: str
    pipelines: tuple[int, ...]
    trains: Mapping[str, tuple[str, ...]] = {"": SCHEDULES[1:]}


_TRANSFORMERS = (
    "transformers==5.10.2 tokenizers==0.22.2 huggingface_hub==1.5.0 safetensors==0.8.0 accelerate==1.15.0 regex tqdm psutil "
    "requests urllib3 certifi idna charset-normalizer rich pygments markdown-it-py mdurl httpx httpcore httpx2 httpcore2 "
    "truststore anyio h11 typer shellingham click einops pyyaml"
).split()
_BRIDGE = "omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.8 mistral-common==1.13.1 peft==0.21.2".split()
_DATASETS = "datasets==4.4.1 pyarrow pandas python-dateutil six tzdata multiprocess dill xxhash fsspec aiohttp".split()
_PYDANTIC = "pydantic==2.12.5 pydantic_core==2.41.5 annotated-types typing_inspection".split()
_AGENTS = (
    "tensordict==0.10.0 pyvers orjson cloudpickle importlib_metadata zipp codetiming pillow loguru jaxtyping wadler-lindig "
    "cloudpathlib hf_transfer"
).split()

_BOTH = ("zb-v", "zb-h1")  # of adapters each takes what the one before has saved
_BRIDGED: dict[str, tuple[str, ...]] = {"": SCHEDULES[1:], "lora": _BOTH, "weights": _BOTH}

FRAMEWORKS = {
    "Megatron Bridge 0.6.2": Framework(
        ("megatron-bridge==0.6.2",),
        (*_TRANSFORMERS, *_BRIDGE),
        "bridge_loop.py",
        (4, 2),
        {**_BRIDGED, **dict.fromkeys(("dora", "canonical", "tied", "experts"), _BOTH[:1])},
    ),
    "verl 0.9.1": Framework(
        ("verl==0.9.1", "megatron-bridge==0.6.2"),
        (*_TRANSFORMERS, *_BRIDGE, *_DATASETS, *_PYDANTIC, *_AGENTS),
        "verl_loop.py",
        (4, 2),
        {"": SCHEDULES[1:5:3], "lengths": SCHEDULES[4:5]},
    ),
    "SkyRL 0.4.0": Framework(
        ("skyrl==0.4.0", "megatron-bridge==0.6.2"),
        (*_TRANSFORMERS, *_BRIDGE, *_DATASETS, *_PYDANTIC, *_AGENTS),
        "skyrl_loop.py",
        (4, 2),
        {"": SCHEDULES[1:4]},  # it asks for the ends of the model by rank
    ),
    "ms-swift 4.6.0": Framework(
        ("ms-swift==4.6.0",),
        (
            *_TRANSFORMERS,
            *_DATASETS[1:],
            *"datasets==4.8.4 mcore-bridge==1.6.5 peft==0.20.0 modelscope==1.40.2 modelscope-hub==0.5.1 pillow".split(),
            *"json_repair multidict yarl propcache frozenlist aiosignal attrs aiohappyeyeballs".split(),
            *_PYDANTIC,
        ),
        "swift_loop.py",
        (4, 2),
        {"": SCHEDULES[1:5:3], "lora": SCHEDULES[1:5:3], "lengths": SCHEDULES[4:5]},
    ),
}


def main() -> int:
    """Print a line for each framework, pipeline and schedule; returns 1 if numbers differ or a training fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*(framework.program for framework in FRAMEWORKS.values()), *SCHEDULES[1:]]
    parser.add_argument("chosen", nargs="*", metavar="PROGRAM | SCHEDULE", help=f"of {', '.join(known)}; by default all")
    chosen = parser.parse_args().chosen
    if unknown := set(chosen).difference(known):
        parser.error(f"there are {', '.join(known)}, not {', '.join(sorted(unknown))}")
    began = time.monotonic()
    engine = fetch_transformer_engine.fetch(fetch_transformer_engine.NEWEST)
    if engine is None:
        return 1
    schedules = [name for name in SCHEDULES[1:] if name in chosen] or SCHEDULES[1:]
    names = [name for name, framework in FRAMEWORKS.items() if framework.program in chosen] or list(FRAMEWORKS)
    print(f"megatron-core {CORE}, Python {platform.python_version()}, {date.today()}\n")
    _row(*COLUMNS)
    _row(*("---" for _ in COLUMNS))
    environment(CORE)
    compare = functools.partial(_compared, engine=str(fetch_transformer_engine.FOLDER / engine), schedules=schedules)
    with ThreadPoolExecutor(BESIDE) as beside:  # ranks wait for each other, and for what is fetched
        results = [result for found in beside.map(compare, names, map(FRAMEWORKS.get, names)) for result in found]
    equal, used = results.count("equal"), resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU"
    print(f"\n{equal} of {len(results)} rows equal megatron-core's own 1F1B; {spent}", flush=True)
    return int(equal < len(results))


def _compared(name: str, framework: Framework, engine: str, schedules: Sequence[str]) -> list[str]:
    """A result for each row of a framework, which are all trained in one start of 4 processes."""
    layouts = [(ranks, what) for ranks in framework.pipelines for what in framework.trains]
    rows = [
        ",".join((schedule, str(ranks), what))
        for ranks, what in layouts
        for schedule in (SCHEDULES[0], *framework.trains[what])
        if schedule in (SCHEDULES[0], *schedules) and (ranks == RANKS or schedule in REPLICATED)
    ]
    stock = forwards = None
    results = []
    for row, found, seconds in _train(environment(CORE), _fetched(name, framework), framework.program, engine, *rows):
        schedule, ranks, what = row.split(",")
        forwards = forwards or found["forwards"]
        if schedule == SCHEDULES[0]:
            stock = found["numbers"]
            continue
        assert stock is not None, "it is the first of its layout"
        exact = int(ranks) == RANKS and schedule in SCHEDULES[:4]
        alike = all(abs(one - other) <= 1e-6 * abs(other) for one, other in zip(found["forwards"], forwards, strict=True))
        equal = alike and _same(found["numbers"], stock, exact)
        results.append("equal" if equal else f"DIFFERENT: {found}, not {stock} and {forwards}")
        layout = f"PP {ranks}" + (f", DP {RANKS // int(ranks)}" if int(ranks) < RANKS else "")
        _row(name, what or "all weights", layout, schedule, found["steps"], results[-1], *seconds)
    return results + ["not run"] * (len(rows) - len(layouts) - len(results))


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _fetched(name: str, framework: Framework) -> Path:
    """The folder with a framework's packages; the wheels of a newer Python are unpacked."""
    folder = ROOT / "build" / "frameworks" / name.replace(" ", "-")
    ready = folder / ".ready"
    if not ready.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *framework.wheels], check=True)
        for wanted in framework.unpacked:
            with fetched(wanted, *NEWER_PYTHON) as wheel:
                shutil.unpack_archive(wheel, folder, "zip")
        ready.touch()
    return folder


def _train(python: str, packages: Path, program: str, *given: str) -> Iterator[tuple[str, Any, list[str]]]:
    """Rows as they end, each with what it found, seconds, and those of CPU; behind the last, what a process said that failed."""
    script = str(ROOT / "scripts" / "frameworks" / program)
    launch = [python, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    running = subprocess.Popen(
        ["timeout", "1800", *launch, script, *given],
        env=os.environ | {"PYTHONPATH": str(packages), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", **COMPILED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert running.stdout is not None
    found, errors = None, []
    for line in running.stdout:
        kind, _, said = line.rstrip().partition(" ")
        if kind == "found":
            found = json.loads(said)
        elif kind == "took":
            row, *seconds = said.split()
            yield row, found, seconds
        elif "Error" in line:
            errors.append(line)
    if running.wait():
        print("".join(errors)[-2000:], file=sys.stderr, flush=True)


def _same(found: Numbers, stock: Numbers, exact: bool) -> bool:
    """What was reported is equal, and norms, up to the order of their sum over other buckets or ranks."""
    close = 0.0 if exact else 1e-6
    return len(found) == len(stock) and all(
        reported == other and abs(norm - expected) <= close * expected
        for (reported, norm), (other, expected) in zip(found, stock, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
