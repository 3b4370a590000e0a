"""Read the command line of ``mpipe``, and say in one line what is wrong.

The groups of flags that several commands share are functions that return a parent parser.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeAlias

from megatron.pipeline.flags.flag_types import memory_size, positive_int
from megatron.pipeline.flags.settings import flag
from megatron.pipeline.planner import Objective, Offload, Vocabulary, document, every_batch, hybrid, refusals, written_costs

REPLICA_LINK = 50.0  # GB/s: a network card of 400 Gbit/s per GPU


class Parser(argparse.ArgumentParser):
    """Complains in one line, without the usage; flags are to be written out, as those of training are.

    Args:
        examples: command lines, which ``--help`` shows at its end.
    """

    def __init__(self, examples: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**({"allow_abbrev": False} | options))
        self.examples = tuple(examples)

    def flag(self, *row: Any, **options: Any) -> None:
        """Add a flag: ``settings.flag`` has the arguments."""
        names, given, _ = flag(*row, **options)
        self.add_argument(*names, **given)

    def format_help(self) -> str:
        """The usage in one line, examples, and then the flags, those of one purpose together."""
        self.usage = self.usage or " ".join([self.prog, *self._needed(), "[options]"]).replace("%", "%%")
        parts = [self.format_usage()]
        if self.description:
            parts.append(f"\n{self.description}\n")
        if self.examples:
            parts.append("".join(["\nexamples:\n", *(f"  {example}\n" for example in self.examples)]))
        formatter = self._get_formatter()
        for title, actions in self._purposes():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return "".join([*parts, "\n", formatter.format_help()])

    def _needed(self) -> list[str]:
        """Arguments without which there is no command."""
        others = [action for action in self._actions if not action.option_strings]
        flags = [
            f"{action.option_strings[0]} {action.metavar}"
            for action in self._actions
            if action.option_strings and action.required
        ]
        return [*flags, *(f"[{one.metavar} ..]" if one.nargs == "*" else str(one.metavar) for one in others)]

    def _purposes(self) -> Iterator[tuple[str | None, list[argparse.Action]]]:
        """Titles of groups, the usual flags first, with their flags."""
        for group in self._action_groups:
            actions = group._group_actions
            if group is self._optionals:
                named = {action.option_strings[-1].lstrip("-"): action for action in actions}
                for title, names in _PURPOSES.items():
                    yield title, [named.pop(name) for name in names.split() if name in named]
                actions = list(named.values())
            yield group.title, actions

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """The value of a flag, or an error in the words of what reads it: argparse has none for a ValueError."""
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentError(action, str(error)) from None

    def error(self, message: str) -> NoReturn:
        sys.exit(complain(f"{message} (see {self.prog} --help)"))

    def check_flags(self, arguments: Sequence[str]) -> None:
        """End where one of the flags is none of this parser's, before others are missed."""
        known = {option.lstrip("-"): option for option in self._option_string_actions}
        for token in arguments:
            name = token.partition("=")[0].removeprefix("--")
            if token.startswith("--") and name and name not in known:
                near = [longer for longer in known if longer.startswith(f"{name}-")]
                if self.get_default("takes_flags") and not near:
                    continue  # one of a training
                near = near or difflib.get_close_matches(name, known, n=1)
                self.error(f"unknown flag --{name}" + (f"; did you mean {known[near[0]]}?" if near else ""))


