"""Started by test_failures.py under torchrun: trains, and lets one rank fail in a known pass."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_gpt
import torch

FAILING_RANK, FAILING_MICROBATCH = 2, 3


def main(how: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # as in training, where it is noted
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    run = tiny_gpt.Run("zb-h1", pp=4)

    from megatron.pipeline.runtime.watchdog import Watchdog

    run.step(0)
    tokens = run._tokens

    def failing(iteration: int) -> Iterator[torch.Tensor]:
        for microbatch, batch in enumerate(tokens(iteration)):
            if torch.distributed.get_rank() == FAILING_RANK and microbatch == FAILING_MICROBATCH:
                if how == "raise":
                    raise RuntimeError("out of luck")
                if how == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(60)
            yield batch

    run._tokens = failing  # type: ignore[method-assign]
    with Watchdog(lambda: f"{run.pipeline.position} of iteration 1", silence_seconds=10, stuck_seconds=4):
        run.step(1)


if __name__ == "__main__":
    main(sys.argv[1])
