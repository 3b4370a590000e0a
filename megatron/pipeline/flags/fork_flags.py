"""Flags of the earlier forks of Megatron-LM, and what to give instead; ``docs/moving.md`` has their values one by one.

The forks are sail-sg/zero-bubble-pipeline-parallelism (with PipeOffload) and sail-sg/VocabularyParallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megatron.pipeline.flags.upstream import table

NOW: Mapping[str, str] = table("forks")


def refuse(flags: Iterable[str]) -> None:
    """Refuse a command line or the keys of a file that have flags of the forks.

    Raises:
        ValueError: names each of them, with what to give instead.
    """
    found = [flag for flag in dict.fromkeys(flag.partition("=")[0] for flag in flags) if flag in NOW]
    if found:
        raise ValueError(f"flags of an earlier fork (docs/moving.md): {'; '.join(f'{flag}: {NOW[flag]}' for flag in found)}")
