"""Started by test_failures.py: trains on 4 ranks and lets one fail in a known pass.

Under torchrun it is one rank. Alone it forks all of them, prints their exit codes as a JSON list, and kills those that stay
stopped after the others have ended; there rank 0 keeps the rendezvous store.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_gpt
import torch

from megatron.pipeline.runtime.situation import Situation
from megatron.pipeline.runtime.watchdog import Watchdog

RANKS, FAILING_MICROBATCH, TIMEOUT = 4, 3, 4.0


def main(how: str, failing_rank: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as in training, where it is noted
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    run = tiny_gpt.Run("zb-h1", pp=RANKS)
    run.step(0)
    tokens = run._tokens
    fails = torch.distributed.get_rank() == failing_rank

    def failing(iteration: int) -> Iterator[torch.Tensor]:
        for microbatch, batch in enumerate(tokens(iteration)):
            if fails and how == "slow":
                time.sleep(TIMEOUT / 4)
            elif fails and microbatch == FAILING_MICROBATCH:
                if how == "raise":
                    raise RuntimeError("out of luck")
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(60)
            yield batch

    def situation() -> Situation:
        return replace(run.pipeline.situation, place=f"{run.pipeline.situation.place} after iteration 1")

    run._tokens = failing  # type: ignore[method-assign]
    with Watchdog(situation, pipeline_timeout=TIMEOUT, silence_seconds=2 * TIMEOUT):
        if fails and how == "slow":
            time.sleep(1.5 * TIMEOUT)  # outside the iteration, where the others wait already: as in a save
        run.step(1)
    torch.distributed.destroy_process_group()


def fork(how: str, failing_rank: int) -> list[int | None]:
    """All ranks of one machine, without importing everything four times."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(probe.getsockname()[1]), WORLD_SIZE=str(RANKS))
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(RANKS):
        os.environ["RANK"] = str(rank)
        ranks.append(context.Process(target=main, args=(how, failing_rank)))
        ranks[-1].start()
    for rank, process in enumerate(ranks):
        if (how, rank) != ("stop", failing_rank):
            process.join()
    for process in ranks:
        process.kill()
        process.join()
    return [process.exitcode for process in ranks]


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], int(sys.argv[2]))
    else:
        print(json.dumps(fork(sys.argv[1], int(sys.argv[2]))))
