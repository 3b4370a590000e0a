"""Does a message that has to wait hold up the passes launched behind it? One GPU, without NCCL.

    python benchmarks/queues.py

A stream of the priority of messages gets a kernel that has to wait for one that sleeps on a third stream, as the second of two
posted receives waits for the first. Then products are launched on the passes' stream. If these take as long as the sleep, streams
share a hardware queue. That is asked for each number of queues (CUDA_DEVICE_MAX_CONNECTIONS, which tensor parallelism wants to
be 1) and each priority: messages have a high one, collectives of the vocabulary a normal one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

import torch
from common import command_line, in_rounds, print_table, save

PRIORITIES = {"high": -1, "normal": 0}
FREE, BEHIND = "nothing waits", "a message waits"
_CYCLES = 100_000_000  # that the kernel sleeps, some 50 ms
_PRODUCTS = 20


def seconds(priority: int, waits: bool, factor: torch.Tensor) -> float:
    """From the first launch until the passes' products have ended, by the host's clock."""
    sleeping, messages, done = torch.cuda.Stream(), torch.cuda.Stream(priority=priority), torch.cuda.Event()
    number = torch.empty(1, device="cuda")  # here: a stream's first allocation asks the driver, which may wait for kernels
    torch.cuda.synchronize()
    start = time.perf_counter()
    if waits:
        with torch.cuda.stream(sleeping):
            torch.cuda._sleep(_CYCLES)
        messages.wait_stream(sleeping)
        with torch.cuda.stream(messages):
            number.zero_()
    for _ in range(_PRODUCTS):
        factor @ factor
    done.record()
    done.synchronize()
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took


def measure(priority: str, size: int, rounds: int) -> dict[str, list[float]]:
    """In this process, whose number of queues is fixed."""
    factor = torch.ones(size, size, device="cuda", dtype=torch.bfloat16)
    runs = {
        name: lambda waits=waits: seconds(PRIORITIES[priority], waits, factor) for name, waits in ((FREE, False), (BEHIND, True))
    }
    return in_rounds(runs, rounds, warm_up=2)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--connections", nargs="+", default=["1", "8", "32"], help="values of CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--size", type=int, default=1024, help="of the square factors")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", metavar="FILE", help="append the seconds of every round, as JSON")
    parser.add_argument("--priority", choices=PRIORITIES, help="measure in this process alone, and print JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    if options.priority:
        print(json.dumps(measure(options.priority, options.size, options.rounds)))
        return
    found: dict[str, list[float]] = {}
    for queues in options.connections:
        for priority in PRIORITIES:
            command = [sys.executable, __file__, "--priority", priority]
            command += ["--size", str(options.size), "--rounds", str(options.rounds)]
            environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": queues}
            output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
            for name, rounds in json.loads(output.splitlines()[-1]).items():
                found[f"{queues} queues, {priority} priority, {name}"] = rounds
    title = (
        f"{_PRODUCTS} products of {options.size} x {options.size} launched behind a message, {torch.cuda.get_device_name()}, "
        f"{options.rounds} rounds"
    )
    save(options.save, title, found)
    print_table(title, ("case", "median ms"), [[name, f"{1000 * statistics.median(one):.2f}"] for name, one in found.items()])


if __name__ == "__main__":
    main()
