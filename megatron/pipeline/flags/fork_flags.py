"""Flags of the earlier forks of Megatron-LM, and the flags of this package that mean the same; ``docs/moving.md`` explains each.

The forks are sail-sg/zero-bubble-pipeline-parallelism (with PipeOffload) and sail-sg/VocabularyParallelism. ``translate`` needs a
command line and no parser, so every program that takes the new flags can use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from megatron.pipeline.flags.flags import GROUP_FLAG


class _Line:
    """A command line.

    Attributes:
        old: the forks' flags with their values, of which the last one counts.
        others: all other tokens.
        schedule: what the forks' flags have named so far.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self.old: dict[str, str] = {}
        self.others: list[str] = []
        self.schedule = ""
        rest = iter(tokens)
        for token in rest:
            name, equals, value = token.partition("=")
            if name not in FLAGS:
                self.others.append(token)
                continue
            if equals and not FLAGS[name]:
                raise ValueError(f"{name} takes no value, got {value!r}")
            if FLAGS[name]:
                value = value if equals else next(rest, "")
                if not value or value.startswith("--"):
                    raise ValueError(f"{name} needs a value")
            self.old[name] = value

    def given(self, flag: str) -> list[str] | None:
        """The values of the last occurrence of a flag that is not the forks'; None where it is not given."""
        values = None
        for index, token in enumerate(self.others):
            if token.startswith(f"{flag}="):
                values = [token.partition("=")[2]]
            elif token == flag:
                values = list(takewhile(lambda word: not word.startswith("--"), self.others[index + 1 :]))
        return values

    def number(self, flag: str) -> int:
        """The value of such a flag; 0 where it is not given, or no number."""
        values = self.given(flag)
        return int(values[0]) if values and values[0].isdecimal() else 0

    def whole(self, flag: str, default: int = 0) -> int:
        text = self.old.get(flag, str(default))
        if not text.isdecimal():
            raise ValueError(f"{flag} {text}: expected a whole number of at least 0")
        return int(text)

    @property
    def ranks(self) -> int:
        return self.number("--pipeline-model-parallel-size") or 1


def _v(line: _Line) -> str:
    schedules = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
    setup = line.old.get("--zero-bubble-v-schedule-mem-setup", "zb")
    if setup not in schedules:
        raise ValueError(f"--zero-bubble-v-schedule-mem-setup {setup}: choose from {', '.join(schedules)}")
    return f"--pipeline-schedule {schedules[setup]}"


def _zero_bubble(line: _Line) -> str:
    """With as many pending backwards as ranks, a rank holds what 1F1B holds; almost twice as many leave no bubble."""
    if line.old.get("--zero-bubble-max-pending-backward", "auto") == "auto":
        return "--pipeline-schedule zb-auto"
    pending = line.whole("--zero-bubble-max-pending-backward")
    if pending < 1:
        raise ValueError(f"--zero-bubble-max-pending-backward {pending}: expected auto, or microbatches of at least 1")
    if pending == line.ranks:
        return "--pipeline-schedule zb-h1"
    if pending >= 2 * line.ranks - 1:
        return "--pipeline-schedule zb-h2"
    return f"--pipeline-schedule zb-auto --pipeline-memory-limit {pending / line.ranks:g}"


def _slices(line: _Line) -> str:
    splits = line.whole("--num-seq-splits", 1)
    if splits > 2:
        raise ValueError(
            f"--num-seq-splits {splits}: --pipeline-schedule seq-1f1b has 2 slices; plan others with mpipe plan --schedule "
            f"seq-1f1b --splits {splits} --pp {line.ranks} --microbatches M -o FILE, and give --pipeline-schedule file:FILE "
            "instead"
        )
    return "--pipeline-schedule seq-1f1b" if splits == 2 else ": this is the default"


