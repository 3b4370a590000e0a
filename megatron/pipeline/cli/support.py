"""``mpipe support``: which features of Megatron-LM work with our schedules."""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron.pipeline.cli.arguments import Commands, add_command
from megatron.pipeline.flags.importers import upstream
from megatron.pipeline.flags.support import FEATURES, Feature
from megatron.pipeline.planner import topics, view

_HEADER = ("feature", "pretrain_gpt.py", "mpipe launch", "")
_LEGEND = (
    "tested: on CPUs over gloo; nothing has run on a GPU yet. untested: accepted, with a warning at the start. refused: with an "
    "error before training. pretrain_gpt.py is this project's; mpipe launch runs Megatron-LM's own script."
)

_GENERAL = defaultdict(lambda: "N", one="the first", flag="the first", other="the other")
_COMBINATIONS = "These do not go together; every command, launch and `install()` says so with the same sentence:"


def add(commands: Commands) -> None:
    help = "list which features of Megatron-LM work with our schedules"
    parser = add_command(commands, "support", help, run, "mpipe support", "mpipe support lora", "mpipe support --markdown")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only what has these words")
    parser.add_argument("--markdown", action="store_true", help="as the table of docs/support.md, and what excludes what")


def run(options: argparse.Namespace) -> None:
    header, *rows = _rows()
    wanted = " ".join(options.words).lower()
    called = re.compile(rf"\b({re.escape(wanted)}|{re.escape(upstream.called(wanted))})\b") if wanted else re.compile("")
    named, others = ([row for row, feature in zip(rows, FEATURES, strict=True) if called.search(text(feature))]
                     for text in (lambda feature: feature.title.lower(), _searched))  # fmt: skip
    if not (rows := named or others):
        raise ValueError(
            f"no feature is called {wanted!r}: mpipe support lists all {len(FEATURES)}, and docs/launch.md every flag"
        )
    print(markdown() if options.markdown else f"{view.plain_table(header, rows, words=len(header))}\n\n{_LEGEND}")


def _searched(feature: Feature) -> str:
    """Text in which a word is looked for: the row, and the flags that are of it, with dashes."""
    flags = (name.replace("_", "-") for name in (*feature.names, *feature.details))
    return " ".join([feature.title, feature.note, *flags]).lower()


def markdown() -> str:
    """The table of docs/support.md, of features, and the table of those that exclude each other."""
    combinations = [("feature", "does not go with", "because, and instead"), *_in_general()]
    return f"{_table(_rows())}\n\n{_COMBINATIONS}\n\n{_table(combinations)}"


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    header, *rest = rows
    lines = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in (header, ("---",) * len(header), *rest)]
    return "\n".join(f"| {line} |".replace("|  |", "| |") for line in lines)


def _rows() -> list[tuple[str, ...]]:
    return [_HEADER, *((row.title, str(row.trainer), str(row.launch), row.note) for row in FEATURES)]


def _in_general() -> Iterator[tuple[str, str, str]]:
    """Rows for the page: the one features, the others, and the reason with what to do instead; rows of one reason are joined."""
    joined: dict[tuple[str, ...], list[str]] = {}
    for row in topics.OF_FEATURES:
        one, other = row.titles
        text = (f"{row.reason}: {row.instead}" if row.instead else row.reason).format_map(_GENERAL).removeprefix(": ")
        releases = f" (before {row.mended})" if row.mended else ""
        joined.setdefault((one, text), []).append(f"{other}{releases}")
    again: dict[tuple[str, ...], list[str]] = {}
    for (one, text), others in joined.items():
        again.setdefault((", ".join(others), text), []).append(one)
    for (other, text), ones in again.items():
        yield ", ".join(ones), other, text
