"""Packages that are here, and what is said where one is needed that is not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

OWN = "megatron-pipeline"
_NAMES = {  # of packages, by what Python imports, where these differ
    "megatron.core": "megatron-core",
    "megatron.training": "megatron-core>=0.17",
    "transformer_engine": "transformer-engine[pytorch]",
    "tree_sitter": "tree-sitter-bash[core]",
    "tree_sitter_bash": "tree-sitter-bash[core]",
    "yaml": "PyYAML",
}
SCRIPTS = ("six", "regex", "pydantic", "triton", "pybind11")  # what Megatron-LM's own scripts import
_TRAINING = ("torch", "megatron.core")


def missing(error: ModuleNotFoundError) -> str:
    """Name the package to install where an import failed.

    What trains is named together, by whichever of it was imported first.

    Raises:
        ModuleNotFoundError: the error itself, where what is missing is part of a package that is here.
    """
    module = error.name if error.name in _NAMES else (error.name or "").partition(".")[0]
    if not module or importlib.util.find_spec(module) is not None:
        raise error
    absent = [each for each in _TRAINING if importlib.util.find_spec(each) is None] if module in _TRAINING else [module]
    packages = [_NAMES.get(each, each) for each in absent]
    needed = f"package {packages[0]}, which is" if len(packages) == 1 else f"packages {' and '.join(packages)}, which are"
    return f"this needs the {needed} not installed: pip install {' '.join(repr(_required(each)) for each in packages)}"


def absent(engine: str, folder: Path | None) -> list[str]:
    """Names of packages that a script of Megatron-LM's imports, and that are not installed here.

    Args:
        engine: of the layers, as --transformer-impl names it.
        folder: of the script; its checkout may have megatron.training.
    """
    needed = [] if folder and (folder / "megatron" / "training").is_dir() else ["megatron.training"]
    needed += ["transformer_engine"] if engine == "transformer_engine" else []
    return [_NAMES.get(each, each) for each in (*needed, *SCRIPTS) if importlib.util.find_spec(each) is None]


def refuse_without_torch() -> None:
    """Look for torch without importing it, which takes a second.

    Raises:
        ValueError: it is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError(missing(ModuleNotFoundError(name="torch")))


def no_picture(path: Path, error: Exception) -> str:
    """Say why there is no picture: a full disk, what others have put into the directory, or no matplotlib."""
    why = missing(error) if isinstance(error, ModuleNotFoundError) else getattr(error, "strerror", None) or error
    return f"WARNING: no picture in {path} ({why})"


def installed(package: str) -> str | None:
    """The version of a package; nothing is imported for that."""
    from importlib import metadata  # as slow to import as a small plan is to make

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _required(package: str) -> str:
    """A package with the range of versions that this one asks for, as pip takes it."""
    from importlib import metadata

    try:
        required = metadata.requires(OWN) or []
    except metadata.PackageNotFoundError:
        required = []  # run from a directory
    ranges = [each.partition(";")[0].strip() for each in required]
    return next((each for each in ranges if re.match(rf"{re.escape(package)}\b(?![-\[])", each)), package)
