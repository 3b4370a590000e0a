"""``mpipe``: plan, simulate, verify, draw, compare, export and explore schedules, and launch scripts. One file per command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import cache

from megatron.pipeline.cli import (
    certify,
    compare,
    draw,
    export,
    launch,
    memory,
    plan,
    rehearse,
    serve,
    simulate,
    support,
    tune,
    vocabulary,
)
from megatron.pipeline.cli.arguments import Parser, complain
from megatron.pipeline.cli.packages import Version, missing
from megatron.pipeline.planning.collecting import without_collecting
from megatron.pipeline.schedule.families import meant

COMMANDS = (
    "plan",
    "simulate",
    "verify",
    "certify",
    "draw",
    "compare",
    "export",
    "vocabulary",
    "memory",
    "tune",
    "rehearse",
    "serve",
    "launch",
    "support",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, what the command returns, or 2 after one line on stderr that says what
    is wrong.

    Args:
        arguments: the command line; by default that of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    for command in (launch, rehearse):
        if arguments and arguments[0] == command.NAME:
            return command.main(arguments[1:])
    code = 0
    try:
        with without_collecting():
            options = parse(arguments)
            code = options.run(options) or 0
        if sys.stdout is not None:  # a process may be started without one
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as ``head``, has seen enough. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return complain(f"{error.strerror}: {error.filename}" if error.filename else f"cannot write: {error.strerror}")
    except ModuleNotFoundError as error:
        return complain(missing(error))
    except ValueError as error:
        return complain(str(error))
    except KeyboardInterrupt:
        return 130
    return code


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a command, with the function that runs it as ``run``.

    Raises:
        SystemExit: they are wrong; one line on stderr says why.
    """
    parser, commands = _parser()
    if arguments and arguments[0] in commands:
        commands[arguments[0]].check_flags(arguments[1:])
    elif arguments and arguments[0] not in ("-h", "--help", "--version"):
        named = ", ".join(commands)
        if arguments[0].startswith("-"):
            parser.error(f"a command comes before its flags: mpipe COMMAND {arguments[0]} ...; commands are {named}")
        near = meant(arguments[0], commands) or f"; commands are {named}"
        parser.error(f"unknown command {arguments[0]!r}{near}")
    options, flags = parser.parse_known_args(arguments)
    if flags and not getattr(options, "takes_flags", False):
        takes = "one FILE" if hasattr(options, "file") else "flags alone"
        commands[arguments[0]].error(f"{arguments[0]} takes {takes}: leave {' '.join(flags)} out")
    options.flags = flags
    return options


@cache  # to describe all flags takes longer than most commands do, and one process may run many of them
def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of all, and those of the commands by name."""
    parser = Parser(prog="mpipe", description="Plan, simulate, verify, draw and compare pipeline schedules.")
    parser.add_argument("--version", action=Version, nargs=0, default=argparse.SUPPRESS, help="print versions, and exit")
    commands = parser.add_subparsers(metavar="|".join(COMMANDS), required=True, parser_class=Parser)
    for command in (plan, simulate, certify, draw, compare, export, vocabulary, memory, tune, rehearse, serve, launch, support):
        command.add(commands)
    return parser, commands.choices
