"""The table of kinds: one row for every kind of pass, from which everything that has to know the kinds is derived.

A row says which passes must have run before, what the pass takes and holds, on which lane it runs, what it sends, and in which
order microbatches come. The dependencies and the order that ``verify`` checks, the simulated times, the messages and collectives
of a program, the lower bound and the arrays of the search all follow from it. To add a kind, add its row here, its seconds to
``StageCosts``, its handler to the runtime and its colour to the pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import lru_cache
from typing import NamedTuple

from megatron.pipeline.planner.schedule.core.placement import Placement

# IF runs at most this many microbatches ahead of the first stage. T and IB should not fall behind by more.
MOST_WAITING = 2


class Vocabulary(StrEnum):
    """Method of spreading the vocabulary over all ranks: Yeung et al., "Balancing Pipeline Parallelism with Vocabulary
    Parallelism".
    """

    TWO_BARRIERS = "1"  # the gradient of the last stage's output follows T: algorithm 1
    ONE_BARRIER = "2"  # it follows S, and T can wait: algorithm 2
    INTERLACED = "interlaced"  # as with two barriers, and every rank waits in S and T for all others (nnScaler)


class Flow(StrEnum):
    """Direction in which a tensor travels through the model."""

    __hash__ = str.__hash__  # see ``Kind``

    ACTIVATION = "activation"  # F's output, to the next stage
    GRADIENT = "gradient"  # B's input gradient, to the previous stage


class Exchange(StrEnum):
    """A collective of all ranks of a pipeline for a spread vocabulary, in the order in which a microbatch meets them."""

    __hash__ = str.__hash__  # see ``Kind``

    EMBEDDING = "embedding"  # the sum of what IF looked up, for the first stage
    OUTPUT = "output"  # of the last stage, for S
    STATISTICS = "statistics"  # of S, for every rank: they make the softmax of a shard that of the whole vocabulary
    GRADIENT = "output gradient"  # the sum of what S (one barrier) or T (two) made, for the last stage's backward
    EMBEDDING_GRADIENT = "embedding gradient"  # of the first stage, for IB


class Where(Enum):
    """Place of a needed pass, seen from the pass that needs it."""

    SAME = auto()  # on the same rank and chunk
    PREVIOUS = auto()  # on the stage before, if there is one
    NEXT = auto()  # on the stage after, if there is one
    FIRST = auto()  # on the stage where the model begins
    LAST = auto()  # on the stage where the model ends
    ALL = auto()  # on every rank


class Lane(StrEnum):
    """Stream that runs passes concurrently with the computation of a rank; each lane runs one pass at a time."""

    TO_HOST = "to host"
    TO_DEVICE = "to device"
    REPLICAS = "between replicas"


@dataclass(frozen=True)
class Need:
    """Passes of the same microbatch that must have run before.

    Attributes:
        kinds: alternatives; the first kind that the schedule has for the microbatch is needed, or the last kind if it has none.
        where: where the needed pass runs.
        delay: how many microbatches earlier the needed pass is.
        on: only a pass on the FIRST or LAST stage has this need; None for every pass of the kind.
        modes: only with one of these ways to spread the vocabulary; empty for any, also for none.
        exchange: the collective that brings the result; None for a message, or nothing on the same rank.
        after: the collective that the parts of ``exchange`` are made from, where the passes alone are not enough.
    """

    kinds: tuple[str, ...]
    where: Where = Where.SAME
    delay: int = 0
    on: Where | None = None
    modes: tuple[Vocabulary, ...] = ()
    exchange: Exchange | None = None
    after: Exchange | None = None


@dataclass(frozen=True)
class Row:
    """The facts of one kind.

    Attributes:
        meaning: what a pass computes, in a few words.
        needs: the passes that must have run before, in the order in which they run.
        seconds: the field of the costs with its seconds.
        allocates, frees: the fields of the costs with the memory that a pass allocates when it starts, and frees when it ends.
        recomputed: the field that takes the place of these where the microbatch has an R on the stage.
        lane: the lane that it runs on, concurrently with the computation of the rank; of copies of activations ``seconds`` is a
            field of ``CopyCosts``, per unit of memory. None for that computation.
        starts: on a lane, whether its place in the rank's order is where the rank starts it; otherwise it starts as soon as it
            can, and its place is where the rank waits for it.
        in_order: the lines that it belongs to; on one chunk the passes of a line run in the order of their microbatches.
        sends: the message that the neighbouring stage receives.
        forward: whether evaluations have it too: it changes no gradient.
        shard: whether every rank runs it for its shard of the vocabulary, with the costs of ``VocabularyCosts``.
        optional: whether a schedule may have it for some microbatches only, or for none.
        replaces: the kinds that it stands for: a microbatch has either these or this kind.
        bucket: whether it is of a bucket of a chunk's parameters, whose number stands in the place of a microbatch's: it runs
            between two iterations, and ``core.boundary`` says where.
        braided: the kind that it would be alone. It runs as one with the pass directly before it on its rank, an F of another
            microbatch or chunk: the two start together, and the collectives of one run while the other computes.
    """

    meaning: str
    needs: tuple[Need, ...]
    seconds: str
    allocates: str | None = None
    frees: str | None = None
    recomputed: str | None = None
    lane: Lane | None = None
    starts: bool = True
    in_order: tuple[str, ...] = ()
    sends: Flow | None = None
    forward: bool = False
    shard: bool = False
    optional: bool = False
    replaces: tuple[str, ...] = ()
    braided: str | None = None
    bucket: bool = False

    @property
    def starts_on_lane(self) -> bool:
        """Tell whether a rank starts it on a lane, and waits for it before the pass that needs it."""
        return self.lane is not None and self.starts


WEIGHTS = "W and BW"  # the line of the passes that add to the weight gradients
_BACKWARD, _BACKWARDS = "B and BW", ("BW", "FBW", "FB", "B")
_KEPT = ("H2D", "F")  # what leaves on the device what F has kept for later
_TWO = (Vocabulary.TWO_BARRIERS, Vocabulary.INTERLACED)

_BACKWARD_NEEDS = (
    Need(("R", *_KEPT)),
    Need(_BACKWARDS, Where.NEXT),
    Need(("T",), Where.ALL, on=Where.LAST, modes=_TWO, exchange=Exchange.GRADIENT),
    # The results of S are weighed against those of all other ranks (statistics) before they are summed.
    Need(
        ("S",), Where.ALL, on=Where.LAST, modes=(Vocabulary.ONE_BARRIER,), exchange=Exchange.GRADIENT, after=Exchange.STATISTICS
    ),
)


class Kind(StrEnum):
    """Kind of a pass; a microbatch meets the kinds of a stage in the order in which they stand here."""

    row: Row

    def __new__(cls, name: str, row: Row = Row("", (), "")) -> Kind:  # Kind("F") looks a kind up
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.row = row
        return kind

    __hash__ = str.__hash__  # Enum's own is written in Python, and passes are looked up by the hundred thousand

    F = "F", Row(
        meaning="forward",
        needs=(
            Need(("F",), Where.PREVIOUS),
            Need(("IF",), Where.ALL, on=Where.FIRST, modes=tuple(Vocabulary), exchange=Exchange.EMBEDDING),
        ),
        seconds="forward", allocates="activation", recomputed="checkpoint", in_order=("F",), sends=Flow.ACTIVATION, forward=True,
    )  # fmt: skip
    R = "R", Row(  # where F kept nothing but its input
        meaning="recomputed forward",
        needs=(Need(_KEPT),),
        seconds="recompute", allocates="activation", frees="checkpoint", in_order=("R",), optional=True,
    )  # fmt: skip
    B = "B", Row(
        meaning="backward, input",
        needs=_BACKWARD_NEEDS,
        seconds="backward", allocates="retained", frees="activation", in_order=(_BACKWARD,), sends=Flow.GRADIENT,
    )  # fmt: skip
    W = "W", Row(
        meaning="backward, weights",
        needs=(Need(("FB", "B")),),
        seconds="weight", frees="retained", in_order=(WEIGHTS,),
    )  # fmt: skip
    BW = "BW", Row(
        meaning="backward, fused",
        needs=_BACKWARD_NEEDS,
        seconds="fused", frees="activation", in_order=(_BACKWARD, WEIGHTS), sends=Flow.GRADIENT, replaces=("B", "W"),
        optional=True,
    )  # fmt: skip
    S = "S", Row(  # logits and their softmax
        meaning="logits, own rows",
        needs=(Need(("F",), Where.LAST, exchange=Exchange.OUTPUT),),
        seconds="S", allocates="activation", in_order=("S",), forward=True, shard=True,
    )  # fmt: skip
    T = "T", Row(
        meaning="gradient of own output rows",
        needs=(Need(("S",), Where.ALL, exchange=Exchange.STATISTICS),),
        seconds="T", frees="activation", in_order=("T",), shard=True,
    )  # fmt: skip
    IF = "IF", Row(  # it looks rows up; one that is early waits for room
        meaning="embedding, own rows",
        needs=(Need(("IF",), Where.ALL, delay=MOST_WAITING, exchange=Exchange.EMBEDDING),),
        seconds="IF", in_order=("IF",), forward=True, shard=True,
    )  # fmt: skip
    IB = "IB", Row(
        meaning="gradient of own embedding rows",
        needs=(Need(_BACKWARDS, Where.FIRST, exchange=Exchange.EMBEDDING_GRADIENT),),
        seconds="IB", in_order=("IB",), shard=True,
    )  # fmt: skip
    D2H = "D2H", Row(  # of what F keeps
        meaning="copy to host memory",
        needs=(Need(("F",)),),
        seconds="to_host", frees="movable", recomputed="checkpoint", lane=Lane.TO_HOST, starts=False, optional=True,
    )  # fmt: skip
    H2D = "H2D", Row(
        meaning="copy to the device",
        needs=(Need(("D2H",)),),
        seconds="to_device", allocates="movable", recomputed="checkpoint", lane=Lane.TO_DEVICE, optional=True,
    )  # fmt: skip
    FB = "FB", Row(
        meaning="backward, input, braided with the forward before it",
        needs=_BACKWARD_NEEDS,
        seconds="backward", allocates="retained", frees="activation", in_order=(_BACKWARD,), sends=Flow.GRADIENT,
        replaces=("B",), optional=True, braided="B",
    )  # fmt: skip
    FBW = "FBW", Row(
        meaning="backward, fused, braided with the forward before it",
        needs=_BACKWARD_NEEDS,
        seconds="fused", frees="activation", in_order=(_BACKWARD, WEIGHTS), sends=Flow.GRADIENT, replaces=("B", "W"),
        optional=True, braided="BW",
    )  # fmt: skip
    RS = "RS", Row(  # once the last pass that adds to the chunk's gradients is over
        meaning="reduction of a bucket's gradients",
        needs=(),
        seconds="reduce", lane=Lane.REPLICAS, optional=True, bucket=True,
    )  # fmt: skip
    OPT = "OPT", Row(
        meaning="optimizer step of a bucket",
        needs=(Need(("RS",)),),
        seconds="step", optional=True, bucket=True,
    )  # fmt: skip
    AG = "AG", Row(  # before the first pass that uses the chunk's parameters
        meaning="gather of a bucket's parameters",
        needs=(Need(("OPT",)),),
        seconds="gather", lane=Lane.REPLICAS, optional=True, bucket=True,
    )  # fmt: skip

    @property
    def sends_gradient(self) -> bool:
        """Tell whether the pass produces the gradient that the previous stage waits for."""
        return self.row.sends is Flow.GRADIENT

    @property
    def finishes_weights(self) -> bool:
        """Tell whether the pass adds its microbatch to the weight gradients, and so frees all that F allocated."""
        return WEIGHTS in self.row.in_order

    @property
    def is_of_vocabulary(self) -> bool:
        """Tell whether every rank runs it for its shard of the vocabulary, rather than for a stage."""
        return self.row.shard

    @property
    def is_copy(self) -> bool:
        """Tell whether it copies activations, on a lane of its own, concurrently with what its rank computes."""
        return self.row.lane in COPY_LANES

    @property
    def is_forward(self) -> bool:
        """Tell whether it belongs to an evaluation too: it changes no gradient."""
        return self.row.forward


COPY_LANES = (Lane.TO_HOST, Lane.TO_DEVICE)
STAGE_KINDS = tuple(kind for kind in Kind if not (kind.row.shard or kind.row.lane or kind.row.braided or kind.row.bucket))
BRAIDED = {Kind(kind.row.braided): kind for kind in Kind if kind.row.braided}  # by what they are alone
VOCABULARY_KINDS = tuple(kind for kind in Kind if kind.row.shard)
COPY_KINDS = tuple(kind for kind in Kind if kind.is_copy)
BUCKET_KINDS = tuple(kind for kind in Kind if kind.row.bucket)


class Shared(NamedTuple):
    """A result that passes of other stages or ranks wait for.

    Attributes:
        kinds: those that make it.
        ahead: how many microbatches ahead it may be needed, before the first: none is there for these.
    """

    kinds: tuple[Kind, ...]
    ahead: int


def kinds_of(need: Need) -> tuple[Kind, ...]:
    """The kinds of a need, which rows name."""
    return tuple(Kind(name) for name in need.kinds)


_FAR = [need for kind in Kind for need in kind.row.needs if need.where is not Where.SAME]
# What passes of other stages or ranks wait for, by the kinds that make it.
REMOTE = {
    kind: Shared(kinds_of(need), max(other.delay for other in _FAR if other.kinds == need.kinds))
    for need in _FAR
    for kind in kinds_of(need)
}


def stage_kinds(recomputed: bool, fused: bool) -> tuple[Kind, ...]:
    """The kinds that a microbatch meets on a stage, in order: with R or without, with BW or with B and W."""
    left_out = {*(() if recomputed else ("R",)), *(Kind.BW.row.replaces if fused else ("BW",))}
    return tuple(kind for kind in STAGE_KINDS if kind not in left_out)


@lru_cache(maxsize=64)
def needed_on_own_rank(kind: Kind) -> tuple[Kind, ...]:
    """The pass that must run before on the same rank, with the same microbatch and chunk: the first of these kinds that there is.

    Of passes that run on every rank, the own one is meant.
    """
    for need in kind.row.needs:
        if need.where is Where.SAME or (need.where is Where.ALL and kind.row.shard and not need.delay):
            return kinds_of(need)
    return ()


class Source(NamedTuple):
    """A need of the passes of one kind on one rank and chunk of a placement.

    Attributes:
        need: the row's.
        kinds: those of the need.
        homes: the (rank, chunk) of the needed passes.
        hops: how many messages the result takes to arrive: 1 from another rank, 0 from the same and where a collective brings it.
        exchanges: how many collectives it takes: 2 where its parts are made from another collective; 0 without.
    """

    need: Need
    kinds: tuple[Kind, ...]
    homes: tuple[tuple[int, int], ...]
    hops: int
    exchanges: int


class Sources(dict[tuple[str, int, int], tuple[Source, ...]]):
    """By kind, rank and chunk: what such passes need on a placement, and where it runs. An entry is made when it is looked up."""

    def __init__(self, placement: Placement, vocabulary: Vocabulary | None) -> None:
        self._placement, self._vocabulary = placement, vocabulary

    def __missing__(self, key: tuple[Kind, int, int]) -> tuple[Source, ...]:
        kind, rank, chunk = key
        found = tuple(source for need in kind.row.needs if (source := self._source(need, rank, chunk)) is not None)
        self[key] = found
        return found

    def _source(self, need: Need, rank: int, chunk: int) -> Source | None:
        placement = self._placement
        stage = placement.stage(rank, chunk)
        is_first, is_last = placement.is_first(stage), placement.is_last(stage)
        if need.modes and self._vocabulary not in need.modes:
            return None
        if (need.on is Where.FIRST and not is_first) or (need.on is Where.LAST and not is_last):
            return None
        homes: tuple[tuple[int, int], ...] = {
            Where.SAME: ((rank, chunk),),
            Where.PREVIOUS: () if is_first else (placement.home(stage - 1),),
            Where.NEXT: () if is_last else (placement.home(stage + 1),),
            Where.FIRST: (placement.home(0),),
            Where.LAST: (placement.home(placement.last_stage),),
            Where.ALL: tuple((other, 0) for other in range(placement.ranks)),
        }[need.where]
        if not homes:
            return None
        near = need.where is not Where.ALL and homes[0][0] == rank
        exchanges = 0 if near or need.exchange is None else 1 + (need.after is not None)
        return Source(need, kinds_of(need), homes, hops=int(not near and need.exchange is None), exchanges=exchanges)


@lru_cache(maxsize=64)  # a search simulates and checks many schedules on one placement
def sources(placement: Placement, vocabulary: Vocabulary | None) -> Sources:
    return Sources(placement, vocabulary)
