"""Which release of megatron-core the tests run with, and what some of them need of it."""

from __future__ import annotations

from importlib import metadata

import pytest

CORE = tuple(map(int, metadata.version("megatron-core").split(".")[:2]))
needs_local_grouped_experts = pytest.mark.skipif(CORE >= (0, 17), reason="megatron-core 0.17 removed local grouped experts")
EXTRA_TOKENS = int(CORE < (0, 17))  # the null tokenizer's end of document, beside --vocab-size until then
reduces_experts_wrong = pytest.mark.skipif(CORE >= (0, 19), reason="megatron-core 0.19 reduces experts' gradients right")
