"""Costs: seconds and bytes of every pass on every stage, and of every hop."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from megatron.pipeline.planner.schedule.core import costs_fields, link_costs
from megatron.pipeline.planner.schedule.core.braids import braid_seconds
from megatron.pipeline.planner.schedule.core.link_costs import LinkCosts
from megatron.pipeline.planner.schedule.core.loads import Load
from megatron.pipeline.planner.schedule.core.passes import Kind
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.reading import parse_json
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.stage_costs import (
    ALL_TO_ALL,
    WITHIN,
    CopyCosts,
    MemoryUnit,
    StageCosts,
    VocabularyCosts,
    by_name,
)

__all__ = ["CopyCosts", "Costs", "MemoryUnit", "StageCosts", "VocabularyCosts", "uniform"]

_FEWEST_BYTES = 2**17  # of a microbatch on its largest stage: as many MiB would be more than a GPU of 128 GiB has


@dataclass(frozen=True)
class Costs:
    """The costs of every stage, the seconds of one hop between neighbouring ranks, what a spread vocabulary costs, and copies to
    host memory.

    Attributes:
        unit: of memory; where it is not said, as in files of earlier releases, bytes if a stage has ``_FEWEST_BYTES`` or more.
        beside_communication: how many times as long a braid computes while its layers communicate.
        latency: seconds that RS and AG of a bucket take beside those of its bytes.
        links: where a message takes another time than ``hop``.
        norm: seconds of the gradients' norm over all ranks, for which steps wait where iterations do not interlock.
        at_once: whether all OPT of a rank come before its first AG, as of an optimizer that steps all weights in one piece.
        pattern: letters of a hybrid model's layers, and what predicts further behind ``/``, where each layer is a stage, between
            two of what is before and behind them; empty where stages are no letters.
        loads: of every microbatch, where these are of unequal lengths: all else is then of a microbatch whose load is 1. Empty
            where all are equal.

    Raises:
        ValueError: a time or size is negative or not finite, or more is kept for R, or moved, than F allocates.
    """

    stages: tuple[StageCosts, ...]
    hop: float = 0.0
    vocabulary: VocabularyCosts = VocabularyCosts()
    copies: CopyCosts = CopyCosts()
    unit: MemoryUnit | None = None
    beside_communication: float = 1.0
    loads: tuple[Load, ...] = ()
    latency: float = 0.0
    norm: float = 0.0
    at_once: bool = False
    links: tuple[LinkCosts, ...] = ()
    pattern: str = ""

    def __post_init__(self) -> None:
        if self.unit is None:
            are_bytes = max((stage.activation for stage in self.stages), default=0.0) >= _FEWEST_BYTES
            object.__setattr__(self, "unit", MemoryUnit.BYTES if are_bytes else MemoryUnit.MICROBATCHES)
        times = [(name, getattr(self, name)) for name in ("hop", "latency", "norm")]
        times += [(f"link {link.sender}-{link.receiver}", each) for link in self.links for each in link[2:]]
        for name, seconds in times:
            if not 0 <= seconds < float("inf"):
                raise ValueError(f"the {name} must take 0 seconds or more, got {seconds}")
        if not 1 <= self.beside_communication < float("inf"):
            raise ValueError(f"beside_communication must be a number of at least 1, got {self.beside_communication:g}")
        named: list[tuple[str, StageCosts | VocabularyCosts]] = [("the vocabulary", self.vocabulary)]
        different = {stage: self.stages.index(stage) for stage in dict.fromkeys(self.stages)}  # most are alike
        named += [(f"stage {index}", stage) for stage, index in different.items()]
        for of, costs in named:
            for field in fields(costs):
                value = getattr(costs, field.name)
                if not (value is None and field.default is None) and not 0 <= value < float("inf"):
                    raise ValueError(f"{field.name} of {of} must be a number of at least 0, got {value}")
        for number, load in enumerate(self.loads):
            if not all(0 < times < float("inf") for times in load):
                raise ValueError(f"loads: those of microbatch {number} must be numbers above 0, got {tuple(load)}")
        for stage, index in different.items():
            for whole, names in WITHIN:
                together, most = sum(map(stage.value, names)), stage.value(whole)
                if together > most * (1 + SLACK):
                    given = [name for name in names if stage.value(name)]
                    take, are = ("takes", "part it is") if len(given) == 1 else ("take", "parts they are")
                    most_of = f"more than the {most:g} of {whole}, whose {are}"
                    raise ValueError(f"stage {index}: {', '.join(given)} {take} {together:g}, {most_of}")

    def check_placement(self, placement: Placement) -> None:
        """Raises:
        ValueError: the costs are for another number of stages than the placement has, or of a link that it has not.
        """
        link_costs.check(self.links, placement.ranks)
        stages = placement.depth
        if len(self.stages) != stages:
            raise ValueError(
                f"costs of {len(self.stages)} stages for a placement of {stages} ({placement.ranks} ranks with "
                f"{placement.chunks} chunks each); give one StageCosts per stage"
            )

    def check_microbatches(self, count: int) -> None:
        """Raises:
        ValueError: the costs are for another number of microbatches.
        """
        if self.loads and len(self.loads) != count:
            raise ValueError(f"loads of {len(self.loads)} microbatches for {count}; give one for each, or none")

    def of(self, microbatch: int) -> Costs:
        """The costs of one microbatch (or slice)."""
        return self._each[microbatch] if self.loads else self

    def each(self, value: Callable[[Costs], float], count: int) -> list[float]:
        """A value of the costs of every microbatch (or slice), of which there are ``count``."""
        return [value(one) for one in self._each[:count]] if self.loads else [value(self)] * count

    def different(self, count: int) -> list[Costs]:
        """The costs of every microbatch (or slice), of which there are ``count``; these alone where all are alike."""
        return self._each[:count] if self.loads else [self]

    def seconds_of_each(self, kind: Kind, stage: int, count: int) -> list[float]:
        """``seconds`` of a pass of every microbatch (or slice): a list to read, made once."""
        key = kind, stage, count
        if key not in self._seconds:
            self._seconds[key] = self.each(lambda costs: costs.seconds(kind, stage), count)
        return self._seconds[key]

    @cached_property
    def _seconds(self) -> dict[tuple[Kind, int, int], list[float]]:
        return {}

    def with_loads(self, loads: tuple[Load, ...]) -> Costs:
        """The costs of microbatches with other loads; those of a load that both have are made once."""
        made = replace(self, loads=loads)
        vars(made)["_of"] = self._of
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Its fields: nothing is pickled that follows from them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _each(self) -> list[Costs]:
        return [self._of.get(load) or self._times(load) for load in self.loads]

    @cached_property
    def _of(self) -> dict[Load, Costs]:
        return {}

    def _times(self, load: Load) -> Costs:
        """The costs of a load."""
        made = {stage: stage.times(load) for stage in dict.fromkeys(self.stages)}  # most are alike
        stages, vocabulary = tuple(made[stage] for stage in self.stages), self.vocabulary.times(load)
        links = tuple(link._replace(seconds=link.seconds * load.tokens) for link in self.links)
        self._of[load] = replace(self, stages=stages, hop=self.hop * load.tokens, vocabulary=vocabulary, loads=(), links=links)
        return self._of[load]

    @property
    def largest(self) -> Load:
        """The most that any microbatch takes of each."""
        return Load(*map(max, zip(*self.loads, strict=True)))  # 1 where there are none

    def seconds(self, kind: Kind, stage: int, recomputed: bool = False) -> float:
        """Seconds of a pass; of a copy, with no other copy at the same time.

        Args:
            stage: where it runs; passes of the vocabulary take the same on every rank that is not slow.
            recomputed: whether the schedule has an R for the microbatch, so that F keeps no more than ``checkpoint``.
        """
        if kind.is_copy:
            return self.stages[stage].moved(recomputed) * float(getattr(self.copies, kind.row.seconds))
        return self.stages[stage].pace * self.vocabulary.seconds(kind) if kind.row.shard else self.stages[stage].seconds(kind)

    def bucket_seconds(self, kind: Kind, stage: int, buckets: int) -> float:
        """Seconds of RS, OPT or AG of one of a stage's buckets, which are equally large."""
        return self.stages[stage].seconds(kind) / buckets + (self.latency if kind.row.lane else 0.0)

    @property
    def has_boundary(self) -> bool:
        """Tell whether it is known what ranks do between two iterations."""
        return any(stage.has_boundary for stage in self.stages)

    def braid(self, stage: int, kind: Kind, other: int, microbatches: tuple[int, int] = (0, 0)) -> tuple[float, float]:
        """Seconds of a braid: until its forward is over, and from then on.

        Args:
            stage: of its forward.
            kind, other: of its backward, and its stage.
            microbatches: of its forward and of its backward.
        """
        ours, theirs = (self.of(at).stages[where] for at, where in zip(microbatches, (stage, other), strict=True))
        if not (ours.has_parts or theirs.has_parts):
            return ours.seconds(Kind.F), theirs.seconds(kind)
        output, whole = braid_seconds(ours.parts(Kind.F), theirs.parts(kind), self.beside_communication)
        return output, whole - output

    def allocated(self, kind: Kind, stage: int, recomputed: bool = False) -> float:
        """Activation memory that a pass on a stage allocates (positive) or frees (negative) by its end."""
        return self.vocabulary.allocated(kind) if kind.row.shard else self.stages[stage].allocated(kind, recomputed)

    @property
    def communicating(self) -> tuple[float, ...]:
        """Seconds of every stage in which layers communicate, in F and the backward of one microbatch."""
        return tuple(sum(map(stage.value, (*ALL_TO_ALL["forward"], *ALL_TO_ALL["backward"]))) for stage in self.stages)

    def k(self, recomputed: Set[int] = frozenset()) -> float:
        """Time of copying all activations to host memory and back, over that of passes (Wan et al., "PipeOffload", section 3).

        Args:
            recomputed: the stages that run R, which have less to be moved and take longer.
        """
        again = [index in recomputed for index in range(len(self.stages))]
        work = sum(stage.total + stage.recompute * more for stage, more in zip(self.stages, again, strict=True))
        moved = sum(stage.moved(more) for stage, more in zip(self.stages, again, strict=True))
        return moved * (self.copies.to_host + self.copies.to_device) / work if work else 0.0

    def slowed(self, placement: Placement, ranks: Mapping[int, float], links: Mapping[tuple[int, int], float]) -> Costs:
        """The costs where some ranks and links are slow.

        Args:
            ranks: how many times as long passes of their stages take, as ``StageCosts.slowed`` has it.
            links: by sender and receiver, seconds that a message takes longer.
        """
        stages = [stage.slowed(ranks.get(placement.home(number)[0], 1.0)) for number, stage in enumerate(self.stages)]
        before = {(link.sender, link.receiver): link for link in self.links}
        slow = [before.get(way, LinkCosts(*way, latency=self.hop)) for way in links]
        slow = [link._replace(latency=link.latency + more) for link, more in zip(slow, links.values(), strict=True)]
        return replace(self, stages=tuple(stages), links=link_costs.joined(self.links, slow))

    @property
    def exchange(self) -> float:
        """Seconds of a collective of the vocabulary; where it is not said, those of a message over the slowest link."""
        given = self.vocabulary.exchange
        return max(self.hop, *self._messages.values(), 0.0) if given is None else given

    def message(self, sender: int, receiver: int) -> float:
        """Seconds from the end of a pass on a rank until another, or the same, has its result, if no message is before it."""
        return 0.0 if sender == receiver else self._messages.get((sender, receiver), self.hop)

    @property
    def seconds_of_links(self) -> dict[str, float]:
        """Seconds of a message over each link that differs, by its name such as 2-3 or 2to3."""
        return {name: sum(seconds) for name, seconds in link_costs.written(self.links).items()}

    def slow(self, placement: Placement) -> dict[str, float]:
        """``seconds_of_links``, and for each rank that is slow, such as ``rank 3``, how many times as long its passes take."""
        times = {f"rank {rank}": round(self.stages[first].pace, 9) for rank, (first, *_) in enumerate(placement.stages)}
        return self.seconds_of_links | {rank: more for rank, more in times.items() if more != 1}

    @cached_property
    def in_line(self) -> dict[tuple[int, int], float]:
        """By sender and receiver, the seconds for which a message occupies their link, where later ones stand in line for it."""
        return {(link.sender, link.receiver): link.seconds for link in self.links if link.seconds}

    @cached_property
    def _messages(self) -> dict[tuple[int, int], float]:
        return {(link.sender, link.receiver): link.seconds + link.latency for link in self.links}

    def fields(self) -> dict[str, Any]:
        """Fields that ``to_json`` writes; ``fused`` and ``movable`` only where they are given, the vocabulary, copies,
        ``latency``, ``norm`` and ``beside_communication`` where they cost something, ``at_once`` where it is so, ``pattern``
        where stages are its letters, ``loads`` where microbatches are unequal, ``links`` where some differ."""
        rows = [by_name(stage) for stage in self.stages]
        spread = {} if self.vocabulary == VocabularyCosts() else {"vocabulary": by_name(self.vocabulary)}
        copies = {} if self.copies == CopyCosts() else {"copies": asdict(self.copies)}
        beside = {} if self.beside_communication == 1 else {"beside_communication": self.beside_communication}
        loads = {"loads": [list(load) for load in self.loads]} if self.loads else {}
        links = {"links": link_costs.as_fields(self.links)} if self.links else {}
        between = {name: getattr(self, name) for name in ("latency", "norm", "at_once", "pattern") if getattr(self, name)}
        return {"hop": self.hop, "unit": str(self.unit), "stages": rows} | spread | copies | beside | loads | links | between

    def to_json(self) -> str:
        """One JSON object, ``{"hop": .., "unit": .., "stages": [{"forward": .., ..}, ..]}``, that ``from_json`` reads back."""
        return json.dumps(self.fields())

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Read what ``to_json`` wrote, or a person.

        ``hop`` is 0 where it is left out; for ``unit`` see the class. A stage must have ``forward``, ``backward`` and ``weight``;
        where ``retained`` is left out, all of ``activation`` is held until W; where ``recompute`` is, R takes what F does.
        ``vocabulary`` has the fields of ``VocabularyCosts``, each 0 where it is left out, and ``copies`` those of ``CopyCosts``,
        with its defaults; ``beside_communication`` is 1 where it is left out, ``latency`` and ``norm`` are 0, and
        ``at_once`` is false; ``pattern`` is as in the class; ``loads`` has the numbers of a ``Load`` for every microbatch;
        ``links`` has latencies, or ``LinkCosts``' seconds and latency, by names as ``link_costs.read`` reads. ``of`` may say of
        which training they are; nothing here reads it.

        Raises:
            ValueError: not JSON, or as ``costs_fields.read``.
        """
        return cls(**costs_fields.read(parse_json(text, "costs"), cut=False))

    @classmethod
    def from_fields(cls, data: object) -> Costs:
        """Costs from what ``fields`` returned: as ``from_json`` reads, also where chunks have parts of layers.

        Raises:
            ValueError: as ``costs_fields.read``.
        """
        return cls(**costs_fields.read(data, cut=True))


# A rank's whole share where nothing is known.
EQUAL_PASSES = StageCosts(1.0, 1.0, 1.0)
# The default where F, B and W take 1: an output layer that adds a third to a rank's work.
EQUAL_SHARDS = VocabularyCosts(S=0.5, T=0.5)


def uniform(
    placement: Placement,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    hop: float = 0.0,
    activation: float = 1.0,
    retained: float = 1.0,
    vocabulary: VocabularyCosts | None = None,
) -> Costs:
    """Equal stages: the arguments are one rank's whole share of one microbatch, of which a chunk takes 1/chunks.

    Args:
        vocabulary: what a rank's shard costs where the vocabulary is spread.
    """
    stage = StageCosts(forward, backward, weight, activation, retained).share(placement.chunks)
    return Costs((stage,) * placement.depth, hop, vocabulary or VocabularyCosts())
