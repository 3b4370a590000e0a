"""A rank that raises, dies, stops or gets stuck ends every rank soon, with one message that names it and its pass.

Not every row has real processes daily: test_verdicts.py has the others on a clock of its own.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
import torch
from marked import rest
from megatron.core.utils import unwrap_model
from pool import forked, free_port
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megatron.pipeline import patches
from megatron.pipeline.monitor.heartbeat import Heartbeat
from megatron.pipeline.monitor.progress import RanksSeen, Situation, diagnose, list_ranks
from megatron.pipeline.monitor.watchdog import Watchdog, in_words
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.passes import Pass
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Compute, Operation, Wait
from megatron.pipeline.runtime.offload.host_memory import HostPool

RANKS, FAILING_MICROBATCH, TIMEOUT = 4, 3, 4.0


def train(how: str, failing_rank: int, vocabulary: str = "off", offload: str = "off", rehearses: str = "") -> None:
    """Fail while a microbatch's data is read, or in S where the vocabulary is spread; with offload while copies are under way, or
    for want of host memory."""
    signal.signal(signal.SIGTERM, lambda *_: None)  # as in training, where it is noted
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    patches.install()
    schedule, flags = "zb-h1", f"--vocab-parallel {vocabulary}"
    if offload != "off":  # copies of 100 kB, which take a tenth of a second
        schedule, flags = (
            "interleaved",
            f"--num-layers 8 --offload {offload} --offload-min-size 1KiB --offload-cpu-bandwidth 1e-3",
        )
    flags += rehearses
    run = tiny_gpt.Run(schedule, pp=torch.distributed.get_world_size(), flags=tuple(flags.split()))
    run.step(0)
    tokens = run._tokens
    fails = torch.distributed.get_rank() == failing_rank

    def failing(iteration: int) -> Iterator[torch.Tensor]:
        for microbatch, batch in enumerate(tokens(iteration)):
            if fails and vocabulary == "off":
                go_wrong(how, microbatch)
            yield batch

    if fails and vocabulary != "off":
        numbers = itertools.count()
        shard = unwrap_model(run.chunks[0]).vocabulary.output
        shard.register_forward_pre_hook(lambda *_: go_wrong(how, next(numbers)))

    if fails and how == "poor":
        run.pipeline.offloading.__dict__["pool"] = HostPool(limit=4096, pinned=False)

    def situation() -> Situation:
        return replace(run.pipeline.situation, place=f"{run.pipeline.situation.place} after iteration 1")

    run._tokens = failing  # type: ignore[method-assign]
    with Watchdog(situation, pipeline_timeout=TIMEOUT, silence_seconds=2 * TIMEOUT):
        run.step(1)
    assert "board" not in {thread.name for thread in threading.enumerate()}, "it would abort a process that ends now"
    torch.distributed.destroy_process_group()


def go_wrong(how: str, microbatch: int) -> None:
    if microbatch == FAILING_MICROBATCH and how != "poor":
        if how == "raise":
            raise RuntimeError("out of luck")
        if how == "exhaust":
            torch.empty(2**60, dtype=torch.uint8)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(60)


def rank_alone(rank: int, port: int, stderr: Path, how: str, failing_rank: int, *more: str) -> None:
    """One of ``RANKS`` processes without a launcher, which writes its errors to the end of a file."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with stderr.open("a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    train(how, failing_rank, *more)


COMPUTES, OUTSIDE = Situation("Compute F0.0", in_iteration=True), Situation("the optimizer")


def fail(directory: Path, how: str, failing: int, *more: str) -> tuple[list[int | None], str]:
    """Exit codes and errors of 4 ranks that no launcher ends. Rank 0 keeps the rendezvous store."""
    port, stderr = free_port(), directory / "stderr"
    ranks = [forked(rank_alone, rank, port, stderr, how, failing, *more) for rank in range(RANKS)]
    for rank, process in enumerate(ranks):
        if (how, rank) != ("stop", failing):
            process.join(timeout=120)
    for process in ranks:
        process.kill()  # the one that stays stopped
        process.join()
    return [process.exitcode for process in ranks], stderr.read_text()


