"""Ranks that have imported a release of Transformer Engine which scripts/fetch_transformer_engine.py has fetched."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from pool import Pool, environment, serve

FOLDER = Path(__file__).parents[2] / "build" / "transformer-engine"


def fetched() -> list[str]:
    """The releases that are there, oldest first."""
    found = [folder.name for folder in FOLDER.glob("*.*.*")]
    return sorted(found, key=lambda release: [int(part) for part in release.split(".")[:3]])


def ranks_with(release: str) -> Pool:
    """A pool of ranks that have imported a release."""

    def start(connection: Connection, stacks: str) -> BaseProcess:
        # Not forked: what ranks are forked from has imported megatron-core, which looks for Transformer Engine then.
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(release, connection, stacks))
        with environment():
            process.start()
        return process

    return Pool(start, start_up=240)


def _serve(release: str, connection: Connection, stacks: str) -> None:
    from engine import stand_in

    stand_in.load(FOLDER / release)
    from megatron.pipeline import patches

    patches.install()
    stand_in.see_the_cpu()
    serve(connection, stacks)
