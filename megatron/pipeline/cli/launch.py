"""``mpipe launch``: a script of Megatron-LM's, from a checkout that stays as it is, under our schedules.

It reads its command line itself, since most of that is for others: torchrun, and the script.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Sequence

from megatron.pipeline.cli.arguments import Commands, Parser, complain, own_parser
from megatron.pipeline.cli.memory import gpu_memory
from megatron.pipeline.distributed.processes import let_rank_0_speak
from megatron.pipeline.flags.flag_types import count
from megatron.pipeline.flags.packages import missing

NAME = "launch"
_HELP = "run Megatron-LM's own pretrain_gpt.py, or a script like it, under a schedule"
_EPILOG = """\
[torchrun options], such as --nproc-per-node 8, are for where torchrun or a batch system has not started this process yet.
[flags] are Megatron-LM's, --pipeline-schedule and the other new ones, and --config FILE: mpipe launch SCRIPT --help lists all."""
_EXAMPLES = [
    "mpipe launch --nproc-per-node 8 Megatron-LM/pretrain_gpt.py --pipeline-schedule zb-v ...",
    "mpipe launch --dry-run --gpu H100 --nnodes 8 --nproc-per-node 8 Megatron-LM/pretrain_gpt.py --config train.sh",
    "torchrun --nnodes 4 ... -m megatron.pipeline.cli launch Megatron-LM/pretrain_gpt.py --pipeline-schedule zb-v ...",
]


def add(commands: Commands) -> None:
    """For the list of commands."""
    commands.add_parser(NAME, help=_HELP, add_help=False)


def main(arguments: Sequence[str]) -> int:
    """Run a script; returns its exit code, or 2 after one line on stderr that says what is wrong."""
    from megatron.pipeline.launch import script

    at = next((index for index, token in enumerate(arguments) if token.endswith(".py")), len(arguments))
    own, others = _parser().parse_known_args(arguments[:at])
    try:
        if own.dry_run:
            from megatron.pipeline.cli import dry_run

            ours = _parser()._option_string_actions.keys() - {"-h", "--help"}
            if late := [token for token in arguments[at:] if token.partition("=")[0] in ours]:
                raise ValueError(f"{late[0]} is a flag of mpipe launch itself: give it before the script")
            return dry_run.run(own, others, arguments[at:])
        run = script.prepare(others, arguments[at:], own.core)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        let_rank_0_speak()
        return complain(f"{NAME}: {missing(error) if isinstance(error, ModuleNotFoundError) else error}")
    try:
        run()  # errors of a script are printed by Python
    except ValueError as error:
        from megatron.pipeline.patches.torch_checkpoint import CheckpointError

        if isinstance(error, CheckpointError):
            return complain(f"{NAME}: {error}")
        raise
    finally:
        _end_readers()
    return 0


def _end_readers() -> None:
    """With --exit-signal-handler Megatron-LM's processes that read data outlive the SIGTERM by which Python would end them.

    It would then wait for them for ever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error about them
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _parser() -> Parser:
    parser = own_parser(NAME, "[--core checkout|pip] [torchrun options] SCRIPT [flags]", _HELP, _EPILOG, _EXAMPLES)
    whose = "whose megatron.core runs: the checkout's, if it has one (default), or pip's"
    parser.flag("--core", whose, ["checkout", "pip"], "checkout")
    group = parser.add_argument_group(
        "will it start?",
        "Exit code 0: it starts; 1: it is not predicted to fit; 2: it is refused; 3: packages are not installed here.",
    )
    flag = group.add_argument
    flag("--dry-run", action="store_true", help="say what a start refuses or leaves out, and what ranks need; start nothing")
    flag("--json", action="store_true", help="print one JSON object")
    flag("--world-size", type=count, metavar="N", help="all ranks, where torchrun's options do not say")
    flag("--gpu", metavar="NAME|FILE", help="predict seconds, too: a name or a file as for mpipe tune")
    flag("--gpu-memory", type=gpu_memory, metavar="X", help="GB of a GPU (those of --gpu, or 80)")
    parser.set_defaults(gpu_from=None)
    return parser
