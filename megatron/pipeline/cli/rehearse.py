"""``mpipe rehearse``: a whole pipeline on this machine's device, for as many ranks as the flags say.

It reads its command line itself, since most of that is for ``pretrain_gpt.py`` or a script of Megatron-LM's.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from math import prod
from pathlib import Path

from megatron.pipeline.cli.arguments import Commands, Parser, complain, dashes_missing, own_parser
from megatron.pipeline.cli.memory import quietly
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flag_types import positive_int
from megatron.pipeline.flags.flags import actions
from megatron.pipeline.flags.packages import refuse_without_torch
from megatron.pipeline.flags.validation_rehearsal import MEASURED, least_ranks
from megatron.pipeline.tune import trial

NAME = "rehearse"
_HELP = "run all ranks on this machine, one pass at a time, and predict the iteration with a device per rank"
_EPILOG = f"""\
FLAGS are those of a training: of this repository's pretrain_gpt.py, or of a SCRIPT of Megatron-LM's, which then runs under
mpipe launch. {MEASURED} iterations run; nothing is saved. --rehearse-hop SECONDS is what a message takes where you will train."""
_EXAMPLES = [
    "mpipe rehearse -- --config configs/tiny.yaml --mock-data --pipeline-schedule zb-v",
    "mpipe rehearse Megatron-LM/pretrain_gpt.py --pipeline-model-parallel-size 8 --pipeline-schedule v-half ...",
]
_SIZES = ("pipeline_model_parallel_size", "tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size")


def add(commands: Commands) -> None:
    """For the list of commands."""
    commands.add_parser(NAME, help=_HELP, add_help=False)


def main(arguments: Sequence[str]) -> int:
    """Start the ranks; returns 2 after one line on stderr that says what is wrong. Does not return where all is well."""
    try:
        command = torchrun(arguments)
        _check(*command[5:])
    except ValueError as error:
        return complain(f"{NAME}: {error}")
    os.execve(sys.executable, command, {"OMP_NUM_THREADS": "1", **os.environ})


def torchrun(arguments: Sequence[str]) -> list[str]:
    """The command that starts the ranks.

    Raises:
        ValueError: flags of ``pretrain_gpt.py`` are wrong, or there is none here.
    """
    at = next((place for place, token in enumerate(arguments) if token == "--" or token.endswith(".py")), len(arguments))
    own, unknown = _parser().parse_known_args(arguments[:at])
    if unknown:
        raise ValueError(dashes_missing(NAME, unknown))
    others = list(arguments[at:])
    target = others.pop(0) if others and others[0].endswith(".py") else None
    flags = [token for token in others if token != "--"]
    if not flags:
        raise ValueError("which training? mpipe rehearse -- FLAGS of pretrain_gpt.py")
    refuse_without_torch()
    ranks = own.ranks or (_ranks_of_script(flags) if target else least_ranks(parse(flags)))
    program = ["-m", "megatron.pipeline.cli", "launch", target] if target else [str(trial.script())]
    ends = [] if any(token.startswith("--exit-interval") for token in flags) else ["--exit-interval", str(MEASURED)]
    return [*trial.torchrun(ranks), *program, *flags, "--rehearse", *ends]


def _check(ranks: str, program: str, *flags: str) -> None:
    """Refuse what our own script would, without its processes, which end with many lines of torchrun's.

    Raises:
        ValueError: what is wrong, and what to change.
    """
    if program == str(trial.script()):
        with quietly():
            from megatron.pipeline.trainer.program import prepare

            prepare(flags, int(ranks))
    elif not Path(script := flags[2]).is_file():
        raise ValueError(f"there is no script {script}")


def _ranks_of_script(flags: Sequence[str]) -> int:
    """The least number of ranks of a script that has more flags than we know; sizes in a --config FILE are not seen."""
    reader = ArgumentParser(add_help=False, allow_abbrev=False)
    for size in _SIZES:
        reader.add_argument(*actions()[size].option_strings, type=positive_int, default=1, dest=size)
    return prod(vars(reader.parse_known_args(flags)[0]).values())


def _parser() -> Parser:
    parser = own_parser(NAME, "[--ranks N] [SCRIPT.py] [--] FLAGS", _HELP, _EPILOG, _EXAMPLES)
    parser.add_argument("--ranks", type=positive_int, metavar="N", help="processes; by default what the flags' sizes come to")
    return parser
