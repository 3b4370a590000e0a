"""A rank that raises, dies, stops or gets stuck ends every rank soon, with its name and its pass in the message."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pool import forked, free_port
from runtime import failing_ranks
from runtime.failing_ranks import RANKS, rank_alone

from megatron.pipeline.runtime.situation import Situation, View, diagnose, list_ranks
from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.costs import uniform
from megatron.pipeline.schedule.lower import lower
from megatron.pipeline.schedule.passes import Pass
from megatron.pipeline.schedule.program import Compute, Wait


def fail(directory: Path, how: str, failing: int, *more: str) -> tuple[list[int | None], str]:
    """Exit codes and errors of 4 ranks that no launcher ends. Rank 0 keeps the rendezvous store."""
    port, stderr = free_port(), directory / "stderr"
    ranks = [forked(rank_alone, rank, port, stderr, how, failing, *more) for rank in range(RANKS)]
    for rank, process in enumerate(ranks):
        if (how, rank) != ("stop", failing):
            process.join(timeout=60)
    for process in ranks:
        process.kill()  # the one that stays stopped
        process.join()
    return [process.exitcode for process in ranks], stderr.read_text()


def reason(stderr: str, rank: int) -> str:
    """Why a rank says that it ends; the process and host are cut out."""
    lines = [line for line in stderr.splitlines() if line.startswith(f"rank {rank} ends because ")]
    assert len(lines) == 1, stderr
    return re.sub(r" \(process \d+ on \S+\)", "", lines[0].partition(" ends because ")[2])


def own(stderr: str, rank: int) -> str:
    """Where a rank says that it was itself."""
    return stderr.partition(f"\n    rank {rank} was in ")[2].partition("\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failing", "message"),
    [
        ("raise", 2, r"rank 2 failed in Compute F3.0 after iteration 1: RuntimeError: out of luck"),
        # Of a silent rank only what it said last is known.
        ("stop", 0, r"rank 0 is silent: killed, stopped or cut off. It was last in .*"),
        ("stop", 2, r"rank 2 is silent: .* It was last in .*; ranks 0, 1, 3 wait for it. No pass has finished for \d+ s"),
        ("kill", 2, r"rank 2 is silent: killed, stopped or cut off. It was last in .*"),
        ("stuck", 2, r"rank 2 is slow or stuck in Compute F3.0 .*; ranks 0, 1, 3 wait for it. No pass has finished for \d+ s"),
    ],
)
def test_every_rank_names_the_culprit(tmp_path: Path, how: str, failing: int, message: str) -> None:
    codes, stderr = fail(tmp_path, how, failing)
    for rank, code in enumerate(codes):
        assert code != 0
        if rank != failing or how not in ("stop", "kill"):
            assert re.fullmatch(message, reason(stderr, rank))
    if how == "raise":
        assert stderr.count("Traceback (most recent call last)") == 1
        assert re.search(r'File ".*failing_ranks.py", line \d+, in fail\n', stderr)
    if how == "stuck":
        assert re.fullmatch(
            r"Wait gradient of microbatch 2 from stage 2, for B2.0 after iteration 1, waiting for rank 2; "
            r"last finished: B0.0 F3.0 B1.0 W0.0",
            own(stderr, 1),
        )
        assert own(stderr, 3).startswith("Wait activation of microbatch 3 from stage 2, for F3.0 after iteration 1, wait")
        assert re.search(r" \(at .*failing_ranks.py:\d+ in fail\)$", own(stderr, 2))


def whole(*values: str) -> object:
    return pytest.param(*values, marks=pytest.mark.whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "vocabulary", "message"),
    [
        ("raise", "2", r"rank 2 failed in Compute S3.0 after iteration 1: RuntimeError: out of luck"),
        ("stop", "1", r"rank 2 is silent: .* It was last in .*; ranks 0, 1, 3 wait for it. No pass has finished for \d+ s"),
        whole("kill", "2", r"rank 2 is silent: killed, stopped or cut off. It was last in .*"),
        ("stuck", "2", r"rank 2 is slow or stuck in Compute S3.0 .*; ranks 0, 1, 3 wait for it. No pass has finished for \d+ s"),
        whole("stuck", "interlaced", r"rank 2 is slow or stuck in Compute S3.0 .*; ranks 0, 1, 3 wait for it. .*"),
    ],
)
def test_the_culprit_where_all_take_part(tmp_path: Path, how: str, vocabulary: str, message: str) -> None:
    """Ranks that wait in a collective wait for the one that has not reached it, whoever that is."""
    codes, stderr = fail(tmp_path, how, 2, vocabulary)
    for rank, code in enumerate(codes):
        assert code != 0
        if rank != 2 or how not in ("stop", "kill"):
            assert re.fullmatch(message, reason(stderr, rank))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", r"rank 2 is silent: killed, stopped or cut off. It was last in .*"),
        (
            "poor",
            r"rank 2 failed in Copy D2H\d\.\d after iteration 1: RuntimeError: offloaded activations need .* of host memory on "
            r"this rank \(.* are in use, .* more were asked for\), and the limit is .*: raise --offload-host-memory, .*",
        ),
    ],
)
def test_the_culprit_while_copies_are_under_way(tmp_path: Path, how: str, message: str) -> None:
    codes, stderr = fail(tmp_path, how, 2, "off", "full")
    for rank, code in enumerate(codes):
        assert code != 0
        if rank != 2 or how != "kill":
            assert re.fullmatch(message, reason(stderr, rank))


@pytest.mark.slow
def test_a_killed_rank_under_torchrun() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [*launcher, failing_ranks.__file__, "kill", "1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode != 0
    assert reason(ended.stderr, 0).startswith("rank 1 is silent: killed, stopped or cut off. It was last in ")


@pytest.mark.slow
def test_a_slow_rank_is_left_alone(tmp_path: Path) -> None:
    codes, stderr = fail(tmp_path, "slow", 2)
    assert codes == [0, 0, 0, 0], stderr
    assert "ends because" not in stderr


def waits(rank: int) -> Situation:
    return Situation("Wait", in_iteration=True, waits_for=rank)


COMPUTES, OUTSIDE = Situation("Compute F0.0", in_iteration=True), Situation("the optimizer")


@pytest.mark.parametrize(
    ("situations", "silent", "culprits", "waiting", "in_iteration"),
    [
        ([waits(1), waits(2), COMPUTES, waits(2)], set(), (2,), (0, 1, 3), True),
        ([COMPUTES, waits(2), COMPUTES, waits(2)], set(), (2,), (1, 3), True),  # the one that most others wait for
        ([waits(1), COMPUTES, COMPUTES, waits(2)], set(), (1, 2), (0, 3), True),
        ([waits(1), waits(2), waits(1), waits(2)], set(), (1, 2), (0, 3), True),  # a circle
        ([waits(1), waits(2), waits(3), COMPUTES], {2}, (2,), (0, 1), True),
        ([OUTSIDE, waits(0), waits(1), OUTSIDE], set(), (0,), (1, 2), False),  # saves a checkpoint
        ([OUTSIDE, waits(0), waits(1), COMPUTES], set(), (3,), (), True),  # one saves, another is stuck
        ([OUTSIDE, waits(0)], {0}, (0,), (1,), True),  # was outside when it was last heard of
        ([OUTSIDE, OUTSIDE], set(), (0, 1), (), False),
    ],
)
def test_diagnosis(
    situations: list[Situation], silent: set[int], culprits: tuple[int], waiting: tuple[int], in_iteration: bool
) -> None:
    found = diagnose(situations, silent)
    assert (found.culprits, found.waiting, found.in_iteration) == (culprits, waiting, in_iteration)


def test_many_ranks_are_not_all_listed() -> None:
    assert list_ranks([3]) == "rank 3"
    assert list_ranks(range(64)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"
    text = str(diagnose([OUTSIDE] * 64, set()))
    assert text.endswith("and 56 more ranks")


def test_situation_in_a_program() -> None:
    """Whom a wait waits for and what is finished, from the program alone; and the same once it was told to another rank."""
    schedule = families.plan("zb-h1", 2, 3)
    program = lower(schedule, uniform(schedule.placement))[1]
    index = max(index for index, one in enumerate(program) if isinstance(one, Wait))
    needed = next(one for one in program[index:] if isinstance(one, Compute)).work
    before = [str(one.work) for one in program[:index] if isinstance(one, Compute)]
    here = Situation.in_program(program, program[index], index + 1, (7, index), to_world=lambda rank: 10 + rank)
    assert here.place == f"Wait {program[index].message}, for {needed}"  # type: ignore[union-attr]
    assert isinstance(needed, Pass)
    assert (here.waits_for, here.finished) == (10, tuple(before[-4:]))
    assert Situation.from_text(here.to_text()) == here
    done = Situation.in_program(program, program[-1], len(program) + 1, (7, 0), to_world=int)
    assert done.finished[-1] == str(schedule.passes[1][-1])


def test_what_is_seen_of_others_does_not_age_while_this_process_sleeps() -> None:
    view = View(2, longest_gap=1.0)

    def look(now: float, beats: tuple[int, int], progress: int) -> None:
        others = Situation("Compute", (progress,))
        view.look([f"{beat}|{others.to_text()}" for beat in beats], 0, Situation("Compute", (0,)), now)

    look(0.0, (1, 1), 0)
    look(0.5, (2, 2), 1)
    assert (view.silent(0.5), view.still) == (set(), 0.0)
    look(1.0, (3, 2), 1)
    assert (view.silent(0.5), view.still) == ({1}, 0.5)
    look(500.0, (4, 2), 1)  # this process was suspended
    assert (view.silent(1.5), view.silent(2.0), view.still) == ({1}, set(), 1.5)
