"""What PyPI shows of the package, and the recipe of a container."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def described(setup: Path) -> str:
    """Keywords, and the long description."""
    command = [sys.executable, str(setup), "-q", "--keywords", "--long-description"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=setup.parent).stdout


def test_no_link_of_the_page_on_pypi_is_dead(tmp_path: Path) -> None:
    """Beside it there is no file of the repository: its links are words, or lead to the repository's address."""
    words = described(ROOT / "setup.py")
    assert words.startswith("megatron,") and "# megatron.pipeline" in words and "searches layouts" in words
    assert re.findall(r"\]\((?!https?:|#)", words) == []
    for path in ("README.md", "megatron/pipeline/__init__.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((ROOT / path).read_text(encoding="utf-8"), encoding="utf-8")
    text = (ROOT / "setup.py").read_text(encoding="utf-8").replace('URL = ""', 'URL = "https://example.org/some"')
    (tmp_path / "setup.py").write_text(text, encoding="utf-8")
    words = described(tmp_path / "setup.py")
    assert re.findall(r"\]\((?!https?:|#)", words) == []
    assert "](https://example.org/some/raw/main/docs/images/measured.png)" in words
    assert "](https://example.org/some/blob/main/docs/gpu.md)" in words


def test_the_container_is_set_up_as_ci_sets_up() -> None:
    recipe = (ROOT / "scripts" / "Containerfile").read_text(encoding="utf-8")
    steps = re.findall(r"^RUN (?!apt-get)(.+)$", recipe, re.M)
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert steps[0] == "make setup" and [line for line in run if line in steps] == steps
    [settings] = re.findall(r"^ENV (.+)$", recipe, re.M)
    assert f"export {settings}" in run
