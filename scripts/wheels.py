"""Wheels that pip fetches without what they depend on, to be unpacked: of another Python, or for their sources alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NEWER_PYTHON = ("--python-version", "3.12")  # what megatron-core asks for from 0.17 on, and frameworks with it


class NotFetched(Exception):
    """The end of what pip said."""


@contextmanager
def fetched(wanted: str, *options: str) -> Iterator[Path]:
    """The wheel of a requirement, while this context is open.

    Args:
        options: of ``pip download``.

    Raises:
        NotFetched: pip fails, or brings no wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        always = "download --quiet --no-deps --only-binary :all: --dest".split()
        pip = [sys.executable, "-m", "pip", *always, folder, *options, wanted]
        ended = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if ended.returncode or not wheels:
            raise NotFetched(f"pip download: {ended.stdout.strip()[-500:]}")
        yield wheels[0]
