"""What only a page or a picture needs may be missing: everything else is imported, plans and trains without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import launched
from launch.launched import rank as launched_rank
from pool import Pool
from training.short_runs import train

ABSENT = ("matplotlib", "starlette", "uvicorn")


def absent() -> dict[str, None]:
    """For ``sys.modules``: as if the packages were not installed, whatever this process has imported of them."""
    return dict.fromkeys([*ABSENT, *(name for name in sys.modules if name.partition(".")[0] in ABSENT)])


@pytest.mark.rest
def test_every_room_but_the_page_is_imported_without_them() -> None:
    code = (
        f"import importlib, pkgutil, sys; sys.modules |= dict.fromkeys({ABSENT})\n"
        "from megatron.pipeline import patches, __path__ as path\n"
        "patches.install()\n"
        "rooms = [module for module in pkgutil.walk_packages([path[0]], 'megatron.pipeline.')]\n"
        "for module in rooms:\n"
        "    if not module.name.endswith('__main__') and '.serve' not in module.name:\n"
        "        importlib.import_module(module.name)\n"
        "from megatron.pipeline.cli import main\n"
        "sys.exit(len(rooms) < 200 or main(['plan', '--schedule', 'zb-v', '--pp', '4', '--microbatches', '8']))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("zb-v: 4 ranks")


def train_without(flags: str) -> tuple[str, list[str]]:
    """The error of a training without these packages, and its warnings about pictures."""
    from megatron.pipeline.session.rehearsal import files

    warned: list[str] = []
    with pytest.MonkeyPatch.context() as changed:
        for name in absent():
            changed.setitem(sys.modules, name, None)  # type: ignore[arg-type]
        changed.setattr(files.logger, "warning", lambda text, *values: warned.append(text % values))
        return train(flags), warned


def test_a_rehearsal_without_them_says_what_draws(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --pipeline-model-parallel-size 4 --rehearse --rehearse-dir {tmp_path / 'found'} --exit-interval 5"
    errors, warned = zip(*pool.run(4, train_without, flags), strict=True)
    assert errors == ("",) * 4
    warnings = [line for lines in warned for line in lines]
    assert warnings and all("no picture in" in line and "pip install 'matplotlib" in line for line in warnings)
    assert list((tmp_path / "found").glob("*.json")) and not list((tmp_path / "found").glob("*.png"))


def rank_without(*arguments: Any) -> None:
    sys.modules.update(absent())  # type: ignore[arg-type]
    launched_rank(*arguments)


def test_a_launched_script_trains_without_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "rank", rank_without)
    flags = f"{launched.SIZES} --train-iters 2 --pipeline-schedule zb-v --log-interval 1 --pipeline-trace {tmp_path}/trace"
    codes, output, steps = launched.run(tmp_path, launched.STAND_IN, flags, ranks=2)
    assert (codes, len(steps)) == ([0, 0], 2), output
    assert output.count("pip install 'matplotlib") == 1 and not list((tmp_path / "trace").glob("*.png"))
