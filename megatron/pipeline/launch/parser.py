"""Megatron-LM's parser of flags with ours added, and how refusals of flags end a run."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from megatron.pipeline.distributed.processes import let_rank_0_speak
from megatron.pipeline.flags.arguments import add_launched, of_model, with_config
from megatron.pipeline.flags.importers import huggingface
from megatron.pipeline.flags.settings import NEW, add_flags
from megatron.pipeline.launch.adapt import adapt
from megatron.pipeline.launch.check import defaults_without_gpu
from megatron.pipeline.planner import STOCK, Facts, topics


def extend(parser: ArgumentParser, say: Callable[[Sequence[str]], object]) -> None:
    """Add our flags, let ``--config FILE`` supply both kinds, and leave out with ``--adapt`` what does not go with a schedule.

    Args:
        say: gets a line for each flag that is left out.
    """
    add_flags(parser, NEW)
    add_launched(parser)
    parser.set_defaults(pipeline_schedule=STOCK)
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{name: value for name, value in defaults_without_gpu().items() if name in known})
    parse_known = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        with refusing():
            tokens = with_config(parser, sys.argv[1:] if args is None else args)
        parsed = parse_known(tokens, namespace)
        if model := parsed[0].model:
            say(["; ".join([f"--model {model} stands for {shlex.join(of_model(parser, model))}", *huggingface.lacking(model)])])
        with refusing():  # before upstream reads that file in place of all flags: ``check_flags`` would not see ours
            Facts(yaml_cfg=getattr(parsed[0], "yaml_cfg", None) is not None, ours=True).refuse(topics.YAML)
        if not parsed[0].adapt:
            return parsed
        without, lines = adapt(parsed[0], parser.get_default)
        say(lines)
        return Namespace(**vars(parsed[0]) | without), parsed[1]

    parser.parse_known_args = parse  # type: ignore[assignment, method-assign]
    parser.error = _refuse  # type: ignore[method-assign]


def _refuse(message: str) -> NoReturn:
    """Without the usage, which has hundreds of flags, on every rank."""
    with refusing():
        raise ValueError(f"{message} (--help lists all flags)")


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a ValueError into one line on stderr and exit code 2, as Megatron-LM's own parser does."""
    try:
        yield
    except ValueError as error:
        let_rank_0_speak()
        print(f"mpipe launch: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        sys.exit(2)
