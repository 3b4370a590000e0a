"""Flags of the earlier forks of Megatron-LM, in the words of this package: ``docs/moving.md`` has them in a table.

The forks are sail-sg/zero-bubble-pipeline-parallelism (with PipeOffload) and sail-sg/VocabularyParallelism. ``translate`` is a
function of a command line alone: it needs no parser, so it serves any program that takes the new flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

# Whether a flag takes a value.
FLAGS: dict[str, bool] = {
    "--enable-zero-bubble": False,
    "--zero-bubble-v-schedule": False,
    "--zero-bubble-v-schedule-mem-setup": True,
    "--zero-bubble-max-pending-backward": True,
    "--zero-bubble-adaptive-memory-limit-percentile": True,
    "--zero-bubble-pipeline-timers-start-iter": True,
    "--zero-bubble-pipeline-timers-end-iter": True,
    "--enable-1f1b-v": False,
    "--interleave-group-size": True,
    "--num-seq-splits": True,
    "--enable-zb-runtime": False,
    "--enable-optimizer-post-validation": False,
    "--enable-exactly-numeric-match": False,
    "--allow-padding-num-layers": False,
    "--no-pre-communication-optimization": False,
    "--cpu-offload": False,
    "--offload-chunk-num": True,
    "--offload-time": True,
    "--auto-offload-time": False,
    "--offload-overlap-sr": False,
    "--offload-continuous-buffers": False,
    "--no-paired-barrier": False,
    "--recompute-lgd": False,
    "--measure-activation-memory": False,
    "--profile-memory-iter": True,
    "--enable-vocab-parallel": False,
    "--disable-backward-fusion": False,
    "--use-interlaced-schedule": False,
    "--schedule-timer-start": True,
    "--schedule-timer-end": True,
    "--enable-layer-redistribution": False,
    "--final-stage-num-layers": True,
}

_WITHOUT_MEANING = {
    "--zero-bubble-adaptive-memory-limit-percentile": "--pipeline-memory-limit says how much a rank may hold; bytes such as "
    "60GiB go with --pipeline-costs profile",
    "--enable-exactly-numeric-match": "--post-validation always ends with the bits that synchronous steps give",
    "--allow-padding-num-layers": "any number of layers is spread over the ranks",
    "--no-pre-communication-optimization": "there is no such extra message",
    "--offload-overlap-sr": "copies to host memory and back always have a stream each",
    "--offload-continuous-buffers": "host memory is always taken in large pieces, and used again",
    "--no-paired-barrier": "ranks do not wait for each other's copies",
    "--measure-activation-memory": "--metrics FILE has every rank's peak, of every iteration",
    "--profile-memory-iter": "--metrics FILE has every rank's peak, of every iteration",
}
_V = {"zb": "zb-v", "half": "v-half", "min": "v-min"}
_PLANNED_BY_COSTS = ("zb-auto", "zb-v")


class _Step(NamedTuple):
    """What becomes of some of the old flags.

    Attributes:
        new: flags and values that take their place; none where they are not needed, and ``why`` says it.
    """

    old: tuple[str, ...]
    new: tuple[tuple[str, str], ...] = ()
    why: str = ""

    def __str__(self) -> str:
        old = " ".join(self.old)
        if not self.new:
            return f"{old} is not needed: {self.why}"
        new = " ".join(" ".join(filter(None, flag)) for flag in self.new)
        return f"{old} is {new} now" + (f": {self.why}" if self.why else "")


def translate(tokens: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the flags of the earlier forks in a command line by those that mean the same today.

    Args:
        tokens: a command line; may have ``--flag value`` and ``--flag=value``, and everything else beside the forks' flags.

    Returns:
        The command line without them and with the new ones at its end, and a line for each that says what it is now.

    Raises:
        ValueError: an old flag lacks its value, or has one that it cannot have; old flags contradict each other, or a new flag
            that is given as well.
    """
    old, others = _split(tokens)
    added: list[str] = []
    told: list[str] = []
    for step in _Steps(old, others):
        told.append(str(step))
        for flag, value in step.new:
            given = _values(others, flag)
            if given is None:
                added += [flag, *value.split()]
            elif sorted(map(_same, given)) != sorted(map(_same, value.split())):
                raise ValueError(
                    f"{' '.join(step.old)} is {' '.join(filter(None, (flag, value)))} now, and {' '.join((flag, *given))} is "
                    "given as well: leave one of them out"
                )
    return [*others, *added], told


