"""The clock of a rehearsal: time, less what the thread has waited for a core."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from megatron.pipeline.monitor import clock
from megatron.pipeline.monitor.recorder import Recorder
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.session.rehearsal.device_lock import DeviceLock


def test_waits_for_a_core_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, moment = 0.25, 100.0
    monkeypatch.setattr(clock.os, "pread", lambda *_: b"7000000000 %d 12" % int(1e9 * waited))
    monkeypatch.setattr(clock.time, "time", lambda: moment)
    now = clock.undisturbed()
    assert now() == 99.75
    waited, moment = 1.25, 102.0
    assert now() == 100.75


def test_a_wait_between_its_two_readings_is_not_taken_from_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core is taken away for a second behind the first reading of the time."""
    waits, moments = iter([0, 0, 1, 1]), iter([100.0, 101.0])
    monkeypatch.setattr(clock.os, "pread", lambda *_: b"7 %d 12" % int(1e9 * next(waits)))
    monkeypatch.setattr(clock.time, "time", lambda: next(moments))
    assert clock.undisturbed()() == 100.0


def test_it_says_what_the_kernel_does() -> None:
    now = clock.undisturbed()
    before, start = time.time(), now()
    time.sleep(0.01)
    assert 0 < now() - start <= time.time() - before


@pytest.mark.parametrize("content", [None, b"", b"7"])
def test_where_the_kernel_says_nothing_it_is_the_plain_time(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> None:
    def nothing(*_: object) -> bytes:
        if content is None:
            raise FileNotFoundError
        return content

    monkeypatch.setattr(clock.os, "open" if content is None else "pread", nothing)
    assert clock.undisturbed() is time.time


def test_what_the_host_computes_between_passes_is_part_of_the_next() -> None:
    """On a CPU a device waits for it: 20 predictions were 1 to 7 % too short without."""
    moment, computed = 100.0, 5.0
    recorder = Recorder((), clock=lambda: moment, host=lambda: computed)
    for microbatch in range(2):
        moment += 10.0  # 9 s of them it waits: for a message, or for its turn
        computed += 1.0
        with recorder.measure(Pass(Kind.F, microbatch)):
            moment += 2.0
            computed += 0.5
    assert [(one.start, one.end) for one in recorder.record().passes] == [(110.0, 112.0), (121.0, 124.0)]


def test_taking_turns_is_not_the_hosts_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = 0.0

    def wait(*_: object) -> None:
        nonlocal computed
        computed += 8.0

    monkeypatch.setattr("megatron.pipeline.session.rehearsal.device_lock.time.thread_time", lambda: computed)
    monkeypatch.setattr("megatron.pipeline.session.rehearsal.device_lock.fcntl.flock", wait)
    with (tmp_path / "turns").open("ab") as file:
        turns = DeviceLock(file)
        computed += 1.0
        with turns.turn():
            computed += 2.0
    assert turns.host() == 3.0
