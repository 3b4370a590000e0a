"""``mpipe`` as tests of its commands call it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from megatron.pipeline.cli import main


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints, which says nothing on stderr; ``words`` are split as by a shell."""
    capsys.readouterr()
    assert main(shlex.split(" ".join(words))) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What a command prints with ``--json``."""
    told: dict[str, Any] = json.loads(output(capsys, *words, "--json"))
    return told


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr with which a command refuses its arguments; it prints nothing else, and ends with code 2."""
    capsys.readouterr()
    try:
        code: object = main(shlex.split(" ".join(words)))
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out, captured.err.find("\n")) == (2, "", len(captured.err) - 1), captured.err
    return captured.err
