"""What the watchdogs of 4 ranks make of what they hear, on a clock of their own; with real processes: test_failures.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.pipeline.monitor import watchdog
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.watchdog import Watchdog

RANKS = 4
LOOK, STUCK_PASS, STUCK_ELSEWHERE, SILENCE = 0.5, 4.0, 60.0, 8.0  # seconds
COMPUTES, TOGETHER = (Situation(place, in_iteration=True) for place in ("Compute F3.0", "Compute S3.0"))
OUTSIDE = Situation("the optimizer")
JOINS = Situation("Join S3", in_iteration=True, waits_for_all=True)


def waits(rank: int) -> Situation:
    return Situation("Wait", in_iteration=True, waits_for=rank)


LINE = [waits(1), waits(2), COMPUTES, waits(2)]  # all wait for rank 2, directly or not
COLLECTIVE = [JOINS, JOINS, TOGETHER, JOINS]
SILENT = "global rank 2 is silent: killed, stopped or cut off. It was last in"
STUCK = "global rank 2 is slow or stuck in"
ALL_WAIT = "; global ranks 0, 1, 3 wait for it"


class World:
    """The watchdogs of all ranks, in this process.

    Args:
        keeper: the rank whose process keeps the store; None if the launcher does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, keeper: int | None = 0) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: self.seconds))
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: RANKS)
        self.situations = [COMPUTES] * RANKS
        self.heard = ["0|" + COMPUTES.to_text()] * RANKS
        self.watchdogs: list[Watchdog] = []
        for rank in range(RANKS):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            one = Watchdog(lambda rank=rank: self.situations[rank], STUCK_PASS, STUCK_ELSEWHERE, SILENCE)  # type: ignore[misc]
            one._process = ""
            one._heartbeat = SimpleNamespace(news=None, lost=None, keeper=keeper, heard=self.heard)  # type: ignore[assignment]
            self.watchdogs.append(one)
        monkeypatch.setattr(watchdog, "_line_of_main_thread", str)

    def look(self, situations: Sequence[Situation], silent: Collection[int] = (), store_answers: bool = True) -> list[str | None]:
        """What every rank that is not silent says after another look."""
        self.seconds += LOOK
        self.situations = list(situations)
        if store_answers:
            for rank in set(range(RANKS)) - set(silent):
                self.heard[rank] = f"{self.seconds}|{situations[rank].to_text()}"
        return [one._judge(SILENCE) for rank, one in enumerate(self.watchdogs) if rank not in silent]

    def until_news(self, situations: Sequence[Situation], **how: object) -> tuple[float, str]:
        """The seconds until the first rank has a verdict, and its first line, on which all agree."""
        began = self.seconds
        while self.seconds < began + 1000:
            news = self.look(situations, **how)  # type: ignore[arg-type]
            if any(news):
                assert len({one.partition("\n")[0] for one in news if one}) == 1
                return self.seconds - began, next(one for one in news if one).partition("\n")[0]
        raise AssertionError("no verdict")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World(monkeypatch)
    for number in range(20):
        moving = [replace(COMPUTES, progress=(number,))] * RANKS
        assert world.look(moving) == [None] * RANKS
    return world


@pytest.mark.parametrize(
    ("situations", "silent", "seconds", "news"),
    [
        (LINE, [], STUCK_PASS, f"{STUCK} Compute F3.0{ALL_WAIT}. No pass has finished for 4 s"),
        (LINE, [2], STUCK_PASS, f"{SILENT} Compute F3.0{ALL_WAIT}. No pass has finished for 4 s"),
        (COLLECTIVE, [], STUCK_PASS, f"{STUCK} Compute S3.0{ALL_WAIT}. No pass has finished for 4 s"),
        (COLLECTIVE, [2], STUCK_PASS, f"{SILENT} Compute F3.0{ALL_WAIT}. No pass has finished for 4 s"),
        (
            [waits(1), waits(2), OUTSIDE, waits(2)],
            [],
            STUCK_ELSEWHERE,
            f"{STUCK} the optimizer{ALL_WAIT}. No pass has finished for 60 s",
        ),
    ],
)
def test_the_culprit_is_named_in_time(
    world: World, situations: list[Situation], silent: list[int], seconds: float, news: str
) -> None:
    """A silent rank is quoted with what it said last, before all of them stopped to move."""
    found = world.until_news(situations, silent=silent)
    assert found == (pytest.approx(seconds, abs=2 * LOOK), news)


def test_a_silent_rank_is_lost_while_others_still_move(world: World) -> None:
    for number in range(int(SILENCE / LOOK) + 1):
        news = world.look([replace(COMPUTES, progress=(1, number))] * RANKS, silent=[2])
        assert (news == [None] * 3) == (number * LOOK < SILENCE - LOOK), number
    assert all(one is not None and one.startswith(f"{SILENT} Compute F3.0") for one in news)


def test_a_rank_that_moves_is_left_alone(world: World) -> None:
    """However slowly, and however long the others wait for it; and one that saves has more time."""
    for number in range(200):
        slow = replace(COMPUTES, progress=(1, number // 7))
        assert world.look([waits(1), waits(2), slow, waits(2)]) == [None] * RANKS
    for _ in range(int(STUCK_ELSEWHERE / LOOK) - 1):
        assert world.look([waits(1), waits(2), OUTSIDE, waits(2)]) == [None] * RANKS


def test_without_the_rank_that_keeps_the_store_it_is_that_rank(world: World) -> None:
    """No rank hears anything more: what the others wrote last says that they compute."""
    for _ in range(int(STUCK_PASS / LOOK)):
        assert world.look([COMPUTES, waits(0), waits(1), waits(2)], silent=[0], store_answers=False) == [None] * 3
    for news in world.look([COMPUTES, waits(0), waits(1), waits(2)], silent=[0], store_answers=False):
        assert news is not None and news.startswith(
            "global rank 0 is silent: killed, stopped or cut off. It was last in Compute F3.0"
        )


def test_a_launcher_that_is_stopped_ends_nothing_that_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, keeper=None)
    for number in range(50):
        assert world.look([replace(COMPUTES, progress=(number,))] * RANKS, store_answers=number < 10) == [None] * RANKS
    _, news = world.until_news([COMPUTES] * RANKS, store_answers=False)
    assert news.startswith("the launcher, which keeps the rendezvous store, is silent. No pass has finished for ")


def test_a_store_that_is_gone_is_said(world: World) -> None:
    world.watchdogs[1]._heartbeat.lost = ConnectionError("reset")
    assert world.look(LINE)[1] == "the rank or launcher that keeps the rendezvous store is gone (reset)"
