"""The clock of a rehearsal: time, less what the thread has waited for a core."""

from __future__ import annotations

import time

import pytest

from megatron.pipeline.record import clock


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