_PURPOSES = {  # of flags that several commands share, in the order of their help
    "the usual": "gpus gpu gpus-per-node schedule schedules pp microbatches chunks cost costs memory-limit objective json output",
    "costs in detail": "activation slow first-stage last-stage",
    "passes": "recompute fuse balance splits group",
    "vocabulary and experts": "vocab-parallel vocab-cost overlap-experts",
    "offload": "offload host-memory-limit copy",
    "unequal microbatches": "lengths attention order",
    "between iterations": "replicas grad-bytes param-bytes replica-link",
    "drawings": "draw text memory consecutive trace",
}

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def own_parser(name: str, usage: str, description: str, epilog: str, examples: Sequence[str]) -> Parser:
    """Parser of a command whose command line is mostly another program's; ``usage`` follows the command's name."""
    return Parser(
        prog=f"mpipe {name}",
        usage=f"mpipe {name} {usage}",
        description=description,
        epilog=epilog,
        examples=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def dashes_missing(name: str, flags: Sequence[str]) -> str:
    """Words about flags that are none of a command's own, and stand where those would."""
    return f"{flags[0]} is no flag of mpipe {name} itself: put -- before a training's, as in mpipe {name} -- {' '.join(flags)}"


def add_command(
    commands: Commands, name: str, help: str, run: Callable[[argparse.Namespace], int | None], *examples: str, **options: Any
) -> Parser:
    """The parser of a new command; ``run`` takes what it reads, and returns the exit code or None for 0."""
    parser = commands.add_parser(name, **{"help": help, "description": help, "examples": examples} | options)
    parser.set_defaults(run=run)
    return parser


def complain(message: str) -> int:
    """One line on stderr; returns the exit code of bad input."""
    print("mpipe:", " ".join(message.split()), file=sys.stderr)
    return 2


# fmt: off
def cost_flags() -> Parser:
    """Flags for the costs and the memory of passes, and for the memory limit."""
    flags = Parser(add_help=False)
    flags.flag("--cost", "one rank's share of one microbatch and one message (comm; of one link: comm[2-3]; one way: "
        "comm[2to3]; where messages stand in line: busy[2-3]), in any unit of time (default: 1,1,1,0, or the file's). "
        f"NAME is one of {written_costs.named_times()}; AR (the part of F, and of B, that is sums over tensor-parallel ranks)",
        numbers(*written_costs.TIMES), metavar="F=..,B=..,W=..,comm=..[,NAME=..]")
    flags.flag("--activation", "memory that F allocates, the part that remains from B to W (default: all of it, or the file's), "
        "and what F keeps where R follows (default: 0)", numbers(*written_costs.MEMORY), metavar="B=..,W=..[,R=..]")
    for name, part in (("first", "embedding"), ("last", "output layer")):
        flags.flag(f"--{name}-stage", f"what the {part} adds to the {name} stage of the model: in the unit of --cost, and in "
            "microbatches", numbers(*written_costs.EXTRA), metavar="F=..,B=..,W=..,activation=..")
    flags.flag("--vocab-cost", "one rank's share of the vocabulary with --vocab-parallel: time of the output layer's S and T "
        "and the embedding's IF and IB, memory of S until T in microbatches, and time of a collective (default: S=0.5, T=0.5, a "
        "message for a collective, 0 for the others; or the file's). --first-stage and --last-stage must then not contain "
        "embedding and output layer",
        numbers(*written_costs.SPREAD), metavar="S=..,T=..[,IF=..][,IB=..][,activation=..][,exchange=..]")
    flags.flag("--copy", "share of its speed that a copy keeps while its rank copies in the other direction, too, between 0.5 "
        "and 1; number of neighbouring ranks that share one switch to host memory, and the share of speed that each keeps while "
        "all copy in one direction (default: 1,1,1: copies do not slow each other; or the file's)",
        numbers(*written_costs.SHARED), metavar="both=..[,switch=..,shared=..]")
    _add_of_stages(flags)
    return flags


def _add_of_stages(flags: Parser) -> None:
    """Flags for the costs of every stage or rank, on top of those of all."""
    flags.flag("--costs", 'costs of every stage, instead of the flags above: {"hop": .., "stages": [{"forward": .., "backward": '
        '.., "weight": .., "activation": ..}, ..]}, as mpipe costs and mpipe rehearse write them; --memory-limit is then in the '
        "unit of its activations, or bytes such as 20GiB", document.read_costs, metavar="FILE")
    flags.flag("--slow", "ranks whose passes take that many times as long as the costs say, such as 2=1.3",
        written_costs.read_slow, metavar="RANK=TIMES[,..]")
    flags.flag("--memory-limit", "limit of a rank's activations, in microbatches, or as --costs says", limit, metavar="X")


def boundary_flags() -> Parser:
    """Flags for what ranks do between two iterations, from sizes in place of times."""
    flags = Parser(add_help=False)
    flags.flag("--replicas", "data-parallel replicas: the reduction of gradients and the gather of parameters between two "
        "iterations count, in seconds, so --cost is in seconds too (give its OPT and norm there)", positive_int, metavar="D")
    flags.flag("--grad-bytes", "with --replicas: a rank's gradients, such as 4GiB", memory_size, metavar="X")
    flags.flag("--param-bytes", "with --replicas: a rank's parameters (default: half of --grad-bytes)", memory_size, metavar="X")
    flags.flag("--replica-link", f"with --replicas: 1e9 bytes a second between a rank's replicas (default: {REPLICA_LINK:g})",
        float, metavar="GB/S")
    return flags


def size_flags(required: bool = True) -> Parser:
    flags = Parser(add_help=False)
    flags.flag("--pp", "pipeline ranks", positive_int, required=required, metavar="P")
    flags.flag("--microbatches", "microbatches per iteration", positive_int, required=required, metavar="M")
    return flags


def length_flags() -> Parser:
    """Flags for microbatches of unequal lengths."""
    flags = Parser(add_help=False)
    flags.flag("--lengths", "plan for these microbatches: in every line the lengths of one's sequences, in tokens; or a list of "
        "such lists in JSON. The costs are then those of one sequence as long as the mean microbatch",
        every_batch.read_lengths, metavar="FILE")
    flags.flag("--attention", "with --lengths: share of F, at these costs, that is attention and grows with the square of a "
        "sequence (default: 0)", float, metavar="SHARE")
    flags.flag("--order", "with --lengths: whether another order of the microbatches may be planned (default: given)",
        ["given", "any"])
    return flags


def goal_flags() -> Parser:
    """The objective."""
    flags = Parser(add_help=False)
    flags.flag("--objective", "what to minimise: the makespan, from the first pass on any rank to the last (default, or the "
        "file's), or the span, the longest time from a rank's first pass to its last: the duration of an iteration with "
        "--post-validation", [str(objective) for objective in Objective])
    return flags


def offload_flags() -> Parser:
    flags = Parser(add_help=False)
    flags.flag("--offload", "copy activations to host memory and back while ranks compute: at most half of them, the "
        "longest-lived (selective), or all whose copies pay (full)", ["off", *map(str, Offload)])
    flags.flag("--host-memory-limit", "with --offload: limit of a rank's activations in host memory, as --memory-limit "
        "(default: none)", limit, metavar="X")
    return flags


def pass_flags() -> Parser:
    flags = Parser(add_help=False)
    flags.flag("--recompute", "stages that run their forward again: all, or 0,3-5", StageList, metavar="STAGES")
    flags.flag("--vocab-parallel", "shard the vocabulary over all ranks, with two barriers between the last forward and the "
        "last backward (1), one (2), or all ranks in step (interlaced)", ["off", *map(str, Vocabulary)])
    flags.flag("--overlap-experts", "run a forward and another microbatch's backward as one unit where that shortens the "
        "schedule: the computation of one hides the all-to-alls of the other; --cost has the parts of layers "
        "(F.dispatch=..,F.experts=..,F.combine=.., the same of B, W.experts=.., layers=..)", ["off", "on"], nargs="?", const="on")
    flags.flag("--fuse", "stages that run B and W as one pass: all, or 0,3-5", StageList, metavar="STAGES")
    flags.flag("--trained", "what trains, of costs of training all: all, none (what trains comes before the layers), "
        "layers=16-31/32 (of 32, from 0), or lora:r=16[,layers=..], whose adapters take no time here; no B runs before the "
        "first layer that trains", written_costs.read_trained, metavar="WHAT")
    flags.flag("--balance", "plan the number of each stage's layers, of LAYERS in the model, by moving one layer at a time; "
        "costs are those of an even split, of which what the first and the last stage have more stays there. Or a "
        "--hybrid-layer-pattern, whose | are a split to compare with, and --costs of mpipe costs --by-layer",
        layers_or_pattern, metavar="LAYERS")
    return flags


def report_flags(
    json: str = "one JSON object, which the other commands read",
    output: str = "write there instead of to the terminal: .json for what the other commands read, .txt for text",
) -> Parser:
    """Add the flags that say what to print, and where; the arguments are what the help says of each."""
    flags = Parser(add_help=False)
    flags.flag("--json", json)
    flags.flag("-o --output", output, str, metavar="FILE")
    return flags
# fmt: on


def numbers(*names: str) -> Callable[[str], written_costs.Numbers]:
    """An argument type for ``F=1,B=2`` with these names."""

    def parse(text: str) -> written_costs.Numbers:
        given: written_costs.Numbers = {}
        for item in text.split(","):
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or name in given:
                raise ValueError(f"{text!r}: expected each of {', '.join(names)} at most once, as in {names[0]}=1")
            try:
                given[name] = float(value)
            except ValueError:
                raise ValueError(f"{text!r}: {name}={value}: expected a number without a unit, such as {name}=1") from None
        try:
            return written_costs.checked(given, names)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None

    return parse


def limit(text: str) -> float:
    """An argument type for a memory limit: a number in the unit of the costs, or ``Bytes`` for one such as 20GiB."""
    try:
        return refusals.read_amount(text)
    except ValueError:
        wanted = f"a number of microbatches of at least 0, or bytes such as 20GiB, in one of {', '.join(refusals.MEMORY_UNITS)}"
        raise ValueError(f"{text!r}: expected {wanted}") from None


def names(text: str) -> list[str]:
    """An argument type for names with commas between them."""
    return [name.strip() for name in text.split(",")]


def whole_numbers(text: str) -> list[int]:
    """An argument type for ``2,4``."""
    try:
        return [positive_int(item) for item in text.split(",")]
    except argparse.ArgumentTypeError:
        raise ValueError(f"{text!r}: expected whole numbers of at least 1, such as 2 or 2,4") from None


def layers_or_pattern(text: str) -> int | hybrid.Pattern:
    """An argument type for the layers of a model: their number, or a letter for each."""
    if not text.strip() or any(map(str.isdecimal, text)):
        return int(positive_int(text))
    return hybrid.Pattern.of(text)


class StageList:
    """An argument type for stages of the model: ``all``, ``0`` or ``0,3-5``."""

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            bounds = [[int(end) for end in item.split("-")] for item in text.split(",")] if text != "all" else []
        except ValueError:
            bounds = [[]]
        if not all(len(ends) in (1, 2) and ends[0] <= ends[-1] for ends in bounds):
            raise ValueError(f"{text!r}: expected all, or stages such as 0 or 0,3-5")
        self._runs = [(ends[0], ends[-1]) for ends in bounds]

    def of(self, count: int) -> frozenset[int]:
        """The stages of a model of ``count`` stages.

        Raises:
            ValueError: it has no such stage.
        """
        if self._text == "all":
            return frozenset(range(count))
        for _, last in self._runs:
            if last >= count:
                raise ValueError(f"{self._text}: there is no stage {last}; the stages are 0..{count - 1}")
        return frozenset(stage for first, last in self._runs for stage in range(first, last + 1))
