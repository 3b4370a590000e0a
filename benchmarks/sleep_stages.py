"""How close does a measured iteration come to the simulated one, in our runtime and in others?

Stages sleep instead of computing, as devices that the host does not wait for until it sends what they made. Run it with as
many processes as pipeline ranks, which share the machine's cores; 2 cores are enough for 8 ranks:

    torchrun --nproc-per-node 4 benchmarks/sleep_stages.py --microbatches 8 --milliseconds 40 40 40

Every round runs one iteration of each schedule, so that whatever disturbs the machine disturbs all of them. Measured is the
time from the start of the first pass on any rank to the end of the last pass on any rank; reported are medians over the
rounds. It is divided by what the simulation says, once for messages that take no time and once for hops that take as long
as one between two processes that slept before. ``--layers PATTERN FILE`` has stages of a hybrid model's layers, which take what
``mpipe costs --by-layer -o FILE`` says of each, and a rank's share on average as long: equally many on every stage, and balanced.
``--picture FILE`` draws the fastest round of each schedule with the activation memory that its passes hold.
"""

from __future__ import annotations

import statistics
from functools import partial

import torch
from common import add_flags, command_line, in_rounds, print_table
from contenders import Contender, iteration, start
from sleeping import Interval

from megatron.pipeline.planner.planning.balance import Model
from megatron.pipeline.planner.planning.document import read_costs
from megatron.pipeline.planner.schedule.core.costs import uniform
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, activation_profile
from megatron.pipeline.planner.shape.hybrid import Pattern
from megatron.pipeline.planner.view.picture import draw

OURS = "1f1b interleaved gis gis-h zb-h1 zb-h2 zb-auto zb-v v-half v-min v-auto v-auto@2 1f1b-v dualpipe-v".split()
TORCHS = "1F1B Interleaved1F1B InterleavedZeroBubble ZBVZeroBubble DualPipeV".split()


def timeline_of(schedule: Schedule, passes: list[Interval]) -> Timeline:
    """All ranks' passes with the times at which they ran in the last iteration; a collective over the ranks."""
    rows: list[list[Interval]] = [[] for _ in schedule.passes]
    torch.distributed.all_gather_object(rows, passes)
    timed = [
        tuple(Timed(work, interval.start, interval.end) for work, interval in zip(row, intervals, strict=True))
        for row, intervals in zip(schedule.passes, rows, strict=True)
    ]
    return Timeline(tuple(timed))


def draw_fastest(contenders: list[Contender], fastest: dict[str, Timeline], path: str) -> None:
    """Draw every contender's fastest round, with its activation memory in microbatches."""
    timelines, memory = {}, {}
    first = fastest[contenders[0].name].makespan
    for contender in contenders:
        timeline, costs = fastest[contender.name], uniform(contender.schedule.placement)
        held = max(activation_peaks(contender.schedule, costs))
        speed = f"{first / timeline.makespan:.2f} times as fast as {contenders[0].name}"
        title = f"{contender.name}: {1000 * timeline.makespan:.0f} ms, {speed}, at most {held:g} microbatches on a rank"
        timelines[title], memory[title] = timeline, activation_profile(contender.schedule, timeline, costs)
    draw(timelines, path, memory, unit="s", memory_unit="microbatches")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ours", nargs="*", default=OURS, metavar="NAME[@MEMORY][/batched]", help="see contenders.py, ours")
    parser.add_argument("--torchs", nargs="*", default=TORCHS, choices=TORCHS, help="schedules of torch.distributed.pipelining")
    add_flags(parser.add_argument)
    parser.add_argument("--stock", nargs="*", type=int, default=(1, 2), metavar="CHUNKS", help="of megatron-core's schedules")
    parser.add_argument("--layers", nargs=2, metavar=("PATTERN", "FILE"), help="letters of a model's layers, and what these take")
    parser.add_argument("--picture", metavar="FILE", help="draw the fastest round of each schedule, .png or .svg")
    options = parser.parse_args()
    if options.picture and options.torchs:  # whose steps are not one for each pass
        parser.error("--picture draws no schedules of torch: add --torchs without a name")

    megatron = start(options)
    splits = [megatron]
    if options.layers:
        model = Model.by_layer(read_costs(options.layers[1]), Pattern.of(options.layers[0]))
        splits = [megatron.of_layers(model, even) for even in (True, False)]
    contenders = [split.stock(chunks) for chunks in options.stock for split in splits]
    contenders += [megatron.torchs(name) for name in options.torchs]
    contenders += [split.ours(name) for name in options.ours for split in splits]

    def run(contender: Contender) -> tuple[float, Timeline | None]:
        measured = iteration(contender, megatron.sleeper)
        return measured, timeline_of(contender.schedule, megatron.sleeper.passes) if options.picture else None

    found = in_rounds({contender.name: partial(run, contender) for contender in contenders}, options.rounds)
    if torch.distributed.get_rank() == 0:
        first, rows = statistics.median(seconds for seconds, _ in found[contenders[0].name]), []
        for contender in contenders:
            seconds = [each for each, _ in found[contender.name]]
            measured = statistics.median(seconds)
            alone, with_hops = (contender.simulated(free).makespan for free in (True, False))
            times, ratios = (measured, min(seconds), alone), (measured / alone, measured / with_hops, first / measured)
            rows.append([contender.name, *(f"{1000 * time:.1f}" for time in times), *(f"{ratio:.4f}" for ratio in ratios)])
        columns = ("measured ms", "best", "simulated ms", "measured / simulated", "with hops")
        print_table(megatron.title(options), ("schedule", *columns, f"speed-up over {contenders[0].name}"), rows)
        if options.picture:
            fastest = {name: min(rounds, key=lambda one: one[0])[1] for name, rounds in found.items()}
            draw_fastest(contenders, {name: timeline for name, timeline in fastest.items() if timeline}, options.picture)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
