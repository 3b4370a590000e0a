"""``mpipe tune --verify``: short trainings of several configurations, and predicted against measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from megatron.pipeline.tune import trial
from megatron.pipeline.tune.trial import Trial

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"


def write(path: Path, **content: Any) -> Path:
    path.write_text(yaml.safe_dump({key.replace("_", "-"): value for key, value in content.items()}))
    return path


class Launcher:
    """Stands where trainings would be started, and takes note of what was asked for.

    Args:
        seconds: of the iterations of every run in turn; an exception's text where it fails.
    """

    def __init__(self, seconds: Sequence[float | str]) -> None:
        self.seconds, self.commands, self.configs = iter(seconds), list[list[str]](), list[dict[str, Any]]()

    def __call__(self, command: Sequence[str], output: Any, timeout: float) -> int | None:
        self.commands.append(list(command))
        self.configs.append(yaml.safe_load(Path(command[command.index("--config") + 1]).read_text()))
        seconds = next(self.seconds)
        if isinstance(seconds, str):
            output.write(seconds)
            output.flush()
            return None if seconds == "too slow" else 1
        with Path(command[command.index("--metrics") + 1]).open("w") as file:
            for iteration in range(int(command[command.index("--train-iters") + 1])):
                record = {"iteration_seconds": 100.0 if iteration < trial.WARM_UP else seconds, "tokens_per_second": 10 / seconds}
                peaks = [iteration, 20] if iteration else None
                file.write(json.dumps(record | {"loss": 3.0 - iteration, "peak_activation_bytes": peaks}) + "\n")
        return 0


def test_rounds_alternate_and_the_better_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher([1.0, 2.0, 1.5, 4.0])
    monkeypatch.setattr(trial, "_finish", launcher)
    configs = [write(tmp_path / "a.yaml", seed=1), write(tmp_path / "b.yaml", seed=2)]
    one, other = trial.run(configs, ranks=2, iterations=5, flags=["--lr", "1"])
    assert [config["seed"] for config in launcher.configs] == [1, 2, 2, 1]
    assert one == Trial(1.0, 10.0, (4, 20), (3.0, 2.0, 1.0, 0.0, -1.0))
    assert (other.seconds, other.tokens_per_second) == (1.5, pytest.approx(10 / 1.5))
    command = launcher.commands[0]
    assert command[command.index("--nproc-per-node") + 1] == "2" and command[command.index("--lr") + 1] == "1"
    assert "--mock-data" in command
    assert trial.script() == TINY.parents[1] / "pretrain_gpt.py"


@pytest.mark.parametrize("told", ["the file", "the command line"])
def test_data_that_is_given_is_read_and_nothing_is_saved(told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher([1.0])
    monkeypatch.setattr(trial, "_finish", launcher)
    given = {"data_path": "mine"} if told == "the file" else {}
    path = write(tmp_path / "a.yaml", **given, save="there", save_interval=1, lr_warmup_iters=2000, num_layers=4)
    trial.run([path], 1, 3, [] if given else ["--data-path=mine"], rounds=1)
    assert "--mock-data" not in launcher.commands[0]
    assert set(launcher.configs[0]) == {"num-layers", *(["data-path"] if given else [])}


def test_a_failure_is_told_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(["some lines\npretrain_gpt.py: --lr is missing\ntorchrun's report", 2.0, "too slow", 3.0])
    monkeypatch.setattr(trial, "_finish", launcher)
    configs = [write(tmp_path / f"{name}.yaml", seed=1) for name in "abc"]
    bad, good, slow = trial.run(configs, 2, 3, timeout=7)
    assert bad.failure == "ended with status 1 after 0 iterations\npretrain_gpt.py: --lr is missing"
    assert (good.seconds, good.failure) == (2.0, "")
    assert slow.failure == "took longer than 7 s\ntoo slow"
    assert len(launcher.commands) == 4, "what has failed is not tried again"


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^2 iterations are too few for a trial: give more than 2"):
        trial.run([], 1, 2)
    with pytest.raises(ValueError, match=r"none\.yaml"):
        trial.run([tmp_path / "none.yaml"], 1, 3)
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match=r"list.yaml: expected a mapping"):
        trial.run([tmp_path / "list.yaml"], 1, 3)
    monkeypatch.setattr(trial, "__file__", str(tmp_path / "lib/megatron/pipeline/tune/trial.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=rf"^there is no pretrain_gpt.py in {tmp_path}/lib or {tmp_path}: run this in a checkout"
    ):
        trial.run([], 1, 3)


def test_nothing_is_left_of_what_takes_too_long(tmp_path: Path) -> None:
    """Ranks have sessions of their own, as under torchrun."""
    code = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)"
    )
    before = set(psutil.Process().children(recursive=True))
    start = time.monotonic()
    with (tmp_path / "log").open("w") as output:
        assert trial._finish([sys.executable, "-c", code], output, timeout=2.0) is None
    assert time.monotonic() - start < 60
    left = set(psutil.Process().children(recursive=True)) - before
    assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]


def test_the_table_has_predicted_and_measured_side_by_side() -> None:
    measured = [Trial(2.0, 500.0, (2**20, 2**21), (3.0, 2.5, 2.25, 2.0)), Trial(failure="ended")]
    heads, rows = trial.table(["stock", "zb-v"], [1.0, 0.5], measured)
    assert rows == [
        ["stock", "1", "2", "0.50", "500", "1.0 2.0", "3.00000 2.50000 2.25000"],
        ["zb-v", "0.5", "failed", "", "", "", ""],
    ]
    assert {len(row) for row in rows} == {len(heads)}


def test_losses_of_one_model_agree_or_a_warning_says_which_do_not() -> None:
    names = ["stock", "zb-v", "failed"]
    failed = Trial(failure="ended")
    same = [Trial(losses=(3.0, 2.0)), Trial(losses=(3.0001, 2.0001)), failed]
    assert trial.disagreement(names, same) == ""
    other = [Trial(losses=(3.0, 2.0)), Trial(losses=(3.0, 2.1)), failed]
    assert trial.disagreement(names, other).startswith("losses differ by 4.8e-02 in iteration 2 (2.0 of stock, 2.1 of zb-v)")
    assert trial.disagreement(names, [failed] * 3) == ""


@pytest.mark.slow
def test_the_error_of_a_rank_is_found_in_what_torchrun_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fails.py"
    program.write_text("import os\nif os.environ['RANK'] == '1':\n    raise RuntimeError('no luck on rank 1')\n")
    monkeypatch.setattr(trial, "script", lambda: program)
    (failed,) = trial.run([write(tmp_path / "a.yaml", seed=1)], ranks=2, iterations=3, timeout=300)
    assert failed.failure.startswith("ended with status 1 after 0 iterations\n")
    assert failed.failure.endswith("RuntimeError: no luck on rank 1")
