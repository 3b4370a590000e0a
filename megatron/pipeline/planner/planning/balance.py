"""Number of layers of every stage, found together with the order of passes: a descent from the even split.

    Request("zb-v", ranks=4, microbatches=16, costs=costs, layers=32).plan().split.layers

``layer_redistribution`` in training makes the heaviest rank as light as it can be, which is best where ranks hardly wait for each
other. Where they do, or memory is short, other splits are shorter: each is planned here, and the shortest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product, zip_longest

from megatron.pipeline.planner.planning.planned import Planned, Split
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs, StageCosts
from megatron.pipeline.planner.schedule.core.placement import Placement
from megatron.pipeline.planner.schedule.core.problem import LimitTooLow
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.stage_costs import combined
from megatron.pipeline.planner.schedule.time.simulate import simulate
from megatron.pipeline.planner.shape.hybrid import Pattern
from megatron.pipeline.planner.shape.stages import balanced_by_weight, balanced_layers, numbers_of_layers, raised

MOST_LAYERS = 10_000
_PASSES, _LEAST, _MOST = 200_000, 8, 60  # to plan in a descent: passes, but no fewer and no more splits than this
_TRIES = 12  # of moves of one layer that promise most, before the descent ends
_PAIRS = 8  # stages up to which a layer is moved between any two of them
_ENDS = 3  # above: how many of the heaviest ranks give a layer, and how many of the lightest take one
_EMPTY = StageCosts(0.0, 0.0, 0.0, 0.0, 0.0)  # a stage without a layer


@dataclass(frozen=True)
class Model:
    """Costs by layer.

    Attributes:
        layers: costs of every layer by itself.
        first, last: what the embedding adds to the first stage, and the output layer to the last.
        costs: of the same model, cut in some way; its hop, vocabulary and copies count.
        pattern: letters of the layers, where they are known, perhaps with a split to compare with.
        slow: by stage, how many times as long its layers take there.
    """

    layers: tuple[StageCosts, ...]
    first: StageCosts
    last: StageCosts
    costs: Costs
    pattern: Pattern | None = None
    slow: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, costs: Costs, layers: int) -> Model:
        """The layers of a model whose stages have equally many.

        Args:
            costs: of at least 3 stages: what the ends cost more than their neighbours is theirs.
        """
        pieces = list(cutting.of_depth(costs, layers).stages)
        first, last = (_more(pieces[end], pieces[inner]) for end, inner in ((0, 1), (-1, -2)))
        for end, inner in ((0, 1), (-1, -2)):
            pieces[end] = combined(min, [pieces[end], pieces[inner]])
        return cls(tuple(pieces), first, last, costs)

    @classmethod
    def by_layer(cls, costs: Costs, pattern: Pattern) -> Model:
        """Layers of a pattern, from costs of which each is a stage, as ``costmodel.estimate.by_layer`` makes them.

        Raises:
            ValueError: the costs are of another pattern or number of stages.
        """
        if len(costs.stages) != len(pattern.letters) + 2:
            raise ValueError(
                f"{pattern} has {len(pattern.letters)} layers, and the costs are of {len(costs.stages)} stages: give "
                f"{len(pattern.letters) + 2}, of each layer and of what is before and behind them, as mpipe costs --by-layer"
            )
        if costs.pattern != pattern.whole:
            raise ValueError(
                f"{pattern}: costs are of {costs.pattern or 'no letters'}: give those of this pattern, of mpipe costs --by-layer"
            )
        first, *layers, last = costs.stages
        return cls(tuple(layers), first, last, costs, pattern)

    def layout(self, counts: Sequence[int]) -> tuple[str, str]:
        """The flag of Megatron-LM that splits it so, and its value."""
        if self.pattern:
            return "--hybrid-layer-pattern", self.pattern.cut(counts)
        return "--pipeline-model-parallel-layout", layout(counts)

    def cut(self, counts: Sequence[int]) -> Costs:
        """Its costs with these numbers of layers on the stages."""
        stages = []
        for stage, numbers in enumerate(numbers_of_layers(counts)):
            ends = [self.first] * (stage == 0) + [self.last] * (stage == len(counts) - 1)
            whole = combined(sum, [*(self.layers[number] for number in numbers), *ends] or [_EMPTY])
            stages.append(whole.slowed(self.slow[stage]) if stage in self.slow else whole)
        return replace(self.costs, stages=tuple(stages), pattern="")

    def extra(self, placement: Placement) -> dict[int, float]:
        """Seconds of the ends, by stage."""
        ends = ((0, self.first), (placement.last_stage, self.last))
        return {stage: end.total for stage, end in ends if end.total}

    def least(self, stage: int, placement: Placement) -> int:
        """Layers that a stage needs: an end does without where it has the embedding or the output layer to compute."""
        ends = (self.first if stage == 0 else None, self.last if stage == placement.last_stage else None)
        return int(not any(end is not None and end.total for end in ends))


def finer(placement: Placement) -> int:
    """Chunks per rank with which a model has stages between its ends, for ``Model.of``."""
    return max(placement.chunks, -(-3 // placement.ranks))


def check_layers(layers: int, placement: Placement, least: int = 3) -> None:
    """Refuse numbers of layers that cannot be split.

    Args:
        least: layers that the stages need, where that is known.

    Raises:
        ValueError: says how many can.
    """
    if layers > MOST_LAYERS:
        raise ValueError(f"--balance {layers}: give at most {MOST_LAYERS} layers")
    if layers < max(3, least):
        stages = f"{placement.depth} stages ({placement.ranks} ranks with {placement.chunks} chunks each)"
        raise ValueError(f"--balance {layers}: {stages} need at least {max(3, least)} layers")


def balanced(placement: Placement, model: Model, microbatches: int, plan: Callable[[Costs], Planned]) -> Planned:
    """The plan of the best split that a descent finds; never longer than those of the even split, of the lightest ranks, and of
    the split that the model's pattern has, if it has one.

    A layer moves from one stage to another as long as the plan becomes shorter. Which moves are planned first is known from the
    order of the best plan so far, simulated at the costs of the other split.

    Args:
        plan: the plan for costs of the placement's stages.

    Raises:
        LimitTooLow: no split that was tried fits into the memory limit.
        ValueError: there are fewer layers than stages that need one.
    """
    stages, layers = placement.depth, len(model.layers)
    least = [model.least(stage, placement) for stage in range(stages)]
    check_layers(layers, placement, sum(least))
    tried: dict[tuple[int, ...], _Tried] = {}

    def attempt(counts: tuple[int, ...]) -> _Tried:
        if counts not in tried:
            try:
                tried[counts] = _Tried(counts, plan(model.cut(counts)))
            except LimitTooLow as error:
                tried[counts] = _Tried(counts, error)
        return tried[counts]

    weights, extra = [layer.total for layer in model.layers], model.extra(placement)
    splits = [raised(balanced_layers(layers, placement, {}), least), balanced_by_weight(weights, placement, extra, least)]
    if model.pattern and len(model.pattern.counts) > 1:
        splits.append(list(model.pattern.on(placement.depth)))
    starts = [attempt(tuple(split)) for split in splits]
    best = min(starts, key=_Tried.length)
    most = min(_MOST, max(_LEAST, _PASSES // (3 * stages * microbatches)))
    while len(tried) < most:
        moves = islice(_moves(best, placement, model, least), _TRIES)
        better = next((found for found in map(attempt, moves) if found.is_shorter(best)), None)
        if better is None:
            break
        best = better
    if isinstance(best.plan, LimitTooLow):
        raise best.plan
    even, _, *written = (start.plan.value if isinstance(start.plan, Planned) else None for start in starts)
    return replace(best.plan, split=Split(best.counts, *model.layout(best.counts), even, *written))


@dataclass(frozen=True)
class _Tried:
    """Result of a split: a plan, or the refusal of one that holds too much."""

    counts: tuple[int, ...]
    plan: Planned | LimitTooLow

    def length(self) -> tuple[bool, float]:
        """Length to minimise; of splits that do not fit, those are better that need less."""
        plan = self.plan
        return (False, plan.value) if isinstance(plan, Planned) else (True, plan.least)

    def is_shorter(self, other: _Tried) -> bool:
        refused, value = self.length()
        than_refused, than = other.length()
        return refused < than_refused or (refused == than_refused and value < than * (1 - SLACK))


def layout(counts: Sequence[int]) -> str:
    """The split as Megatron-LM's ``--pipeline-model-parallel-layout`` has it, such as ``Et*7|t*8|t*8|t*7L``."""
    stages = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in counts]
    return "|".join(["E" + stages[0], *stages[1:]]) + "L"


