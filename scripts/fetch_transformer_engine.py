"""Fetch Transformer Engine's own Python, for tests on a machine without a GPU: ``fetch_transformer_engine.py [RELEASE ..]``.

pip fetches each release's wheel without what it depends on, and it is unpacked under ``build/transformer-engine``: Python files
alone, under a megabyte. From then on ``tests/engine`` (``make test-rest``) runs them, with operations of torch in place of
the compiled module (``tests/engine/stand_in.py``). A release that cannot be fetched is left out, with a line that says why.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from wheels import NotFetched, fetched

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "transformer-engine"
NEWEST = "newest"
RELEASES = ("2.8.0", "2.14.0", "2.15.0", NEWEST)  # the first whose backward splits, the last before and the first after a change


def main(argv: Sequence[str]) -> None:
    """Fetch releases that are not there, and say which are."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", default=RELEASES, metavar="RELEASE", help=f"{' '.join(RELEASES)}")
    found = [release for wanted in parser.parse_args(argv).releases if (release := fetch(wanted))]
    print(f"Transformer Engine: {', '.join(found) or 'SKIPPED: no release could be fetched'}", flush=True)


def fetch(release: str) -> str | None:
    """Unpack a release; returns its number, or None if pip cannot fetch it, after a line that says why."""
    if (FOLDER / release).is_dir():
        return release
    wanted = "transformer-engine" if release == NEWEST else f"transformer-engine=={release}"
    try:
        with fetched(wanted, "--retries", "1", "--timeout", "15") as wheel:
            number = wheel.name.split("-")[1]
            if not (FOLDER / number).is_dir():
                unpacked = wheel.with_name("unpacked")
                shutil.unpack_archive(wheel, unpacked, "zip")
                FOLDER.mkdir(parents=True, exist_ok=True)
                shutil.move(unpacked, FOLDER / number)
    except NotFetched as failure:
        print(f"Transformer Engine {release}: SKIPPED: {failure}", flush=True)
        return None
    return number


if __name__ == "__main__":
    main(sys.argv[1:])
