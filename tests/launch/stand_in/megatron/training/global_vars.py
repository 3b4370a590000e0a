"""What upstream keeps in globals."""

from types import SimpleNamespace

_GLOBALS = SimpleNamespace(args=None)


def set_global_variables(args, build_tokenizer=True):
    _GLOBALS.args = args
    args.padded_vocab_size = -(-args.vocab_size // args.make_vocab_size_divisible_by) * args.make_vocab_size_divisible_by


def get_args():
    return _GLOBALS.args


def get_tokenizer():
    return SimpleNamespace(vocab_size=_GLOBALS.args.vocab_size)
