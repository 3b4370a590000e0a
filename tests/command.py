"""``mpipe`` as tests of its commands call it."""

from __future__ import annotations

import shlex

import pytest

from megatron.pipeline.cli import main


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints, which says nothing on stderr; ``words`` are split as by a shell."""
    capsys.readouterr()
    assert main(shlex.split(" ".join(words))) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


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
