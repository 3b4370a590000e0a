"""Started by test_failures.py: one rank of a few that train, of which one fails in a known pass."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_gpt
import torch
from megatron.core.utils import unwrap_model

from megatron.pipeline import patches
from megatron.pipeline.monitor.progress import Situation
from megatron.pipeline.monitor.watchdog import Watchdog
from megatron.pipeline.runtime.offload.host_memory import HostPool

RANKS, FAILING_MICROBATCH, TIMEOUT = 4, 3, 4.0


def main(how: str, failing_rank: int, vocabulary: str = "off", offload: str = "off", rehearses: str = "") -> None:
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
                fail(how, microbatch)
            yield batch

    if fails and vocabulary != "off":
        numbers = itertools.count()
        shard = unwrap_model(run.chunks[0]).vocabulary.output
        shard.register_forward_pre_hook(lambda *_: fail(how, next(numbers)))

    if fails and how == "poor":
        run.pipeline.offloading.__dict__["pool"] = HostPool(limit=4096, pinned=False)

    def situation() -> Situation:
        return replace(run.pipeline.situation, place=f"{run.pipeline.situation.place} after iteration 1")

    run._tokens = failing  # type: ignore[method-assign]
    with Watchdog(situation, pipeline_timeout=TIMEOUT, silence_seconds=2 * TIMEOUT):
        if fails and how == "slow":
            time.sleep(1.5 * TIMEOUT)  # outside the iteration, where the others wait already: as in a save
        run.step(1)
    assert "board" not in {thread.name for thread in threading.enumerate()}, "it would abort a process that ends now"
    torch.distributed.destroy_process_group()


def fail(how: str, microbatch: int) -> None:
    if how == "slow":
        time.sleep(TIMEOUT / 4)
    elif microbatch == FAILING_MICROBATCH and how != "poor":
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
    main(how, failing_rank, *more)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
