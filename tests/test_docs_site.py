"""The site of scripts/docs_site.py: what goes into it; MkDocs itself runs in ``make docs``."""

from __future__ import annotations

import re
from pathlib import Path

import docs_site
import yaml

from megatron.pipeline import __version__

ROOT = Path(__file__).parents[1]
CONFIG = re.sub(r"!!python\S+ \{.*\}", "null", (ROOT / "mkdocs.yml").read_text())  # what only MkDocs can read


def titles(nav: list[dict[str, object]]) -> dict[str, str]:
    """The pages of a navigation, and their titles."""
    found: dict[str, str] = {}
    for entry in nav:
        for title, below in entry.items():
            found |= titles(below) if isinstance(below, list) else {str(below): title}
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- .*: (\S+\.md)$", CONFIG, re.M)
    assert sorted(listed) == sorted(map(str, docs_site.pages())) == sorted(titles(yaml.safe_load(CONFIG)["nav"]))


def test_nothing_is_loaded_from_elsewhere() -> None:
    config = yaml.safe_load(CONFIG)
    assert config["theme"]["font"] is False and config["plugins"] == ["search"]
    assert not {"extra", "extra_javascript", "extra_css", "repo_url"} & set(config)


def test_the_citation_is_of_this_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__ and citation["license"] == "Apache-2.0" and len(citation["references"]) == 4


def test_what_loads_is_found(tmp_path: Path) -> None:
    page = tmp_path / "below" / "page.html"
    page.parent.mkdir()
    page.write_text(
        '<a href="https://a.example">link</a><img src="own.png"><script async src=//b.example/x.js></script>'
        '<link rel="stylesheet" href="https://c.example/css?x"><link href="../assets/own.css">'
    )
    assert docs_site.loaded_from_elsewhere(tmp_path) == {"//b.example/x.js", "https://c.example/css?x"}


def test_gathers_pages_and_what_they_link_to(tmp_path: Path) -> None:
    (tmp_path / "stale.md").touch()
    docs_site.gather(tmp_path)
    there = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    wanted = {Path("README.md"), Path("docs/images/measured.png"), Path("examples/lora.py"), Path("configs/tiny.yaml")}
    assert set(docs_site.pages()) | wanted <= there and Path("stale.md") not in there
    assert '```python title="way.py"\n' in (tmp_path / "docs/architecture.md").read_text()
    assert (tmp_path / "docs/images/measured.png").read_bytes() == (ROOT / "docs/images/measured.png").read_bytes()
