"""Check with import-linter that the rooms of megatron.pipeline only look down: the contracts are in pyproject.toml.

    python scripts/check_rooms.py [--verbose]

setup.py maps ``patches/`` to ``megatron.pipeline.patches``, and import-linter looks for a package's modules in the package's
folder alone. So it runs in a temporary folder in which links put ``patches/`` where the mapping says.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def link_rooms(folder: Path) -> None:
    """Make ``folder/megatron/pipeline`` the whole package, of links into the checkout."""
    package = folder / "megatron" / "pipeline"
    package.mkdir(parents=True)
    for part in [*(ROOT / "megatron" / "pipeline").iterdir(), ROOT / "patches"]:
        (package / part.name).symlink_to(part)


def main() -> int:
    """Returns the exit status of import-linter: 1 if an import breaks a contract."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true")
    verbose = ["--verbose"] if parser.parse_args().verbose else []
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    with tempfile.TemporaryDirectory() as folder:
        link_rooms(Path(folder))
        arguments = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", *verbose]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}
        return subprocess.run([sys.executable, "-c", code, *arguments], cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
