"""What does spreading a large vocabulary gain, and what does the runtime lose of it? Stages and shards that only sleep.

Every rank has the same number of layers' worth of F, B and W; forward and backward of the output layer take as long as some
layers together. It stays on the last stage (off), which may have fewer layers for it (redistribution), or every rank has a
shard of it. Shards are real, but tiny, and sleep besides; their collectives are real. Run it with one process per rank:

    torchrun --nproc-per-node 4 benchmarks/vocabulary.py --schedules 1f1b zb-h1 zb-v

Every round runs one iteration of each, so that whatever disturbs the machine disturbs all of them; reported are medians over the
rounds, of the time from the first pass on any rank to the last on any. It is divided by what the simulation says, once for
messages and collectives that take no time and once for such as take what they take between processes that slept before.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from common import add_flags, command_line, in_rounds
from contenders import Contender, Megatron, Ours, start
from sleep_stages import iteration, print_measured
from sleeping import HIDDEN, Sleeper

from megatron.pipeline.schedule import families
from megatron.pipeline.schedule.core.costs import Costs, StageCosts, VocabularyCosts
from megatron.pipeline.schedule.core.passes import Vocabulary
from megatron.pipeline.schedule.core.placement import Placement
from megatron.pipeline.shape.balance import balanced_layers

OFF, REDISTRIBUTION = "off", "redistribution"
METHODS = (OFF, REDISTRIBUTION, *(str(one) for one in (Vocabulary.INTERLACED, Vocabulary.TWO_BARRIERS, Vocabulary.ONE_BARRIER)))


class Model:
    """What passes of a model take, in seconds.

    Args:
        layers: of a rank, where all have the same.
        output: forward and backward of the output layer, in layers. Its three products take equally long.
        layer: F, B and W of a layer.
        hop, exchange: a message and a collective.
    """

    def __init__(self, layers: int, output: float, layer: tuple[float, float, float], hop: float, exchange: float) -> None:
        self._layers, self._output, self._layer, self._hop, self._exchange = layers, output, layer, hop, exchange

    def costs(self, placement: Placement, method: str) -> Costs:
        count = placement.last_stage + 1
        layers = self._layers * placement.ranks
        extra = {placement.last_stage: self._output} if method == REDISTRIBUTION else {}
        product = self._output * sum(self._layer) / 3
        stages = [self._stage(n) for n in (balanced_layers(layers, placement, extra) if extra else [layers / count] * count)]
        if method in (OFF, REDISTRIBUTION):
            last = stages[-1]
            stages[-1] = StageCosts(last.forward + product, last.backward + product, last.weight + product)
            return Costs(tuple(stages), self._hop)
        early = method == Vocabulary.ONE_BARRIER  # S makes two of the products
        share = product / placement.ranks
        shard = VocabularyCosts(S=share * (1 + early), T=share * (2 - early), exchange=self._exchange)
        return Costs(tuple(stages), self._hop, shard)

    def _stage(self, layers: float) -> StageCosts:
        return StageCosts(*(layers * seconds for seconds in self._layer))


def measure_exchange(sleeper: Sleeper, group: torch.distributed.ProcessGroup, rounds: int = 20) -> float:
    """Median seconds from the end of a pass on all ranks to the last rank's end of an all-gather of what they made."""
    found = []
    mine, everyone = torch.zeros(1, HIDDEN), torch.zeros(group.size(), HIDDEN)
    for _ in range(rounds):
        torch.distributed.barrier()
        sleeper.occupy(0.02)
        sleeper.synchronize()
        began = time.monotonic()
        torch.distributed.all_gather_into_tensor(everyone, mine, group=group, async_op=True).wait()
        moments = torch.tensor([began, time.monotonic()], dtype=torch.float64)
        torch.distributed.all_reduce(moments, op=torch.distributed.ReduceOp.MAX)
        found.append((moments[1] - moments[0]).item())
    return statistics.median(found)


def contender(name: str, method: str, megatron: Megatron, model: Model) -> Ours:
    """A schedule with the vocabulary where the method puts it."""
    costs = model.costs(families.placement(name, megatron.ranks), method)
    spread = None if method in (OFF, REDISTRIBUTION) else Vocabulary(method)
    return Ours(name, megatron, costs=costs, vocabulary=spread)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schedules", nargs="*", default=["1f1b"], metavar="NAME")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--layers", type=int, default=4, help="of a rank, where all have the same")
    parser.add_argument("--output", type=float, default=2.4, help="forward and backward of the output layer, in layers")
    add_flags(parser.add_argument, (20, 20, 20), of="of a layer")
    options = parser.parse_args()

    sleeper, megatron = start(options.microbatches, options.milliseconds)
    exchange = measure_exchange(sleeper, megatron.shards.shards)
    forward, backward, weight = (value / 1000 for value in options.milliseconds)
    model = Model(options.layers, options.output, (forward, backward, weight), megatron.times.hop, exchange)
    contenders: dict[tuple[str, ...], Contender] = {
        (name, method): contender(name, method, megatron, model) for name in options.schedules for method in options.methods
    }
    found = in_rounds({name: partial(iteration, one, sleeper) for name, one in contenders.items()}, options.rounds)

    if torch.distributed.get_rank() == 0:
        facts = (
            f"of a layer, {options.layers} layers a rank, output layer {options.output:g} layers",
            f"collective {1e3 * exchange:.2f} ms",
        )
        print_measured(megatron.title(options, *facts), contenders, list(found.values()), "schedule", "vocabulary")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
