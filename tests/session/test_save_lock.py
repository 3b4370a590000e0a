"""One run at a time saves into a directory; what a run has left that ended without a word keeps no other from it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from pool import Pool
from training.short_runs import metrics, ran, train

from megatron.pipeline.distributed.groups import barrier
from megatron.pipeline.session import save_lock
from megatron.pipeline.session.save_lock import LOCK, CannotSave, check, release
from megatron.pipeline.trainer.iterations import Iterations


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine, which lives."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def written(directory: Path, process: int, **different: object) -> str:
    """Have a directory look as if another process's run saves there; returns what the file says."""
    own = save_lock._this_process() | {"host": "there", "process": process, "started": save_lock._started(process)}
    text = json.dumps(own | different)
    (directory / LOCK).write_text(text)
    return text


def test_a_run_that_lives_is_named(tmp_path: Path, other: subprocess.Popen[bytes]) -> None:
    text = written(tmp_path, other.pid, since="today")
    expected = f"another run saves into {tmp_path}: host there, process {other.pid}, since today; give another --save"
    with pytest.raises(CannotSave, match=expected):
        check(str(tmp_path))
    release(str(tmp_path))  # not ours
    assert (tmp_path / LOCK).read_text() == text


def end(process: subprocess.Popen[bytes]) -> dict[str, object]:
    process.kill()
    process.wait()
    return {}


def leave_a_zombie(process: subprocess.Popen[bytes]) -> dict[str, object]:
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return {}


def number_it_again(process: subprocess.Popen[bytes]) -> dict[str, object]:
    return {"started": "1"}


@pytest.mark.parametrize("ends", [end, leave_a_zombie, number_it_again])
def test_of_a_run_that_has_ended_the_directory_is_taken_over(
    tmp_path: Path,
    other: subprocess.Popen[bytes],
    caplog: pytest.LogCaptureFixture,
    ends: Callable[[subprocess.Popen[bytes]], dict[str, object]],
) -> None:
    text = written(tmp_path, other.pid)
    (tmp_path / LOCK).write_text(json.dumps(json.loads(text) | ends(other)))
    with caplog.at_level(logging.WARNING):
        check(str(tmp_path))
    (line,) = caplog.messages
    assert line.startswith(f"taking over {tmp_path} from a run that has ended without a word: host there, process {other.pid}")
    assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    release(str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize("text", [None, "", "[]"], ids=["of another machine", "just begun", "garbage"])
def test_what_this_machine_cannot_ask_for_shows_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, lives: bool
) -> None:
    monkeypatch.setattr(save_lock, "_BEAT", 0.05)
    monkeypatch.setattr(save_lock, "_SILENCE", 60.0 if lives else 0.2)
    written(tmp_path, 1, machine="another")
    if text is not None:
        (tmp_path / LOCK).write_text(text)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / LOCK)

    touching = threading.Thread(target=touch)
    if not lives:
        check(str(tmp_path))
        release(str(tmp_path))
        return
    touching.start()
    try:
        with pytest.raises(CannotSave, match=rf"another run saves into .* If that machine is lost, remove {tmp_path / LOCK}"):
            check(str(tmp_path))
    finally:
        ended.set()
        touching.join()


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe\x00", b"[" * 100_000, b'{"process": "1\\u0000", "machine": "%s"}', b'{"host": "\\u001b[2J"}'],
    ids=["bytes", "nested", "no process", "control characters"],
)
def test_of_a_damaged_file_the_directory_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    monkeypatch.setattr(save_lock, "_BEAT", 0.05)
    monkeypatch.setattr(save_lock, "_SILENCE", 0.2)
    (tmp_path / LOCK).write_bytes(text.replace(b"%s", save_lock._machine().encode()))
    os.utime(tmp_path / LOCK, (0, 0))  # as servers show that know no times
    check(str(tmp_path))
    assert json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    assert all(message.isprintable() for message in caplog.messages)
    release(str(tmp_path))
    assert not list(tmp_path.iterdir())


def link_to_nowhere(path: Path) -> None:
    path.symlink_to("/nowhere")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, link_to_nowhere])
