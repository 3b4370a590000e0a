"""The command line of ``pretrain_gpt.py``: Megatron-LM's flag names, plus the few flags of the pipeline schedules.

``parse`` reads flags and a YAML file into a namespace; ``validation.validate`` then checks that they fit together.
Every flag here does something; a Megatron-LM flag that this program does not implement is refused, not ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megatron.pipeline.flags import support
from megatron.pipeline.flags.flags import MEGATRON
from megatron.pipeline.flags.importers import bridge, huggingface, recipes, shell, upstream
from megatron.pipeline.flags.settings import NEW, Flags, add_flags
from megatron.pipeline.planner import reading

# Flags of Megatron-LM that change nothing here.
_NOT_NEEDED = {
    "use-legacy-models": "models are always megatron-core's",
    "use-flash-attn": "Transformer Engine takes it where it can",
    "no-create-attention-mask-in-dataloader": "attention makes its own causal mask",
}

# Flags of the earlier forks of Megatron-LM, and what to give instead; docs/moving.md has their values one by one. The forks are
# sail-sg/zero-bubble-pipeline-parallelism (with PipeOffload) and sail-sg/VocabularyParallelism.
FORKS: dict[str, str] = upstream.table("forks")
GONE: dict[str, str] = upstream.table("gone")  # flags of our earlier releases, and what to give instead


def parse(argv: Sequence[str], predicts: bool = False) -> Flags:
    """Read the command line; ``--config FILE`` supplies values that the command line's own flags override.

    Args:
        predicts: take all flags of Megatron-LM's releases, which ``upstream.settle`` then reads, and the files of ``recipes``;
            without ``--pipeline-schedule`` it is None.

    Raises:
        ValueError: an unknown flag or key (with the closest known one), a value of the wrong type, an unreadable file.
    """
    parser = _parser()
    if predicts:
        upstream.add_upstream(parser)
        add_launched(parser)
        parser.set_defaults(pipeline_schedule=None)  # Megatron-LM has no such flag
        argv = upstream.in_words(parser, argv)
    args, unknown = parser.parse_known_args(with_config(parser, argv, predicts))
    if unknown and predicts:
        raise ValueError(upstream.unknown(parser, unknown[0]))
    if unknown:
        raise ValueError(_unknown(unknown[0], parser))
    return Flags(**vars(args))


def add_launched(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``mpipe launch`` has beside those of our own program."""
    parser.add_argument(
        "--adapt", action="store_true", help="leave out the flags that do not go with the schedule, and say at what price"
    )
    parser.add_argument(
        "--pipeline-packing", action="store_true",
        help="pack the sequences of every batch of --sft anew, over all replicas, into as few microbatches as hold them and "
        "of as equal work as can be",
    )  # fmt: skip


