"""Releases of ``megatron.core`` and ``megatron.training`` that run together."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.planner import minor


@dataclass(frozen=True)
class Versions:
    """Origin of both packages.

    Attributes:
        core: version of the ``megatron.core`` that runs.
        core_path: its folder.
        training_path: the folder of ``megatron.training``.
        checkout: version of the ``megatron.core`` in the same folder as ``megatron.training``; None if there is none.
    """

    core: str
    core_path: Path
    training_path: Path
    checkout: str | None

    @property
    def in_words(self) -> str:
        """Both releases, in a line."""
        if self.core_path.parent != self.training_path.parent:
            where = f"in {self.core_path}"
        else:
            where = "from pip" if "site-packages" in self.core_path.parts else "of the checkout"
        return f"megatron-core {self.core} {where}, {self.training_path}"

    @property
    def difference(self) -> str | None:
        """Advice where the two are of different releases; None where they are of one."""
        if self.checkout is None or minor(self.checkout) == minor(self.core):
            return None
        return (
            f"{self.training_path} belongs to megatron-core {self.checkout}, and {self.core} runs: take the checkout's own ("
            f"mpipe launch --core checkout), or pip install megatron-core=={self.checkout}"
        )


def check() -> Versions:
    """Find both.

    Raises:
        RuntimeError: there is no ``megatron.training``.
    """
    import megatron.core

    found = importlib.util.find_spec("megatron.training")
    if found is None or found.origin is None:
        raise RuntimeError(
            "there is no megatron.training on Python's path (pip's megatron-core has one from 0.17 on, for patterns of "
            "layers from 0.19 on): run the script in a checkout of Megatron-LM (mpipe launch PATH/pretrain_gpt.py), or add the "
            "checkout to PYTHONPATH"
        )
    training = Path(found.origin).parent
    core = Path(megatron.core.__file__).parent
    return Versions(megatron.core.__version__, core, training, version_in(training.parent / "core"))


def version_in(core: Path) -> str | None:
    """The version that a folder ``megatron/core`` says it has, without importing it; None if it is no such folder."""
    try:
        text = (core / "package_info.py").read_text(encoding="utf-8")
    except OSError:
        return None
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = [\"']?([\w.]*)", text, re.MULTILINE))
    return "{MAJOR}.{MINOR}.{PATCH}{PRE_RELEASE}".format(**parts) if len(parts) == 4 else None
