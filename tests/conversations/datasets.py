"""In place of the package: what ``--sft`` asks it for, one to four drawn conversations a row, a token for each letter."""

from __future__ import annotations

import random
from typing import Any


def load_dataset(_: str, data_files: str, split: str) -> list[dict[str, Any]]:
    draw = random.Random(f"{data_files} {split}")

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": "".join(chr(draw.randint(33, 122)) for _ in range(draw.randint(1, 4)))}

    return [
        {"messages": [turn(role) for _ in range(draw.randint(1, 4)) for role in ("system", "user", "assistant")]}
        for _ in range(64)
    ]
