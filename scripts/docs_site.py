"""Build the documentation as a static site that loads nothing from elsewhere: ``build/site/index.html``.

    python scripts/docs_site.py    # needs pip install -e '.[docs]'; make docs does both

Pages link to each other and to files of the repository by relative paths. So the Markdown files and what they link to are copied
as they lie, and MkDocs builds that tree; a link or an anchor that leads nowhere ends the build.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "docs/**/*.md", "benchmarks/*.md", "configs/*.md", "examples/*.md", "tests/*.md")
_LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
_LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]*)""")
_NAMED_BLOCK = re.compile(r"^```(\w+) (\S+)$", re.M)  # a fenced block with a file's name


def pages() -> list[Path]:
    """Every page of the site, relative to the repository."""
    return [path.relative_to(ROOT) for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def linked(page: Path) -> Iterator[Path]:
    """The files of the repository that a page links to, pictures among them, relative to the repository."""
    for link in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page.parent / link).resolve()
        if target.is_file():
            yield target.relative_to(ROOT)


def gather(folder: Path) -> None:
    """Copy the pages and what they link to, anew, under the paths that they have in the repository."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in {*pages(), *(target for page in pages() for target in linked(page))}:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = (ROOT / path).read_text(encoding="utf-8")
            (folder / path).write_text(_NAMED_BLOCK.sub(r'```\1 title="\2"', text), encoding="utf-8")
        else:
            shutil.copy(ROOT / path, folder / path)


def loaded_from_elsewhere(site: Path) -> set[str]:
    """The addresses of other sites from which a page of a site loads something; links that a reader may follow do not count."""
    return {address for page in site.rglob("*.html") for address in _LOADED.findall(page.read_text(encoding="utf-8"))}


def main(argv: Sequence[str] | None = None) -> int:
    """Build the site; returns 1 if it has dead links, or loads anything from elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    gather(ROOT / "build/pages")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    if subprocess.run(command, check=False, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}).returncode:
        return 1
    elsewhere = loaded_from_elsewhere(ROOT / "build/site")
    print("\n".join(f"docs_site.py: a page loads {address}" for address in sorted(elsewhere)) or "build/site/index.html")
    return int(bool(elsewhere))


if __name__ == "__main__":
    sys.exit(main())
