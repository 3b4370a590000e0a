"""megatron.core.datasets.utils: no compilation of what pip has compiled already, and for no other Python than this.

``compile_helpers``: Megatron-LM's start-up runs make in megatron-core's datasets folder. pip's megatron-core has the compiled
module there and no Makefile, and upstream would end the program. In this case the function returns at once. A checkout's Makefile
asks the PATH's ``python3`` and ``python3-config`` for what to compile with: both are to be this interpreter's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from megatron.pipeline.patches import compat


def install() -> None:
    utils = compat.module("megatron.core.datasets.utils")
    if Path(str(utils.__file__)).with_name("Makefile").exists():
        compat.wrap(utils, "compile_helpers", _compile_for_this_python)
    elif importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None  # type: ignore[attr-defined]


def _compile_for_this_python(original: Callable[[], None]) -> None:
    path = os.environ.get("PATH", os.defpath)
    own = [str(Path(prefix) / "bin") for prefix in (sys.prefix, sys.base_prefix)]
    os.environ["PATH"] = os.pathsep.join([*own, path])
    try:
        original()
    finally:
        os.environ["PATH"] = path
