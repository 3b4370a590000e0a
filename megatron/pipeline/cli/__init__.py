"""``mpipe``: plan, verify, draw, compare, export and explore schedules, and launch scripts. One file per command."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import shlex
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module

from megatron.pipeline.cli.arguments import Parser, complain
from megatron.pipeline.cli.versions import Completion, Version
from megatron.pipeline.flags.packages import missing
from megatron.pipeline.planner import families, without_gc

COMMANDS = tuple("plan certify compare check export memory costs tune flags rehearse serve launch support".split())
_OWN_FLAGS = ("check", "launch", "rehearse")  # most of their command line is for others
_IN_PLAN = ("verify", "simulate", "draw")  # what ``mpipe plan FILE`` does: for this release they answer with its command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, what the command returns, or 2 after one line on stderr that says what
    is wrong.

    Args:
        arguments: the command line; by default that of this process.
    """
    called, arguments = arguments is None, sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _OWN_FLAGS:
        return int(import_module(f"{__name__}.{arguments[0]}").main(arguments[1:]))
    if called:
        atexit.register(_freeze)
    code, options = 0, None
    try:
        with without_gc():
            options = parse(arguments)
            code = options.run(options) or 0
        if sys.stdout is not None:  # a process may be started without one
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as ``head``, has seen enough. Nothing is left to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        path = getattr(options, "output", None)  # a full disk does not say where it is
        where = f"cannot write {path}" if path else "cannot write"
        words = f"{error.strerror}: {error.filename}" if error.filename else f"{where}: {error.strerror}"
        return complain(words)
    except ModuleNotFoundError as error:
        return complain(missing(error))
    except ValueError as error:
        return complain(str(error))
    except KeyboardInterrupt as stop:
        print(f"mpipe: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    return code


def _in_plan(command: str, *given: str) -> str:
    """Command line of ``mpipe plan`` that does what ``mpipe verify``, ``simulate`` or ``draw`` did."""
    if command == "draw":
        written = [re.sub(r"^(-o|--output)(?=$|=)", "--draw", word) for word in given]
        given = (*written, *([] if written != list(given) else ["--text"]))
    return shlex.join(["mpipe", "plan", *given])


def _freeze() -> None:
    """Keep Python, at its end, from looking for cycles among all objects, for 0.2 s where the search was loaded.

    Not with triton, which torch for GPUs brings: what it has not freed it lists on stderr.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a command, with the function that runs it as ``run``.

    Raises:
        SystemExit: they are wrong; one line on stderr says why.
        ValueError: the command has become a part of another.
    """
    if arguments and arguments[0] in _IN_PLAN:
        raise ValueError(f"mpipe {arguments[0]} has become a part of mpipe plan: {_in_plan(*arguments)}")
    parser, commands = _parser(arguments[0] if arguments and arguments[0] in COMMANDS else None)
    if arguments and arguments[0] in commands:
        commands[arguments[0]].check_flags(arguments[1:])
    elif arguments and arguments[0] not in ("-h", "--help", "--version", "--print-completion"):
        named = ", ".join(commands)
        if arguments[0].startswith("-"):
            parser.error(f"a command comes before its flags: mpipe COMMAND {arguments[0]} ...; commands are {named}")
        near = families.meant(arguments[0], commands) or f"; commands are {named}"
        parser.error(f"unknown command {arguments[0]!r}{near}")
    options, flags = parser.parse_known_args(arguments)
    if flags and not getattr(options, "takes_flags", False):
        takes = "one FILE" if hasattr(options, "file") else "FILEs side by side" if hasattr(options, "files") else "flags alone"
        commands[arguments[0]].error(f"{arguments[0]} takes {takes}: leave {' '.join(flags)} out")
    options.flags = flags
    return options


@cache  # to describe all flags takes longer than most commands do, and one process may run many of them
def _parser(command: str | None) -> tuple[Parser, dict[str, Parser]]:
    """The parser of one command, or of all, and those of the commands by name."""
    parser = Parser(
        prog="mpipe",
        usage="mpipe COMMAND [options]",
        description="Plan, verify, draw and compare pipeline schedules.",
        examples=["mpipe compare --pp 8 --microbatches 32", "mpipe COMMAND --help", 'eval "$(mpipe --print-completion bash)"'],
    )
    parser.add_argument("--version", action=Version, nargs=0, default=argparse.SUPPRESS, help="print versions, and exit")
    completed = "print what completes mpipe's commands and flags in a shell, and exit; needs the package shtab"
    parser.add_argument("--print-completion", action=Completion, choices=["bash", "zsh"], help=completed)
    commands = parser.add_subparsers(prog="mpipe", metavar="|".join(COMMANDS), required=True, parser_class=Parser)
    # A process imports the module of the command that it runs: all of them take longer than a small plan.
    for name in [command] if command else COMMANDS:
        import_module(f"{__name__}.{name}").add(commands)
    return parser, commands.choices
