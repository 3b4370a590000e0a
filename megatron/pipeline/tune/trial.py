"""Measured against predicted times: short trainings of several configurations on the ranks at hand, one after another.

Without torch: the trainings are processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from megatron.pipeline.flags.flags import neutral
from megatron.pipeline.flags.settings import Role

WARM_UP = 2  # iterations that are slower than the rest
TOLERANCE = 1e-4  # of losses: the same model on the same data, summed up in another order
_ROUNDS = 2  # of all configurations, in alternating order
_LAST_LINES, _LONGEST = 5, 200  # of a log, and characters of each
# The flags that a trial leaves out: it writes and reads nothing but its data, and has a length of its own.
_UNWANTED = neutral(Role.FILES, Role.LENGTH).keys() - {"data_cache_path"}
_DATA = ("data_path", "train_data_path", "mock_data")


@dataclass(frozen=True)
class Trial:
    """The result of a trial of one configuration.

    Attributes:
        seconds: of an iteration, the median of those after ``WARM_UP``, in the better of its rounds.
        tokens_per_second: in the same round.
        peak_activation_bytes: by pipeline rank, the most of any iteration.
        losses: of its iterations.
        failure: why it has none of these: the last lines of its log.
    """

    seconds: float = 0.0
    tokens_per_second: float = 0.0
    peak_activation_bytes: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    failure: str = ""


def run(
    configs: Sequence[Path], ranks: int, iterations: int, flags: Sequence[str] = (), timeout: float = 600.0, rounds: int = _ROUNDS
) -> list[Trial]:
    """Train a few iterations under each of these configurations.

    Every one runs in every round, each second round in the opposite order, and the better of its rounds counts: so other load
    on the machine disturbs all configurations alike. A configuration that fails is not tried again.

    Args:
        configs: YAML files for ``pretrain_gpt.py``. Without data of their own they train on synthetic tokens; nothing is saved.
        ranks: processes on this machine.
        iterations: of each, more than ``WARM_UP``.
        flags: of ``pretrain_gpt.py``, for all of them.
        timeout: seconds for each, after which its processes are killed.

    Returns:
        In the order of ``configs``.

    Raises:
        ValueError: there is no ``pretrain_gpt.py``, a file cannot be read, or the iterations are too few.
    """
    if iterations <= WARM_UP:
        raise ValueError(f"{iterations} iterations are too few for a trial: give more than {WARM_UP}, which are to warm up")
    program = script()
    texts = [_config(path) for path in configs]
    found: list[list[Trial]] = [[] for _ in configs]
    for number in range(rounds):
        order = range(len(configs)) if number % 2 == 0 else reversed(range(len(configs)))
        for index in order:
            if not any(one.failure for one in found[index]):
                found[index].append(_train(program, texts[index], ranks, iterations, flags, timeout))
    return [next((one for one in trials if one.failure), None) or min(trials, key=lambda one: one.seconds) for trials in found]


def script() -> Path:
    """``pretrain_gpt.py`` of this checkout.

    Raises:
        ValueError: this package is installed without it.
    """
    for folder in (Path(__file__).parents[3], Path.cwd()):
        if (folder / "pretrain_gpt.py").is_file():
            return folder / "pretrain_gpt.py"
    raise ValueError(
        f"there is no pretrain_gpt.py in {Path(__file__).parents[3]} or {Path.cwd()}: run this in a checkout of the repository, "
        "or install the package from one with pip install -e ."
    )


def torchrun(ranks: int) -> list[str]:
    """The beginning of a command that runs a program on ranks of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def table(
    names: Sequence[str], predicted_seconds: Sequence[float], measured: Sequence[Trial]
) -> tuple[list[str], list[list[str]]]:
    """Predicted against measured: heads and rows. A configuration that failed has no numbers."""
    heads = ["configuration", "predicted s", "measured s", "predicted/measured", "tokens/s", "activation MiB by rank", "losses"]
    rows = []
    for name, predicted, one in zip(names, predicted_seconds, measured, strict=True):
        if one.failure:
            rows.append([name, f"{predicted:.4g}", "failed", "", "", "", ""])
            continue
        peaks = " ".join(f"{peak / 2**20:.1f}" for peak in one.peak_activation_bytes)
        losses = " ".join(f"{loss:.5f}" for loss in one.losses[: WARM_UP + 1])
        times = [f"{predicted:.4g}", f"{one.seconds:.4g}", f"{predicted / one.seconds:.2f}", f"{one.tokens_per_second:.5g}"]
        rows.append([name, *times, peaks, losses])
    return heads, rows


