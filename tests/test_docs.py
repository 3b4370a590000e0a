"""What the documentation shows is what happens: its Python runs, and its commands print what it says.

``PYTHONPATH=scripts python tests/test_docs.py`` runs them again and writes what they print into the documents.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import docs_site
import pytest

from megatron.pipeline.cli import main
from megatron.pipeline.planner.schedule.families import FAMILIES

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    "README.md",
    "docs/schedules.md",
    "docs/own_schedules.md",
    "docs/api.md",
    "docs/families.md",
    "docs/planner.md",
    "docs/vocabulary.md",
    "docs/offload.md",
    "docs/architecture.md",
    "docs/certify.md",
    "docs/numerics.md",
    "docs/memory.md",
    "docs/every_batch.md",
    "docs/slow.md",
    "docs/boundary.md",
    "docs/clusters.md",
    "docs/tuning.md",
    "benchmarks/README.md",
    "docs/users/dense.md",
    "docs/users/finetuning_and_rl.md",
    "docs/users/long_context.md",
]

_BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<file>\S+))?\n(?P<body>.*?)^```$", re.M | re.S)
_PLACE = re.compile(r"`([\w/.]+\.py)`(?:[ :,]+`([A-Za-z_][\w.]*)`)?")  # a file, and what it has: `runtime/p2p.py` `Links.send`
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


@contextlib.contextmanager
def a_place_to_run() -> Iterator[None]:
    """An empty directory, the commands of this environment, and a terminal of 80 columns."""
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ["COLUMNS"] = "80"
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(environment)


def output(command: str) -> str:
    """What a command prints, errors included."""
    first, _, behind = command.partition(" | ")
    name, *arguments = shlex.split(first)
    if name != "mpipe":
        return _shell(command)
    printed = io.StringIO()  # without the start of another process
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), contextlib.suppress(SystemExit):
        main(arguments)
    return _shell(behind, printed.getvalue()) if behind else printed.getvalue()


def _shell(command: str, given: str = "") -> str:
    done = subprocess.run(
        command, shell=True, text=True, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout


def refreshed(text: str, path: str) -> str:
    """A document with what its commands print now.

    A fenced block with a file's name behind its language is that file, other Python is executed, and in ``console`` blocks
    what follows a line with ``$`` is what that command prints. All blocks of a document share one directory.
    """
    names: dict[str, object] = {"__name__": path}

    def run(block: re.Match[str]) -> str:
        language, file, body = block["language"], block["file"], block["body"]
        if file:
            Path(file).write_text(body, encoding="utf-8")
        elif language == "python":
            exec(compile(body, path, "exec"), names)
        elif language == "console":
            shown = re.split(r"^\$ ", body, flags=re.M)[1:]
            return block[0].replace(body, "".join(map(_command, shown)))
        return block[0]

    with a_place_to_run():
        return _BLOCK.sub(run, text)


def _command(shown: str) -> str:
    """A command and what it prints; what is shown stays where only measured seconds differ."""
    command, before = shown.split("\n", 1)
    now = "\n".join(line.rstrip() for line in output(command).splitlines())
    now = f"{now}\n" if now else ""
    return f"$ {command}\n{before if _untimed(now) == _untimed(before) else now}"


def _untimed(text: str) -> str:
    """Without the last column of ``mpipe compare``: seconds."""
    return re.sub(r" +\d+\.\d{3}$", "", text, flags=re.M)


@pytest.mark.parametrize("path", DOCUMENTS)
def test_commands_print_what_is_shown_and_python_runs(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert refreshed(text, path) == text


def test_no_page_is_forgotten() -> None:
    """Neither by the test of links, nor by the site."""
    made = {"build", "data", "dist", "runs"}
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*.md")]
    assert sorted(docs_site.pages()) == sorted(
        path for path in found if path.parts[0] not in made and not any(part.startswith(".") for part in path.parts)
    )


@pytest.mark.parametrize("path", map(str, docs_site.pages()))
def test_links_lead_somewhere(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    for link, heading in _LINK.findall(text):
        target = (ROOT / path).parent / link if link else ROOT / path
        assert target.exists(), link
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            assert heading in [re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings], heading


@pytest.mark.parametrize(
    ("path", "least"), [("docs/architecture.md", 60), ("CONTRIBUTING.md", 12), ("docs/numerics.md", 4), ("tests/README.md", 20)]
)
def test_what_is_named_is_there(path: str, least: int) -> None:
    """Files of the package or the repository, and functions, classes, methods or constants in them."""
    places = _PLACE.findall((ROOT / path).read_text(encoding="utf-8"))
    assert len(places) >= least
    for file, name in places:
        found = [folder / file for folder in (ROOT, ROOT / "megatron/pipeline") if (folder / file).exists()]
        assert found, file
        for part in name.split(".") if name and not name.endswith(".py") else []:
            assert re.search(rf"^ *(def|class) {part}\b|^{part}\b.* = ", found[0].read_text(encoding="utf-8"), re.M), (file, name)


def test_every_family_is_documented_and_drawn() -> None:
    overview, details = ((ROOT / path).read_text(encoding="utf-8") for path in ("docs/schedules.md", "docs/families.md"))
    for name in FAMILIES:
        assert f"| `{name}` |" in overview
        assert f"](images/schedules/{name}.png)" in details


if __name__ == "__main__":
    for document in sys.argv[1:] or DOCUMENTS:
        now = refreshed((ROOT / document).read_text(encoding="utf-8"), document)
        (ROOT / document).write_text(now, encoding="utf-8")


def test_words_that_hide_what_is_meant_are_not_used() -> None:
    """Name the thing or the number instead."""
    words = re.compile(r"\b(so many|so much|whoever|nobody|told|whatever)\b", re.I)
    written = [path for room in ("docs", "examples", "megatron", "patches", "scripts") for path in (ROOT / room).rglob("*.*")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*ROOT.glob("*.md"), *written]
        if path.suffix in (".md", ".py", ".js", ".html")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if words.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", map(str, docs_site.pages()))
def test_references_are_defined_and_used(path: str) -> None:
    """Links such as ``[a paper][2401.10241]``, whose address stands at the page's end."""
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", (ROOT / path).read_text(encoding="utf-8"), flags=re.M | re.S)
    defined = dict(re.findall(r"^\[([\w.]+)\]: (https://\S+)$", text, re.M))
    assert all(where == f"https://arxiv.org/abs/{name}" for name, where in defined.items() if re.fullmatch(r"\d+\.\d+", name))
    assert sorted(defined) == sorted(set(re.findall(r"\]\[([^]]*)\]", text)))


def test_messages_that_are_quoted_are_messages() -> None:
    """Those of the page of symptoms, between backquotes: their words stand in the code."""
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    code = " ".join(
        path.read_text(encoding="utf-8") for folder in ("megatron", "patches") for path in (ROOT / folder).rglob("*.py")
    )
    spoken = re.sub(r'"\s+f?"', "", code)
    for words in (
        "above the limit of", "; this schedule needs", "or take a schedule that holds less", "Out of memory: ", "did you mean",
        "is of another model: ", "could not be loaded", "unknown flag", "is not in this project's pretrain_gpt.py",
        "lacks what megatron.pipeline relies on",
    ):  # fmt: skip
        assert words in " ".join(page.split()), f"the page does not quote {words!r} any more"
        assert words in spoken, f"no message has {words!r}"