def tokens_of(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """A command line with what ``--config`` and ``--model`` stand for in their places, and remarks on that.

    Raises:
        ValueError: as ``parse``.
    """
    parser = _parser()
    upstream.add_upstream(parser)
    tokens = with_config(parser, argv, predicts=True)
    own = _FlagParser(add_help=False, allow_abbrev=False)
    for flag in ("--config", "--model"):
        own.add_argument(flag)
    left = parser.parse_known_args(tokens)[0]
    return own.parse_known_args(tokens)[1], upstream.settle(Flags(**vars(left)))[1]


def with_config(parser: argparse.ArgumentParser, argv: Sequence[str], predicts: bool = False) -> list[str]:
    """Put the flags in ``--config FILE`` before those of the command line, which so win.

    Args:
        parser: knows all flags that may be keys of the file.
        predicts: as in ``parse``.

    Raises:
        ValueError: the file cannot be read, has a key that is no flag, or a value that is none of that flag; a flag is one of an
            earlier fork (``FORKS``), or of an earlier release (``GONE``).
    """
    finder = _FlagParser(add_help=False, allow_abbrev=False)
    for flag in ("--config", "--model"):
        finder.add_argument(flag)
    if predicts:
        finder.add_argument("--set", nargs="+", action="extend", default=[])
    own = finder.parse_known_args(argv)[0]
    _refuse_old(argv)
    if predicts and "--set" in argv:
        argv = [token for token in argv if token not in {"--set", *own.set}]
    tokens = [*(_read_config(parser, own.config, predicts, argv, own.set if predicts else ()) if own.config else []), *argv]
    model = finder.parse_known_args(tokens)[0].model
    return [*(of_model(parser, model) if model else []), *tokens]


def of_model(parser: argparse.ArgumentParser, path: str) -> list[str]:
    """The flags that a model of Hugging Face stands for, as a command line has them.

    Raises:
        ValueError: as ``huggingface.read``.
    """
    try:
        flags, remarks = huggingface.read(path)
    except ValueError as error:
        raise ValueError(f"--model {path}: {' '.join(str(error).split())}") from None
    upstream.remark(parser, [f"--model {path}: {remark}" for remark in remarks])
    return _as_tokens(parser, flags, path, f"--model {path}", False)


def _refuse_old(flags: Iterable[str]) -> None:
    names = dict.fromkeys(flag.partition("=")[0] for flag in flags)
    for origin, table in (("an earlier fork (docs/moving.md)", FORKS), ("an earlier release", GONE)):
        if found := [f"{flag}: {table[flag]}" for flag in names if flag in table]:
            raise ValueError(f"flags of {origin}: {'; '.join(found)}")


class _Loader(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name = upstream.key(str(key.value))
            if name in lines:
                problem = f"{name} is in line {lines[name]} already: leave one of them out"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            lines[name] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


class _FlagParser(argparse.ArgumentParser):
    """Raises instead of printing usage and exiting: the launcher reports every bad value in the same way."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults except None and those of switches."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.nargs == 0
        return action.help if silent else super()._get_help_string(action)


def _parser() -> _FlagParser:
    parser = _FlagParser(
        prog="pretrain_gpt.py",
        description="Train a GPT with megatron-core under a pipeline schedule of megatron.pipeline.",
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, NEW | MEGATRON)
    return parser


def _read_config(
    parser: argparse.ArgumentParser, path: str, predicts: bool, argv: Sequence[str], settings: Sequence[str]
) -> list[str]:
    """A YAML file as command-line tokens, so that one parser checks both sources and the later token wins."""
    content: Any
    try:
        if predicts and path.startswith(bridge.SCHEME):
            content = bridge.flags_of(path.removeprefix(bridge.SCHEME), parser._option_string_actions)
        else:
            text = reading.content_of(path)
            is_script = predicts and (path.endswith(shell.ENDS) or text.startswith("#!"))
            loose = predicts and any(mark in text for mark in (recipes.TESTS, recipes.PRIMUS))
            if is_script:
                values = dict(setting.partition("=")[::2] for setting in settings)
                content = shell.of_script(text, Path(path), parser, {token.partition("=")[0] for token in argv}, values)
            else:
                content = yaml.load(text, yaml.SafeLoader if loose else _Loader)
            if predicts and not is_script and isinstance(content, dict):
                content = recipes.flags_in(content, Path(path), parser)
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"--config {path}: nested too deeply; expected a mapping of flags to values") from None
    except yaml.MarkedYAMLError as error:
        where = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"--config {path}{where}: {error.problem}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--config {path}: not a text file") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: expected a mapping of flags to values such as `num-layers: 4`")
    _refuse_old(f"--{upstream.key(str(name))}" for name in content)
    return _as_tokens(parser, content, path, f"--config {path}", predicts)


def _as_tokens(parser: argparse.ArgumentParser, flags: Mapping[str, Any], path: str, where: str, predicts: bool) -> list[str]:
    known = {upstream.key(option): (option, action) for option, action in parser._option_string_actions.items()}
    tokens: list[str] = []
    for name, value in flags.items():
        key = upstream.key(str(name))
        if key not in known or key == "config":
            words = upstream.unknown(parser, str(name)) if predicts else _unknown(str(name), parser)
            raise ValueError(f"{where}: {words}")
        near = Path(path).parent / str(value)  # mpipe tune writes the costs next to the configuration
        is_near = key == "pipeline-costs" and near.is_file()
        tokens += _tokens(where, *known[key], near if is_near else value)
    return tokens


def _tokens(where: str, option: str, action: argparse.Action, value: Any) -> list[str]:
    """One key of the YAML file as command-line tokens."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{where}: {option} is on or off: expected true or false, got {value!r}")
        if value or not isinstance(action, argparse.BooleanOptionalAction):
            return [option] if value else []
        return [next(name for name in action.option_strings if name.startswith("--no-"))]
    if value is None:
        return []
    if isinstance(value, bool | dict) or (isinstance(value, list) and action.nargs is None):
        raise ValueError(f"{where}: {option} takes one value, got {value!r}")
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, *upstream.words(str(value))] if action.nargs else [f"{option}={value}"]


def _unknown(name: str, parser: argparse.ArgumentParser) -> str:
    key = upstream.key(name.partition("=")[0])
    if key in _NOT_NEEDED:
        return f"{name} is not needed: {_NOT_NEEDED[key]}; leave it out"
    if meant := upstream.nearest(name, parser):
        return f"unknown flag {name}; did you mean {meant}?"
    if not isinstance(parser, _FlagParser):
        return f"unknown flag {name}; --help lists all flags"
    return support.unsupported(name)