def disagreement(names: Sequence[str], measured: Sequence[Trial]) -> str:
    """A warning where first losses differ by more than ``TOLERANCE``, with those that differ most; else nothing."""
    ran = [(name, one.losses) for name, one in zip(names, measured, strict=True) if one.losses]
    for iteration, losses in enumerate(zip(*(losses for _, losses in ran), strict=False), start=1):
        least, most = min(losses), max(losses)
        if not most - least <= TOLERANCE * abs(most):
            low, high = (ran[losses.index(loss)][0] for loss in (least, most))
            return (
                f"losses differ by {(most - least) / abs(most):.1e} in iteration {iteration} ({least!r} of {low}, {most!r} of "
                f"{high}): the same model on the same data should be within {TOLERANCE:g}"
            )
    return ""


def _config(path: Path) -> dict[str, Any]:
    """A configuration without the flags that a trial leaves out."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping of flags to values such as `num-layers: 4`")
    kept = {key: value for key, value in content.items() if _key(key) not in _UNWANTED}
    for key, value in list(kept.items()):
        near = path.resolve().parent / str(value)
        if _key(key) == "pipeline_costs" and near.is_file():  # of a trial, the configuration lies elsewhere
            kept[key] = str(near)
    return kept


def _train(program: Path, config: dict[str, Any], ranks: int, iterations: int, flags: Sequence[str], timeout: float) -> Trial:
    given = {_key(key) for key in config} | {_key(flag.partition("=")[0]) for flag in flags if flag.startswith("--")}
    with tempfile.TemporaryDirectory(prefix="trial-") as directory:
        metrics, log, file = (Path(directory) / name for name in ("metrics.jsonl", "log.txt", "config.yaml"))
        file.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [*torchrun(ranks), str(program), "--config", str(file), *flags]
        command += [] if given.intersection(_DATA) else ["--mock-data"]
        command += ["--train-iters", str(iterations), "--metrics", str(metrics), "--log-interval", "1", "--eval-iters", "0"]
        with log.open("w") as output:
            code = _finish(command, output, timeout)
        if code is None:
            return Trial(failure=f"took longer than {timeout:g} s\n{_end(log)}")
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        if code or len(records) < iterations:
            return Trial(failure=f"ended with status {code} after {len(records)} iterations\n{_end(log)}")
        return _read(records)


def _read(records: Sequence[dict[str, Any]]) -> Trial:
    steady = records[WARM_UP:]
    peaks = [record["peak_activation_bytes"] for record in records if record["peak_activation_bytes"]]
    return Trial(
        seconds=median(record["iteration_seconds"] for record in steady),
        tokens_per_second=median(record["tokens_per_second"] for record in steady),
        peak_activation_bytes=tuple(map(max, zip(*peaks, strict=True))),
        losses=tuple(float("nan") if record["loss"] is None else record["loss"] for record in records),
    )


def _finish(command: Sequence[str], output: Any, timeout: float) -> int | None:
    """Run a command and return its exit status, or None after the timeout. All of its processes end in any case."""
    import psutil  # type: ignore[import-untyped]  # planning does without

    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                # torchrun gives its ranks sessions of their own, so there is no one group to kill.
                for one in [root := psutil.Process(process.pid), *root.children(recursive=True)]:
                    with suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait()


def _end(log: Path) -> str:
    """Reason of a failure: what ``pretrain_gpt.py`` itself says of bad flags, or the last lines before torchrun's report."""
    lines = [line.rstrip()[:_LONGEST] for line in log.read_text(errors="replace").splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("pretrain_gpt.py: ")]
    errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return "\n".join(own[:1] or errors[-1:] or lines[-_LAST_LINES:])


def _key(name: object) -> str:
    return str(name).lstrip("-").replace("-", "_")