def verdicts(stderr: str, culprit: int) -> list[str]:
    """What is said of the culprit, by every rank that says anything; how to find it is checked, and cut out."""
    found = re.findall(r"^Pipeline stopped: (.*)$", stderr, re.MULTILINE)
    assert stderr.count("Pipeline stopped: ") == len(found)  # nothing stands before it in its line
    device = rf"(CPU|GPU \d+) of {re.escape(socket.gethostname())}"
    who = re.compile(rf"^(global rank {culprit}) \(pipeline rank {culprit} of {RANKS}, {device}, process \d+\)")
    assert all(who.match(text) for text in found), stderr
    return [who.sub(r"\1", text) for text in found]


def place(stderr: str, rank: int) -> str:
    """Where the verdict says that a waiting rank was."""
    return stderr.partition(f"\n    global rank {rank} was in ")[2].partition("\n")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failing", "message"),
    [
        ("raise", 2, r"global rank 2 failed in Compute F3.0 after iteration 1: RuntimeError: out of luck"),
        # Of a silent rank only what it said last is known.
        rest("stop", 0, r"global rank 0 is silent: killed, stopped or cut off. It was last in .*"),
        (
            "stuck",
            2,
            r"global rank 2 is slow or stuck in Compute F3.0 after iteration 1 \(at .*test_failures.py:\d+ in go_wrong\); "
            r"global ranks 0, 1, 3 wait for it. No pass has finished for \d+ s",
        ),
    ],
)
def test_one_verdict_names_the_culprit(tmp_path: Path, how: str, failing: int, message: str) -> None:
    codes, stderr = fail(tmp_path, how, failing)
    assert all(codes), codes
    said = verdicts(stderr, failing)
    # Rank 0 keeps the store: where it is stopped the others cannot agree on one of them, and each tells what it knows.
    assert len(said) == (3 if (how, failing) == ("stop", 0) else 1), stderr
    for text in said:
        assert re.fullmatch(message, text), stderr
    if how == "raise":
        assert stderr.count("Traceback (most recent call last)") == 1
        assert "Global rank 2 failed.\nTraceback (most recent call last)" in stderr
        assert re.search(r'File ".*test_failures.py", line \d+, in go_wrong\n', stderr)
    else:
        assert "Traceback" not in stderr
    if how == "stuck":
        assert re.fullmatch(
            r"Wait gradient of microbatch 2 from stage 2, for B2.0 after iteration 1, waiting for global rank 2; "
            r"last finished: B0.0 F3.0 B1.0 W0.0",
            place(stderr, 1),
        )
        assert place(stderr, 3).startswith("Wait activation of microbatch 3 from stage 2, for F3.0 after iteration 1, wait")
        assert place(stderr, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "more", "message"),
    [
        ("exhaust", ("2",), r"failed in Compute S3.0 after iteration 1: RuntimeError: .*DefaultCPUAllocator: can't allocate.*"),
        (
            "poor",
            ("off", "full"),
            r"failed in Copy D2H\d\.\d after iteration 1: RuntimeError: offloaded activations need .* of host memory on this "
            r"rank \(.* are in use, .* more were asked for\), and the limit is .*: raise --offload-host-memory, .*",
        ),
        rest("kill", ("off", "off", " --rehearse"), r"is silent: killed, stopped or cut off. It was last in .*"),
    ],
)
def test_the_culprit_among_other_settings(tmp_path: Path, how: str, more: tuple[str, ...], message: str) -> None:
    """Where all ranks take part in a pass of the vocabulary, while copies are under way, and where ranks take turns."""
    codes, stderr = fail(tmp_path, how, 2, *more)
    assert all(codes), codes
    (said,) = verdicts(stderr, 2)
    assert re.fullmatch(f"global rank 2 {message}", said)
    advice = r"\n    Out of memory: `mpipe memory` computes .* `--offload full`, .* \(docs/clusters.md, When memory is short\)\n"
    assert len(re.findall(advice, stderr)) == (how == "exhaust"), stderr


