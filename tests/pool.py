"""A pool of ranks for tests: processes forked from one that has imported torch and megatron-core, which then run functions.

``pool.run(4, function, *args)`` calls ``function(*args)`` on 4 ranks that form a fresh world, of gloo or, in a pool with GPUs, of
NCCL, and returns their results in rank order. Functions are found by name, so they live at the top of a module that the workers
can import too. Every wait has a timeout; when it strikes, the error shows where every rank was, and the pool starts anew.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PRELOADED = ("torch", "megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.dist_checkpointing", "preloaded")


class RankFailed(AssertionError):
    """A function raised on a rank, or a rank died or did not answer in time."""


def forked(function: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that calls a function and that has torch, megatron-core and the planner imported from its first moment on."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=function, args=args, daemon=False)
    with environment():
        process.start()
    return process


def spawned(function: Callable[..., None], *args: Any) -> BaseProcess:
    """The same in a process that can use a GPU. A fork cannot: imports of megatron-core ask CUDA how many GPUs there are, and
    that initialises its driver in the process that is forked.
    """
    process = multiprocessing.get_context("spawn").Process(target=function, args=args, daemon=False)
    with environment():
        process.start()
    return process


def run_program(script: Path, *arguments: str, **variables: str) -> tuple[int | None, str]:
    """The exit code of a Python script that is run as a program in a forked process, and what it prints.

    Args:
        variables: of the environment.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        process = forked(_program, str(script), arguments, variables, output.name)
        process.join(timeout=300)
        process.kill()
        process.join()
        return process.exitcode, output.read()