def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK)
    with pytest.raises(OSError, match=r"it is not a file|symbolic links"):
        check(str(tmp_path))
    release(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_another_machines_run_that_ends_meanwhile_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "_BEAT", 0.05)
    written(tmp_path, 1, machine="another")
    leaving = threading.Timer(0.2, (tmp_path / LOCK).unlink)
    leaving.start()
    check(str(tmp_path))
    assert not leaving.is_alive() and json.loads((tmp_path / LOCK).read_text())["process"] == os.getpid()
    release(str(tmp_path))


def test_a_run_shows_that_it_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_lock, "_BEAT", 0.05)
    check(str(tmp_path))
    before, until = save_lock._look(tmp_path / LOCK), time.monotonic() + 60
    while (seen := save_lock._look(tmp_path / LOCK)) == before and time.monotonic() < until:
        time.sleep(0.05)
    assert seen[0] == before[0] and seen[1] != before[1]
    release(str(tmp_path))


def check_together(directory: str) -> str:
    """What this rank is told, which asks for the directory at the same time as all others, as if each were a run."""
    barrier()
    try:
        check(directory)
    except CannotSave as error:
        return str(error)
    return ""


@pytest.mark.parametrize("left", [False, True], ids=["empty", "of a run that has ended"])
def test_of_runs_that_begin_at_once_one_saves(pool: Pool, tmp_path: Path, other: subprocess.Popen[bytes], left: bool) -> None:
    for number in range(5):
        directory = tmp_path / str(number)
        directory.mkdir()
        if left:
            written(directory, other.pid, started="1")
        told = sorted(pool.run(4, check_together, str(directory)))
        assert told[0] == "" and all(f"another run saves into {directory}: host " in error for error in told[1:]), told
        assert [path.name for path in directory.iterdir()] == [LOCK]


@pytest.mark.rest
def test_a_second_run_trains_nothing(pool: Pool, data: str, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    check(str(tmp_path / "saved"))
    flags = f"{data} --pipeline-model-parallel-size 4 --save {tmp_path}/saved --metrics {tmp_path}/m.jsonl --exit-interval 1"
    errors = pool.run(4, train, flags)
    assert errors == [errors[0]] * 4 and f"process {os.getpid()}, since " in errors[0]
    assert "\n" not in errors[0] and not (tmp_path / "m.jsonl").exists()
    assert ran(pool.run(4, train, flags.replace("--save", "--load")))  # which only reads there
    release(str(tmp_path / "saved"))
    assert ran(pool.run(4, train, flags))
    assert not (tmp_path / "saved" / LOCK).exists()
    assert len(metrics(tmp_path / "m.jsonl")) == 2


def train_while_another_takes_over(flags: str, directory: str, text: str) -> str:
    """Train on this rank, while the file of the directory is another run's from the first iteration on; empty: it is removed."""
    real_run = Iterations.run

    def run(*args: Any) -> Any:
        (Path(directory) / LOCK).unlink(missing_ok=True)
        if text:
            (Path(directory) / LOCK).write_text(text)
        return real_run(*args)

    with patch.object(Iterations, "run", run):
        return train(flags)


def test_a_run_whose_directory_another_one_took_over_saves_nothing(
    pool: Pool, data: str, tmp_path: Path, other: subprocess.Popen[bytes]
) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --save {tmp_path} --exit-interval 1"
    text = written(tmp_path, other.pid)
    (tmp_path / LOCK).unlink()
    errors = pool.run(2, train_while_another_takes_over, flags, str(tmp_path), text)
    for error in errors:
        assert f"iter_0000001 could not be written (another run saves into {tmp_path}: host there, process {other.pid}" in error
    assert [path.name for path in tmp_path.iterdir()] == [LOCK] and (tmp_path / LOCK).read_text() == text


def test_a_run_whose_file_was_removed_goes_on(pool: Pool, data: str, tmp_path: Path) -> None:
    flags = f"{data} --pipeline-model-parallel-size 2 --save {tmp_path} --exit-interval 1"
    assert ran(pool.run(2, train_while_another_takes_over, flags, str(tmp_path), ""))
    assert not (tmp_path / LOCK).exists() and (tmp_path / "iter_0000001").is_dir()
