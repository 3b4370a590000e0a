"""Compiled loops: numba makes their machine code once, for every process, and one process at a time."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron.pipeline.planner.schedule.core import compiled as module
from megatron.pipeline.planner.schedule.core.compiled import Compiled, compiled

FACTOR = 3


class Pair(NamedTuple):
    many: Any
    one: int


@compiled
def twice(value: float) -> float:
    return 2 * value


def weighed(pair: Any, table: Any, negative: bool, factor: float) -> float:
    total = 0.0
    for row in range(table.shape[0]):
        for column in range(table.shape[1]):
            total += twice(pair.many[row] * table[row, column]) * FACTOR + pair.one
    return -total * factor if negative else total * factor


def grown(table: Any) -> float:
    return float(np.append(table, 1.0)[-1])


ARGUMENTS = Pair(np.array([1, 10], np.int32), 5), np.arange(6.0).reshape(2, 3), True, 0.5
EXPECTED = -0.5 * (2 * FACTOR * (3 + 120) + 30)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_said", False)
    return tmp_path


def cannot_compile(*_: object) -> bytes:
    pytest.fail("it was compiled")


def test_machine_code_is_made_once_and_loaded_from_then_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Compiled(weighed)(*ARGUMENTS) == EXPECTED
    said = capfd.readouterr().err
    assert said.startswith("compiling the planner, once: about ")
    assert said.count("\n") == 1
    [file] = cache.glob("weighed-*.o")
    monkeypatch.setattr(Compiled, "_compile", cannot_compile)
    assert Compiled(weighed)(*ARGUMENTS) == EXPECTED
    assert not capfd.readouterr().err
    other = FunctionType(weighed.__code__, {**weighed.__globals__, "FACTOR": 4})  # a constant of another value
    with pytest.raises(pytest.fail.Exception, match="it was compiled"):
        Compiled(other)(*ARGUMENTS)
    file.write_bytes(file.read_bytes()[:-1])  # a part of a file
    with pytest.raises(pytest.fail.Exception, match="it was compiled"):
        Compiled(weighed)(*ARGUMENTS)


def test_it_compiles_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/nowhere")
    assert Compiled(twice.function)(4.0) == 8
    assert "no cache folder is writable; set NUMBA_CACHE_DIR" in capfd.readouterr().err


def test_machine_code_that_cannot_be_kept_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_half(path: Path, content: bytes) -> int:
        path.open("wb").write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_half)
    assert Compiled(twice.function)(4.0) == 8
    assert [path.name for path in cache.iterdir()] == ["compiling.lock"]


def test_what_allocates_is_refused() -> None:
    with pytest.raises(AssertionError, match="grown allocates or raises"):
        Compiled(grown)._native(("d1",), (np.zeros(3),))


@pytest.mark.parametrize("step", ["_compile", "_load"])
def test_where_machine_code_cannot_be_made_or_loaded_numba_calls_the_function(
    step: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> Any:
        raise AttributeError("no emit_object")

    monkeypatch.setattr(Compiled if step == "_compile" else module, step, fail)
    loop = Compiled(weighed)
    assert [loop(*ARGUMENTS), loop(*ARGUMENTS)] == [EXPECTED, EXPECTED]
    assert capfd.readouterr().err.count("machine code cannot be kept (no emit_object)") == 1


def test_one_of_several_processes_compiles_and_the_others_wait(cache: Path) -> None:
    """The lock of a process that died is none."""
    (cache / "compiling.lock").touch()
    program = "from schedule.test_compiled import twice; assert twice(4.0) == 8; import sys; print('numba' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0] * 3, outputs
    assert sorted(loaded.strip() for loaded, _ in outputs) == ["False", "False", "True"]
    assert sum(said.count("compiling the planner") for _, said in outputs) == 1
