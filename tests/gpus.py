"""Which tests see GPUs: those marked ``cuda``, and only when they run alone (``pytest -m cuda``, as ``make gpu`` does).

All other tests compute on CPUs, on a machine with GPUs, too: four ranks would otherwise share one GPU over gloo, and what this
project changes for CPUs (``patches/cpu.py``) would not be tested.
"""

from __future__ import annotations

import os

HIDDEN = "CUDA_VISIBLE_DEVICES"


def alone(marks: str) -> bool:
    """Whether an expression for ``-m`` selects the tests marked ``cuda`` and no others."""
    return marks.strip() == "cuda"


def hide() -> None:
    """From this process and all that it starts; before CUDA is first used."""
    os.environ[HIDDEN] = ""


def missing(wanted: int, marks: str, found: int) -> str | None:
    """Why a test that needs ``wanted`` GPUs cannot run where ``found`` are seen; None if it can."""
    if not alone(marks):
        return f"needs {_gpus(wanted)}, which this run hides: pytest -m cuda (or make gpu) runs what is marked cuda"
    return None if found >= wanted else f"needs {_gpus(wanted)}, and torch sees {found or 'none'}"


def _gpus(number: int) -> str:
    return "a GPU" if number == 1 else f"{number} GPUs"
