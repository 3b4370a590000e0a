"""What upstream keeps in globals."""

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