def boards(ranks: int, port: int, monkeypatch: pytest.MonkeyPatch) -> list[Heartbeat]:
    """Of all ranks, in this process."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    made = []
    for rank in range(ranks):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        made.append(Heartbeat(OUTSIDE.to_text, interval=0.01, timeout=5.0))
    return made


def test_ranks_agree_on_the_news_and_on_who_prints_them(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    first, second, third = boards(3, store.port, monkeypatch)
    assert [first.announce("1 is stuck"), second.announce("2 is stuck")] == ["1 is stuck", "1 is stuck"]
    assert [second.claim(), first.claim(), second.claim()] == [True, False, True]
    del store
    assert third.claim()  # nobody can tell it that another rank has printed
    assert third.announce("the store is gone") == "the store is gone"


@pytest.mark.parametrize(
    ("silent", "claims", "prints", "waits_before"),
    [
        (set(), False, False, True),  # rank 0 has printed
        (set(), True, True, True),  # rank 0 should have, and has not
        ({0}, True, True, False),
    ],
)
def test_some_rank_prints_the_verdict(
    silent: set[int],
    claims: bool,
    prints: bool,
    waits_before: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The lowest rank that is heard has the first word; a rank that is told of no speaker after a while prints, too."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    zero, one = boards(2, store.port, monkeypatch)
    if not claims:
        assert zero.claim()
    done: list[object] = []

    def ended(code: int) -> None:
        done.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", ended)
    monkeypatch.setattr(multiprocessing, "active_children", list)  # here the tests' own pool
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append(capsys.readouterr().err))
    watchdog = Watchdog(lambda: OUTSIDE)
    watchdog._heartbeat = one
    monkeypatch.setattr(watchdog._seen, "silent", lambda seconds: silent)
    with pytest.raises(SystemExit):
        watchdog._end("global rank 0 is stuck")
    assert done == [""] * waits_before + ["Pipeline stopped: global rank 0 is stuck\n" * prints, 1]
    report = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(tmp_path / "error.json")).message
    assert ("global rank 0 is stuck" in str(report)) == prints
    assert isinstance(report, dict) == prints  # of another form torchrun complains


@pytest.mark.parametrize("shape", [2**60, 0])
def test_what_to_do_if_memory_is_short(shape: int) -> None:
    """The CPU's own error, and CUDA's; an error that is not about memory has no such line."""
    error: Exception = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    if shape:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(shape, dtype=torch.uint8)
        error = caught.value
    first, second = in_words(error).splitlines()
    assert first == f"{type(error).__name__}: {error}"
    for measure in (
        "`mpipe memory`",
        "--offload full",
        "v-auto --pipeline-memory-limit 12GiB",
        "--recompute-granularity selective",
    ):
        assert measure in second
    assert "## When memory is short\n" in (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    assert in_words(RuntimeError("out of luck")) == "RuntimeError: out of luck"


def waits(rank: int) -> Situation:
    return Situation("Wait", in_iteration=True, waits_for=rank)


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
    assert list_ranks([3]) == "global rank 3"
    assert list_ranks(range(64)) == "global ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 more"
    assert diagnose([OUTSIDE] * 64, set()).report().endswith("and 56 more ranks")
    chain = [*(waits(rank) for rank in range(1, 40)), COMPUTES]
    _, *places = diagnose(chain, set()).report(remark=".").splitlines()  # the nearest ones, in their order
    assert places == [f"    global rank {rank} was in Wait, waiting for global rank {rank + 1}" for rank in range(23, 39)]


def test_situation_in_a_program() -> None:
    """Whom a wait waits for and what is finished, from the program alone; and the same once it was told to another rank."""
    schedule = planning.plan("zb-h1", 2, 3)
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


def test_a_look_at_a_long_program_reads_a_few_operations_of_it() -> None:
    """The host launches kernels meanwhile."""
    schedule = planning.plan("zb-h1", 2, 64)
    program = lower(schedule, uniform(schedule.placement))[1]
    looked: list[int] = []

    class Counted(tuple[Operation, ...]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(len(range(len(self))[index]) if isinstance(index, slice) else 1)
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[Operation]:
            for index in range(len(self)):
                yield self[index]

    index = max(index for index, one in enumerate(program) if isinstance(one, Wait))
    here = Situation.in_program(Counted(program), program[index], index + 1, (7, index), to_world=int)
    assert here == Situation.in_program(program, program[index], index + 1, (7, index), to_world=int)
    assert here.waits_for is not None and here.finished
    assert sum(looked) < 50 < len(program) / 5


def test_what_is_seen_of_others_does_not_age_while_this_process_sleeps() -> None:
    view = RanksSeen(2, longest_gap=1.0)

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
