"""``mpipe``: plan, simulate, verify, draw, compare and export pipeline schedules. One file per command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron.pipeline.cli import compare, draw, export, plan, simulate
from megatron.pipeline.cli.arguments import Parser, complain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 2 after one line on stderr that says what is wrong."""
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as ``head``, has seen enough. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return complain(f"{error.strerror}: {error.filename}")
    except ValueError as error:
        return complain(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> Parser:
    parser = Parser(prog="mpipe", description="Plan, simulate, verify, draw and compare pipeline schedules.")
    commands = parser.add_subparsers(metavar="plan|simulate|verify|draw|compare|export", required=True, parser_class=Parser)
    for command in (plan, simulate, draw, compare, export):
        command.add(commands)
    return parser