def _groups(line: _Line) -> str:
    group, ranks = line.whole("--interleave-group-size"), line.ranks
    size, half = min(group, ranks), -(-ranks // 2)
    if not group:
        return ": this is the default"
    if size < half:
        raise ValueError(f"--interleave-group-size {group}: with {ranks} pipeline ranks give {half} to {ranks}")
    if size not in (half, ranks):
        return f"--pipeline-schedule gis {GROUP_FLAG} {size}"
    return f"--pipeline-schedule {'gis' if size == ranks else 'gis-h'}"


def _timers(line: _Line) -> str:
    if (line.given("--pipeline-schedule") or [line.schedule])[0] in ("zb-auto", "zb-v"):
        return "--pipeline-costs profile"
    return ": this schedule does not depend on how long passes take; --pipeline-costs profile measures it"


def _vocabulary(line: _Line) -> str:
    if "--use-interlaced-schedule" in line.old:
        return "--vocab-parallel interlaced"
    return f"--vocab-parallel {'1: two barriers' if '--disable-backward-fusion' in line.old else '2: one barrier'}"


def _layers(line: _Line) -> str:
    last = line.whole("--final-stage-num-layers")
    return f"--decoder-last-pipeline-num-layers {last}" if last else "--layer-redistribution"


def _offload(line: _Line) -> str:
    number, chunks = line.whole("--offload-chunk-num"), line.number("--num-virtual-stages-per-pipeline-rank")
    if not chunks and (each := line.number("--num-layers-per-virtual-pipeline-stage")):
        chunks = line.number("--num-layers") // (line.ranks * each)
    part = "selective" if number and chunks > 1 and 2 * number <= chunks else "full"
    return f"--offload {part}: the planner chooses the activations for which offloading pays"


def _norms(line: _Line) -> str:
    granularity = line.given("--recompute-granularity")
    if granularity == ["full"]:
        return ": --recompute-granularity full covers it"
    if "layernorm" in (line.given("--recompute-modules") or ()):
        return ": --recompute-modules has layernorm"
    attention = "core_attn " if granularity or line.given("--recompute-activations") is not None else ""
    why = "needs Transformer Engine; GELU and dropout go with the module mlp, which is the whole MLP"
    return f"--recompute-granularity selective --recompute-modules {attention}layernorm: {why}"


class _Row(NamedTuple):
    """Flags of the forks that belong together, and what they are now.

    Attributes:
        theirs: the flags, with = after those that take a value; the row is for those of them that no earlier row has replaced.
        ours: flags and values that take their place, none where they are not needed; after a colon a reason or remark.
        needs: one of the forks' flags without which the row does not apply.
    """

    theirs: str
    ours: str | Callable[[_Line], str]
    needs: str = ""

    @property
    def flags(self) -> list[str]:
        return [flag.rstrip("=") for flag in self.theirs.split()]


_METRICS = ": --metrics FILE has every rank's peak, of every iteration"
_V, _ZERO_BUBBLE, _VOCABULARY = "--zero-bubble-v-schedule", "--enable-zero-bubble", "--enable-vocab-parallel"
_ROWS = (
    _Row("--enable-zero-bubble --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup=", _v, _V),
    _Row("--enable-zero-bubble --zero-bubble-max-pending-backward=", _zero_bubble, _ZERO_BUBBLE),
    _Row("--zero-bubble-max-pending-backward=", ": only --enable-zero-bubble without --zero-bubble-v-schedule used it"),
    _Row("--enable-1f1b-v", "--pipeline-schedule 1f1b-v"),
    _Row("--num-seq-splits=", _slices),
    _Row("--interleave-group-size=", _groups),
    _Row("--enable-zb-runtime", ": one runtime runs all schedules"),
    _Row("--zero-bubble-pipeline-timers-start-iter= --zero-bubble-pipeline-timers-end-iter=", _timers),
    _Row("--schedule-timer-start= --schedule-timer-end=", "--pipeline-costs profile", _VOCABULARY),
    _Row("--enable-vocab-parallel --use-interlaced-schedule --disable-backward-fusion", _vocabulary, _VOCABULARY),
    _Row("--enable-layer-redistribution --final-stage-num-layers=", _layers, "--enable-layer-redistribution"),
    _Row("--enable-optimizer-post-validation", "--post-validation"),
    _Row("--offload-time= --auto-offload-time", "--offload-profile: the time of copies is measured", "--cpu-offload"),
    _Row("--cpu-offload --offload-chunk-num=", _offload, "--cpu-offload"),
    _Row("--recompute-lgd", _norms),
    _Row(
        "--zero-bubble-adaptive-memory-limit-percentile=",
        ": --pipeline-memory-limit says how much a rank may hold; bytes such as 60GiB go with --pipeline-costs profile",
    ),
    _Row("--enable-exactly-numeric-match", ": --post-validation always ends with the bits that synchronous steps give"),
    _Row("--allow-padding-num-layers", ": any number of layers is spread over the ranks"),
    _Row("--no-pre-communication-optimization", ": there is no such extra message"),
    _Row("--offload-overlap-sr", ": copies to host memory and back always have a stream each"),
    _Row("--offload-continuous-buffers", ": host memory is always allocated in large pieces and reused"),
    _Row("--no-paired-barrier", ": ranks do not wait for each other's copies"),
    _Row("--measure-activation-memory", _METRICS),
    _Row("--profile-memory-iter=", _METRICS),
)
# Whether a flag takes a value.
FLAGS = {flag.rstrip("="): flag.endswith("=") for row in _ROWS for flag in row.theirs.split()}


def translate(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the flags of the earlier forks in a command line by those that mean the same today.

    Args:
        tokens: a command line, with ``--flag value`` or ``--flag=value``; other flags than the forks' are kept.

    Returns:
        The command line without the forks' flags and with the new ones at its end, and a line of text for each replacement.

    Raises:
        ValueError: an old flag lacks its value, or its value is not allowed; it contradicts another old flag, or a new flag that
            is given as well.
    """
    line = _Line(tokens)
    added: list[str] = []
    lines: list[str] = []
    naming = ""  # the flags that name the schedule

    def replace(theirs: Sequence[str], text: str) -> None:
        nonlocal naming
        old = " ".join(" ".join(filter(None, (flag, line.old[flag]))) for flag in theirs)
        ours, _, why = text.partition(": ")
        lines.append(f"{old} is {f'{ours} now' if ours else 'not needed'}" + (f": {why}" if why else ""))
        for new in filter(None, ours.split("--")):
            flag, *values = f"--{new}".split()
            if flag == "--pipeline-schedule":
                if naming:
                    raise ValueError(f"{naming} and {old} each name a schedule: leave all but one out")
                naming, line.schedule = old, values[0]
            given = line.given(flag)
            if given is None:
                added.extend((flag, *values))
            elif sorted(map(_same, given)) != sorted(map(_same, values)):
                now, also = (" ".join((flag, *words)) for words in (values, given))
                raise ValueError(f"{old} is {now} now, and {also} is given as well: leave one of them out")

    left = dict.fromkeys(line.old)
    for row in _ROWS:
        theirs = [flag for flag in left if flag in row.flags]
        if theirs and (not row.needs or row.needs in left):
            replace(theirs, row.ours if isinstance(row.ours, str) else row.ours(line))
            for flag in theirs:
                del left[flag]
    for flag in left:
        replace([flag], f": it had no effect without {next(row.needs for row in _ROWS if flag in row.flags)}")
    needing = [flag for flag in ("--enable-zb-runtime", "--enable-vocab-parallel", "--cpu-offload") if flag in line.old]
    if needing and not naming and line.given("--pipeline-schedule") is None:
        virtual = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
        schedule = "interleaved" if any(map(line.given, virtual)) else "1f1b"
        replace(needing[:1], f"--pipeline-schedule {schedule}: no flag names another one")
    return [*line.others, *added], lines


def _same(value: str) -> str:
    """The same text for numbers that are equal."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return value