def _program(script: str, arguments: tuple[str, ...], variables: dict[str, str], output: str) -> None:
    os.environ.update(variables)
    with open(output, "w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def _forked_rank(connection: Connection, stacks: str) -> BaseProcess:
    return forked(serve, connection, stacks)


def rank_with_gpu(connection: Connection, stacks: str) -> BaseProcess:
    """For ``Pool``: rank r of each world, which is one of NCCL, computes on GPU r."""
    return spawned(serve, connection, stacks, "nccl")


def rank_beside_others(connection: Connection, stacks: str) -> BaseProcess:
    """For ``Pool``: ranks share the machine's GPUs, as in a rehearsal. NCCL refuses two ranks on one GPU."""
    return spawned(serve, connection, stacks, "rehearsal")


class Pool:
    """Ranks are started when they are first needed, and kept until ``close``.

    Args:
        start: starts the process of a rank, which calls ``serve`` with the same arguments.
        start_up: seconds that a call has in addition if it starts ranks: those that are not forked import everything.
    """

    def __init__(self, start: Callable[[Connection, str], BaseProcess] = _forked_rank, start_up: float = 0.0) -> None:
        self._start_rank, self._start_up = start, start_up
        self._workers: list[tuple[BaseProcess, Connection, Path]] = []
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        self._found: dict[str, list[Any]] = {}

    def run(self, ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0, **kwargs: Any) -> list[Any]:
        """Call a function on every rank of a world of ``ranks``.

        Raises:
            RankFailed: with the traceback of the first rank that raised, or of every rank after ``timeout`` seconds.
        """
        timeout += self._start_up if self._start(ranks) else 0.0
        workers = self._workers[:ranks]
        where = function.__module__, function.__qualname__
        port = free_port()
        for rank, (_, connection, _) in enumerate(workers):
            connection.send((where, args, kwargs, rank, ranks, port))
        answers = self._collect(workers, timeout)
        failures = [(rank, error) for rank, (ok, error) in enumerate(answers) if not ok]
        if failures:
            # A peer's failure makes the others fail as well: show the one that did not merely lose its peer.
            self.close()
            text = "\n".join(f"rank {rank} of {ranks}: {error}" for rank, error in failures)
            raise RankFailed(f"{'.'.join(where)} failed\n{text}")
        return [value for _, value in answers]

    def once(self, ranks: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """The same, once for all tests that compare with it: as of megatron-core's own schedule."""
        call = repr((ranks, function.__module__, function.__qualname__, args, sorted(kwargs.items())))
        if call not in self._found:
            self._found[call] = self.run(ranks, function, *args, **kwargs)
        return self._found[call]

    def each(
        self, ranks: int, function: Callable[..., Any], schedules: Iterable[str], *args: Any, **more: Any
    ) -> list[list[Any]]:
        """Results under several schedules, the function's first argument; those of "stock" are kept for other tests."""
        return [(self.once if name == "stock" else self.run)(ranks, function, name, *args, **more) for name in schedules]

    def close(self) -> None:
        """End all ranks: those that can end by themselves, which also ends what they started, and then the others."""
        for _, connection, _ in self._workers:
            connection.close()
        for process, _, _ in self._workers:
            process.join(timeout=2)
            process.kill()
            process.join()
        self._workers.clear()

    def _start(self, ranks: int) -> bool:
        """Tell whether any had to be started."""
        before = len(self._workers)
        while len(self._workers) < ranks:
            ours, theirs = multiprocessing.Pipe()
            stacks = Path(self._directory.name) / f"stacks-{len(self._workers)}-{time.time_ns()}"
            process = self._start_rank(theirs, str(stacks))
            theirs.close()
            self._workers.append((process, ours, stacks))
        return len(self._workers) > before

    def _collect(self, workers: list[tuple[BaseProcess, Connection, Path]], timeout: float) -> list[tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        failed_at = None
        while len(answers) < len(workers):
            pending = {connection: rank for rank, (_, connection, _) in enumerate(workers) if rank not in answers}
            # Once a rank has failed, the others get a moment to fail as well, or to be shown where they wait.
            end = deadline if failed_at is None else min(deadline, failed_at + 5)
            ready: list[Any] = wait(list(pending), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = pending[connection]
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = (False, "the process died")
                if not answers[rank][0]:
                    failed_at = failed_at or time.monotonic()
        for rank, (process, _, stacks) in enumerate(workers):
            if rank not in answers:
                assert process.pid is not None
                os.kill(process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                text = stacks.read_text() if stacks.exists() else ""
                answers[rank] = (False, f"no answer after {timeout:.0f} s or a peer's failure; it was in\n{text}")
        return [answers[rank] for rank in range(len(workers))]


class environment:
    """What a process must see when it starts: one thread, and the tests' own modules."""

    def __enter__(self) -> None:
        self._saved = dict(os.environ)
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(paths), PYTHONWARNINGS="ignore")

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._saved)


def serve(connection: Connection, stacks: str, backend: str = "gloo") -> None:
    """Run the functions that come over a connection, in worlds of a backend, until it is closed."""
    from megatron.pipeline.patches import older_releases, torch_gloo

    from megatron.pipeline import patches

    torch_gloo.install()  # before there is a world
    older_releases.install()  # before a test's module imports what only newer releases have
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        gc.freeze()
        while True:
            try:
                (module, name), args, kwargs, rank, ranks, port = connection.recv()
            except EOFError:
                return
            try:
                function: Any = importlib.import_module(module)
                for part in name.split("."):
                    function = getattr(function, part)
                patches.install()  # also of what this module has imported as the first
                answer = (True, _in_world(function, args, kwargs, rank, ranks, port, backend))
            except BaseException:  # a test function may raise SystemExit
                answer = (False, traceback.format_exc())
            connection.send(answer)


def _in_world(function: Callable[..., Any], args: Any, kwargs: Any, rank: int, ranks: int, port: int, backend: str) -> Any:
    from datetime import timedelta

    import torch

    from megatron.pipeline.distributed import groups
    from megatron.pipeline.session.rehearsal import groups as rehearsal_groups

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    if backend != "gloo":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if backend == rehearsal_groups.BACKEND:
        rehearsal_groups.open_world(rank, ranks, timedelta(seconds=60))
    else:
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=60))
    groups.barrier()  # a function that ends at once would close connections that others are still making
    try:
        return function(*args, **kwargs)
    finally:
        megatron = sys.modules.get("megatron.core.parallel_state")
        if megatron is not None:
            megatron.destroy_model_parallel()
        schedules = sys.modules.get("megatron.pipeline.patches.schedules")
        if schedules is not None:
            schedules.restore()  # lets go of the pipeline, and through it of the model and its groups
        loops = sys.modules.get("megatron.pipeline.patches.loops")
        if loops is not None:
            loops.install(None)  # or what is built next would follow the placement of this one
        torch.distributed.destroy_process_group()
        _let_go_of_groups()


def _let_go_of_groups() -> None:
    """Models and hooks refer to each other and to process groups, whose gloo threads wake up a hundred times a second.

    Some of these circles go through autograd's nodes and parameters, where Python's collector cannot follow them: what is left
    of models, optimizers and collections of groups is emptied.

    What is left after that, imports and caches, is frozen like all that the ranks were forked with: looking through it again
    would take ten times as long as all else that starts and ends a world.
    """
    import torch

    gc.collect()
    holders = ("megatron.core.distributed", "megatron.core.optimizer", "megatron.core.process_groups_config")
    for one in gc.get_objects():
        module = str(type(one).__module__)
        if module.startswith(holders) or (module.startswith("megatron") and isinstance(one, torch.nn.Module)):
            getattr(one, "__dict__", {}).clear()
    gc.collect()
    gc.freeze()


def free_port() -> int:
    """A port on which nothing listens, below those that the system gives to connections, so that no other process gets it before
    it is used."""
    for port in random.SystemRandom().sample(range(10_000, _first_given_port()), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("localhost", port))
            return port
    raise OSError("100 ports are in use")


def _first_given_port() -> int:
    given = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return max(20_000, int(given.read_text().split()[0])) if given.exists() else 32_768
