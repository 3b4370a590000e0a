"""megatron.core.datasets.utils: no compilation of what pip has compiled already.

``compile_helpers``: Megatron-LM's start-up runs make in megatron-core's datasets folder. pip's megatron-core has the compiled
module there and no Makefile, and upstream would end the program. In this case the function returns at once.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megatron.pipeline.patches import compat


def install() -> None:
    utils = compat.module("megatron.core.datasets.utils")
    makefile = Path(str(utils.__file__)).with_name("Makefile")
    if not makefile.exists() and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None  # type: ignore[attr-defined]