def _moves(best: _Tried, placement: Placement, model: Model, least: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Splits that differ by one layer from the best one, those first under which its order is shortest.

    Those under which a rank has as much to do as the best plan takes are left out. Where the best one does not fit, early stages,
    which hold the most microbatches, give layers first, and late ones take them.
    """
    stages = range(placement.depth)
    if isinstance(best.plan, LimitTooLow):
        each = [_moved(best.counts, [giver], stages[::-1], least) for giver in stages]
        yield from (counts for turn in zip_longest(*each) for counts in turn if counts)
        return
    problem, found = best.plan.problem, []
    for counts in _moved(best.counts, *_ends(placement, _work(problem.costs, placement)), least):
        costs = model.cut(counts)
        heaviest = max(_work(costs, placement))
        if problem.overlap or problem.microbatches * heaviest < best.plan.value * (1 - SLACK):
            found.append((problem.value(simulate(best.plan.schedule, costs)), counts))
    yield from (counts for _, counts in sorted(found))


def _moved(
    counts: Sequence[int], givers: Sequence[int], takers: Sequence[int], least: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Every split in which one of the givers has a layer less, and one of the takers a layer more."""
    for giver, taker in product(givers, takers):
        if giver != taker and counts[giver] > least[giver]:
            yield tuple(count - (stage == giver) + (stage == taker) for stage, count in enumerate(counts))


def _ends(placement: Placement, work: Sequence[float]) -> tuple[list[int], list[int]]:
    if placement.last_stage < _PAIRS:
        everywhere = list(range(placement.depth))
        return everywhere, everywhere
    ranks = sorted(range(placement.ranks), key=work.__getitem__)
    givers = {stage for rank in ranks[-_ENDS:] for stage in placement.stages[rank]}
    takers = {stage for rank in ranks[:_ENDS] for stage in placement.stages[rank]}
    return sorted(givers), sorted(takers)


def _work(costs: Costs, placement: Placement) -> list[float]:
    """Seconds that every rank computes at least for a microbatch, where no passes are braided."""
    seconds = [stage.forward + min(stage.value("fused"), stage.backward + stage.weight) for stage in costs.stages]
    return [sum(seconds[stage] for stage in row) for row in placement.stages]


def _more(end: StageCosts, inner: StageCosts) -> StageCosts:
    more = combined(lambda values: values[0] - values[1] if values[0] > values[1] * (1 + SLACK) else 0.0, [end, inner])
    return more.capped(end)
