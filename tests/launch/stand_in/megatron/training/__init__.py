"""Stands for Megatron-LM's ``megatron.training``: the functions that our patches look for, called in its order, and no more.

``initialize`` validates flags before there are process groups, ``training`` builds the model, trains, and looks for losses on
the last pipeline rank; names are imported from one module into another as upstream does. tests/launch/test_front_door.py runs the
real one of newer releases.
"""

from megatron.training.global_vars import get_args, get_tokenizer
from megatron.training.training import pretrain

__all__ = ["get_args", "get_tokenizer", "pretrain"]
