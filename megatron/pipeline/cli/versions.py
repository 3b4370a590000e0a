"""Flags of ``mpipe`` that print something and end it: versions of packages, and a shell's completion."""

from __future__ import annotations

import argparse
import platform
from typing import Any, NoReturn

from megatron.pipeline import __version__
from megatron.pipeline.flags.packages import OWN, installed


class Version(argparse.Action):
    """A flag that prints the versions of this package and of what it trains with, and ends the program.

    Nothing is imported for that: to import torch takes seconds.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        versions = {OWN: __version__} | {name: installed(name) or "not installed" for name in ("megatron-core", "torch")}
        print("\n".join(f"{name} {version}" for name, version in (versions | {"Python": platform.python_version()}).items()))
        parser.exit()


class Completion(argparse.Action):
    """A flag that prints a shell's completion of the parser that has it, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: Any, *__: object) -> NoReturn:
        import shtab

        print(shtab.complete(parser, shell))
        parser.exit()