class _Steps:
    """The steps from a fork's flags to ours, in the order in which they are told.

    Args:
        old: values by flag; empty for flags that take none.
        others: the rest of the command line.
    """

    def __init__(self, old: dict[str, str], others: Sequence[str]) -> None:
        self._old = old
        self._others = others
        self._ranks = _number(others, "--pipeline-model-parallel-size") or 1

    def __iter__(self) -> Iterator[_Step]:
        schedule = self._schedule()
        if schedule:
            yield schedule
        name = dict(schedule.new).get("--pipeline-schedule", "") if schedule else ""
        for rule in (self._limits, self._timers, self._vocabulary, self._layers, self._optimizer, self._offload, self._recompute):
            yield from rule(name, set(schedule.old if schedule else ()))
        for flag, why in _WITHOUT_MEANING.items():
            if flag in self._old:
                yield _Step(self._said(flag), (), why)

    def _schedule(self) -> _Step | None:
        """Which schedule the flags name; the one that a fork takes where they name none, if a part of them needs one of ours."""
        splits, group = self._whole("--num-seq-splits", 1), self._whole("--interleave-group-size", 0)
        named: dict[str, Callable[[], _Step]] = {}
        if "--zero-bubble-v-schedule" in self._old:
            named["--zero-bubble-v-schedule"] = self._v
        elif "--enable-zero-bubble" in self._old:
            named["--enable-zero-bubble"] = self._zero_bubble
        if "--enable-1f1b-v" in self._old:
            named["--enable-1f1b-v"] = lambda: _now(("--enable-1f1b-v",), "1f1b-v")
        if splits > 1:
            named["--num-seq-splits"] = lambda: self._sliced(splits)
        if group:
            named["--interleave-group-size"] = lambda: self._grouped(group)
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} each name a schedule: leave all but one out")
        return next(iter(named.values()))() if named else self._default()

    def _v(self) -> _Step:
        setup = self._old.get("--zero-bubble-v-schedule-mem-setup", "zb")
        if setup not in _V:
            raise ValueError(f"--zero-bubble-v-schedule-mem-setup {setup}: choose from {', '.join(_V)}")
        flags = ("--enable-zero-bubble", "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup")
        return _now(self._said(*flags), _V[setup])

    def _zero_bubble(self) -> _Step:
        """As many pending backwards as ranks hold what 1F1B holds, and almost twice as many leave no bubble."""
        said = self._said("--enable-zero-bubble", "--zero-bubble-max-pending-backward")
        if self._old.get("--zero-bubble-max-pending-backward", "auto") == "auto":
            return _now(said, "zb-auto")
        pending = self._whole("--zero-bubble-max-pending-backward", 0)
        if pending < 1:
            raise ValueError(f"--zero-bubble-max-pending-backward {pending}: expected auto, or microbatches of at least 1")
        if pending == self._ranks:
            return _now(said, "zb-h1")
        if pending >= 2 * self._ranks - 1:
            return _now(said, "zb-h2")
        return _now(said, "zb-auto", ("--pipeline-memory-limit", f"{pending / self._ranks:g}"))

    def _sliced(self, splits: int) -> _Step:
        if splits == 2:
            return _now(self._said("--num-seq-splits"), "seq-1f1b")
        raise ValueError(
            f"--num-seq-splits {splits}: --pipeline-schedule seq-1f1b has 2 slices; plan others with mpipe plan --schedule "
            f"seq-1f1b --splits {splits} --pp {self._ranks} --microbatches M -o FILE, and give --pipeline-schedule file:FILE "
            "instead"
        )

    def _grouped(self, group: int) -> _Step:
        size, half = min(group, self._ranks), -(-self._ranks // 2)
        said = self._said("--interleave-group-size")
        if size in (half, self._ranks):
            return _now(said, "gis" if size == self._ranks else "gis-h")
        if size < half:
            raise ValueError(f"--interleave-group-size {group}: with {self._ranks} pipeline ranks give {half} to {self._ranks}")
        raise ValueError(
            f"--interleave-group-size {group}: --pipeline-schedule gis has groups of {self._ranks} and gis-h of {half}; plan "
            f"others with mpipe plan --schedule gis --group {group} --pp {self._ranks} --microbatches M -o FILE, and give "
            "--pipeline-schedule file:FILE instead"
        )

    def _default(self) -> _Step | None:
        needing = self._said("--enable-zb-runtime", "--enable-vocab-parallel", "--cpu-offload")
        if not needing or _values(self._others, "--pipeline-schedule") is not None:
            return None
        virtual = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
        several = any(_values(self._others, flag) for flag in virtual)
        return _Step(needing[:1], (("--pipeline-schedule", "interleaved" if several else "1f1b"),), "no flag names another one")

    def _limits(self, name: str, used: set[str]) -> Iterator[_Step]:
        if "--zero-bubble-v-schedule-mem-setup" in self._old and not name.startswith(("zb-v", "v-")):
            yield _Step(self._said("--zero-bubble-v-schedule-mem-setup"), (), "it had no effect without --zero-bubble-v-schedule")
        pending = self._said("--zero-bubble-max-pending-backward")
        if pending and not used & set(pending):
            yield _Step(pending, (), "it had no effect but on --enable-zero-bubble without --zero-bubble-v-schedule")
        if "--enable-zb-runtime" in self._old and "--enable-zb-runtime" not in used:
            yield _Step(("--enable-zb-runtime",), (), "one runtime runs all schedules")
        for flag in ("--num-seq-splits", "--interleave-group-size"):
            if flag in self._old and not used & set(self._said(flag)):
                yield _Step(self._said(flag), (), "so many are what there is without it")

    def _timers(self, name: str, used: set[str]) -> Iterator[_Step]:
        """What was measured in some iterations is measured in the first ones, and later where it changes."""
        profile = (("--pipeline-costs", "profile"),)
        zero_bubble = self._said("--zero-bubble-pipeline-timers-start-iter", "--zero-bubble-pipeline-timers-end-iter")
        planned = _values(self._others, "--pipeline-schedule") or [name]
        if zero_bubble and planned[0] in _PLANNED_BY_COSTS:
            yield _Step(zero_bubble, profile)
        elif zero_bubble:
            yield _Step(
                zero_bubble, (), "this schedule does not depend on what passes take; --pipeline-costs profile measures it"
            )
        vocabulary = self._said("--schedule-timer-start", "--schedule-timer-end")
        if vocabulary and "--enable-vocab-parallel" in self._old:
            yield _Step(vocabulary, profile)
        elif vocabulary:
            yield _Step(vocabulary, (), "it had no effect without --enable-vocab-parallel")

    def _vocabulary(self, name: str, used: set[str]) -> Iterator[_Step]:
        variants = self._said("--use-interlaced-schedule", "--disable-backward-fusion")
        if "--enable-vocab-parallel" not in self._old:
            if variants:
                yield _Step(variants, (), "it had no effect without --enable-vocab-parallel")
            return
        said = self._said("--enable-vocab-parallel", "--use-interlaced-schedule", "--disable-backward-fusion")
        if "--use-interlaced-schedule" in self._old:
            yield _Step(said, (("--vocab-parallel", "interlaced"),))
        elif "--disable-backward-fusion" in self._old:
            yield _Step(said, (("--vocab-parallel", "1"),), "two barriers")
        else:
            yield _Step(said, (("--vocab-parallel", "2"),), "one barrier")

    def _layers(self, name: str, used: set[str]) -> Iterator[_Step]:
        said = self._said("--enable-layer-redistribution", "--final-stage-num-layers")
        if not said:
            return
        if "--enable-layer-redistribution" not in self._old:
            yield _Step(said, (), "it had no effect without --enable-layer-redistribution")
        elif last := self._whole("--final-stage-num-layers", 0):
            yield _Step(said, (("--decoder-last-pipeline-num-layers", str(last)),))
        else:
            yield _Step(said, (("--layer-redistribution", ""),))

    def _optimizer(self, name: str, used: set[str]) -> Iterator[_Step]:
        if "--enable-optimizer-post-validation" in self._old:
            yield _Step(("--enable-optimizer-post-validation",), (("--post-validation", ""),))

    def _offload(self, name: str, used: set[str]) -> Iterator[_Step]:
        times = self._said("--offload-time", "--auto-offload-time")
        moved = self._said("--cpu-offload", "--offload-chunk-num")
        if "--cpu-offload" not in self._old:
            if without := (*moved, *times):
                yield _Step(without, (), "it had no effect without --cpu-offload")
            return
        number, chunks = self._whole("--offload-chunk-num", 0), self._chunks()
        part = "selective" if number and chunks > 1 and 2 * number <= chunks else "full"
        yield _Step(moved, (("--offload", part),), "the planner says which activations, those that pay")
        if times:
            yield _Step(times, (("--offload-profile", ""),), "what copies take is measured")

    def _recompute(self, name: str, used: set[str]) -> Iterator[_Step]:
        if "--recompute-lgd" not in self._old:
            return
        said = ("--recompute-lgd",)
        granularity = _values(self._others, "--recompute-granularity")
        modules = _values(self._others, "--recompute-modules")
        if granularity == ["full"]:
            yield _Step(said, (), "--recompute-granularity full covers it")
        elif modules is not None and "layernorm" in modules:
            yield _Step(said, (), "--recompute-modules has layernorm")
        else:
            selective = granularity or _values(self._others, "--recompute-activations") is not None
            new = (
                ("--recompute-granularity", "selective"),
                ("--recompute-modules", f"{'core_attn ' * bool(selective)}layernorm"),
            )
            yield _Step(said, new, "needs Transformer Engine; GELU and dropout go with the module mlp, which is the whole MLP")

    def _said(self, *flags: str) -> tuple[str, ...]:
        """Those of the flags that are given, with their values."""
        return tuple(" ".join(filter(None, (flag, self._old[flag]))) for flag in flags if flag in self._old)

    def _whole(self, flag: str, default: int) -> int:
        text = self._old.get(flag)
        if text is None:
            return default
        if not text.isdecimal():
            raise ValueError(f"{flag} {text}: expected a whole number of at least 0")
        return int(text)

    def _chunks(self) -> int:
        """Chunks per rank, as far as the command line says."""
        if chunks := _number(self._others, "--num-virtual-stages-per-pipeline-rank"):
            return chunks
        layers, each = (_number(self._others, flag) for flag in ("--num-layers", "--num-layers-per-virtual-pipeline-stage"))
        return layers // (self._ranks * each) if layers and each else 1


def _same(value: str) -> str:
    """The same text for numbers that are equal."""
    try:
        return f"{float(value):g}"
    except ValueError:
        return value


def _now(old: tuple[str, ...], schedule: str, *more: tuple[str, str]) -> _Step:
    return _Step(old, (("--pipeline-schedule", schedule), *more))


def _split(tokens: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """The forks' flags with their values, the last of several, and all other tokens."""
    old: dict[str, str] = {}
    others: list[str] = []
    rest = iter(tokens)
    for token in rest:
        name, equals, value = token.partition("=")
        if name not in FLAGS:
            others.append(token)
        elif not FLAGS[name]:
            if equals:
                raise ValueError(f"{name} takes no value, got {value!r}")
            old[name] = ""
        else:
            given = value if equals else next(rest, "")
            if not given or given.startswith("--"):
                raise ValueError(f"{name} needs a value")
            old[name] = given
    return old, others


def _values(tokens: Sequence[str], flag: str) -> list[str] | None:
    """What stands behind the last occurrence of a flag; None where it is not given."""
    found = None
    for index, token in enumerate(tokens):
        if token.startswith(f"{flag}="):
            found = [token.partition("=")[2]]
        elif token == flag:
            following = tokens[index + 1 :]
            end = next((at for at, word in enumerate(following) if word.startswith("--")), len(following))
            found = list(following[:end])
    return found


def _number(tokens: Sequence[str], flag: str) -> int | None:
    values = _values(tokens, flag)
    return int(values[0]) if values and values[0].isdecimal() else None
