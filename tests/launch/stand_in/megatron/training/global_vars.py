"""What upstream keeps in globals."""

import functools
import json
import signal
from types import SimpleNamespace

_GLOBALS = SimpleNamespace(args=None, _signal_received=False)


def set_global_variables(args, build_tokenizer=True):
    _GLOBALS.args = args
    if args.exit_signal_handler:
        signal.signal(signal.SIGTERM, lambda *_: setattr(_GLOBALS, "_signal_received", True))
    args.padded_vocab_size = -(-args.vocab_size // args.make_vocab_size_divisible_by) * args.make_vocab_size_divisible_by


def get_signal_handler():
    return _GLOBALS


def get_args():
    return _GLOBALS.args


def get_tokenizer():
    return SimpleNamespace(vocab_size=_GLOBALS.args.vocab_size)


@functools.cache
def get_tensorboard_writer():
    args = _GLOBALS.args
    if not (args.tensorboard_dir and args.rank == args.world_size - 1):
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(args.tensorboard_dir)


def get_wandb_writer():
    """Stands for the package: a file that is named as the project has its values."""
    args = _GLOBALS.args

    def log(values, iteration):
        with open(args.wandb_project, "a") as file:
            print(json.dumps(values | {"at": iteration}), file=file)

    return SimpleNamespace(log=log) if args.wandb_project and args.rank == args.world_size - 1 else None
