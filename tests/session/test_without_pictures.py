"""What only a page or a picture needs may be missing: everything else is imported, plans and trains without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
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
