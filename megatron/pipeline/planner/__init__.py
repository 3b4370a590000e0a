"""Plans pipeline schedules and predicts their time and memory; never imports torch.

This is all of it that the rest of the package uses (only ``mpipe serve`` imports serve.server too, with its libraries), and
pyproject.toml's contract says so. docs/architecture.md has the rooms behind it.

    planned = Request("zb-h1", ranks=4, microbatches=8, memory_limit=4).plan()
    planned.schedule, planned.timeline, planned.peak, planned.gap, planned.programs

Ask
``Request``             a schedule's name and sizes, costs, limits, transformations: its plan() answers it
``families``            schedules by name: which there are, what each places where, check() of a name
``Variant``             a family with the sizes that it leaves to its user
``variants``            those that are worth trying, on at most ``MOST_RANKS``
``Objective``           what is to be short: makespan or span
``Vocabulary``          ways to spread the vocabulary over all ranks
``Offload``             share of the activations that goes to host memory
``Placement``           the stage of the model that each (rank, chunk) holds
``interleaved``         the placement of megatron-core's virtual pipeline
``STOCK``, ``OFF``      in place of a schedule: megatron-core's own; in place of a transformation: none
``written_costs``       costs as users write them: flags of mpipe, fields of a schedule's JSON
``document``            files of users, read and written: schedules, costs, timelines
``reading``             any file of a user, with errors that name it

Plan
``Planned``             a verified schedule with programs, times, memory and bound
``balance``             layers of every stage, planned with the schedule
``choose``              the best of several schedules, and why
``solve``               the schedule of a problem
``PlanCache``           the plans of a training, by number of microbatches
``PlanningProcess``     plans beside a training, in a process of its own
``PlannedBatch``        what it sends back
``every_batch``         microbatches of unequal lengths: their loads, order and packing
``LimitTooLow``         an error: the least limit that suffices; ``HostLimitTooLow``, that of host memory
``refusals``            why there is no schedule within a limit, and amounts of memory in words
``Beside``              memory that ranks need beside activations
``peak_of_1f1b``        the unit of limits such as 0.5

Read a plan
``Schedule``            every rank's passes, and the placement
``Problem``             what a family is asked to plan
``Pass``, ``Kind``      one unit of work, and what is known of its sort
``kinds``               what passes hand on, need and exchange
``ops``                 a rank's program: its operations, and when what they post starts
``verify_programs``     proof that programs cannot deadlock
``simulate``            when everything runs
``activation_peaks``    the most that each rank holds
``activation_profile``  what each rank holds over time
``Timeline``, ``Timed`` passes with their times, planned or recorded
``traffic``             messages of any schedule, and whether they hang over a transport

Costs
``Costs``               seconds and bytes of every pass, and of every message
``StageCosts``          those of one stage; ``EQUAL_PASSES``, where all passes take as long
``VocabularyCosts``     those of a rank's shard of the vocabulary
``CopyCosts``           those of copies to host memory
``MemoryUnit``          what memory is counted in
``uniform``             costs that are the same on every stage
``cutting``             costs of the same model that is cut, spread or timed in another way
``SLACK``               how far sums of floats stray
``bounds``              what no schedule of a problem is shorter than, with or without its limits
``least_between``       what no period is longer by than an iteration
``combined``            megatron-core's overlap of forwards and backwards, of a schedule without

Predict
``ModelDescription``    a training, as far as its time and memory follow from it
``Shape``               the sizes of its model and of its microbatches
``hybrid``              letters of layers that differ
``Shards``              rows of the vocabulary on every rank
``balanced_by_weight``  layers of every stage, with the heaviest rank as light as possible
``device``, ``Device``  GPUs by name and from files
``Links``               what joins ranks
``estimate``            seconds of passes
``rank_memory``         bytes of every rank
``parameters``          numbers of parameters: of a model, a layer, a rank
``with_replicas``       costs with what data-parallel replicas add
``between_seconds``     what they add to an iteration
``origin``              measured costs, and the GPU that follows from them
``ranges``              how far predictions are off

Refuse
``Facts``               settings by name, which refuse() what does not go together
``Found``               a row that is met
``topics``              the rows by topic
``flag_of``             the flag that sets a name

Draw
``view``                pictures, pages, traces and tables
``to_csv``              a schedule for torch.distributed.pipelining

Beside
``counted``             numbers of things: 1 rank, 4 ranks
``minor``               a release as numbers that compare
``without_gc``          planning without the collector of garbage
``end_with_parent``     an initializer of processes
"""

# ruff: noqa: F401 - the names are for others

from megatron.pipeline.planner import view
from megatron.pipeline.planner.combinations import rows as topics
from megatron.pipeline.planner.combinations.table import Facts, Found, flag_of, minor
from megatron.pipeline.planner.costmodel import device, estimate, origin, parameters, ranges
from megatron.pipeline.planner.costmodel import memory as rank_memory
from megatron.pipeline.planner.costmodel.device import Device
from megatron.pipeline.planner.costmodel.links import Links
from megatron.pipeline.planner.costmodel.replicas import between_seconds, with_replicas
from megatron.pipeline.planner.planning import balance, choose, document, every_batch, refusals, solve, traffic
from megatron.pipeline.planner.planning import costs as written_costs
from megatron.pipeline.planner.planning.aside import PlannedBatch, PlanningProcess
from megatron.pipeline.planner.planning.children import end_with_parent
from megatron.pipeline.planner.planning.limits import Beside, peak_of_1f1b
from megatron.pipeline.planner.planning.no_gc import without_gc
from megatron.pipeline.planner.planning.plan_cache import PlanCache
from megatron.pipeline.planner.planning.planned import Planned, Variant
from megatron.pipeline.planner.planning.request import MOST_RANKS, Request, variants
from megatron.pipeline.planner.schedule import families
from megatron.pipeline.planner.schedule.core import cutting, kinds, reading
from megatron.pipeline.planner.schedule.core.costs import (
    EQUAL_PASSES,
    CopyCosts,
    Costs,
    MemoryUnit,
    StageCosts,
    VocabularyCosts,
    uniform,
)
from megatron.pipeline.planner.schedule.core.names import OFF, STOCK, counted
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass, Vocabulary
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved
from megatron.pipeline.planner.schedule.core.problem import HostLimitTooLow, LimitTooLow, Objective, Problem
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.core.slack import SLACK
from megatron.pipeline.planner.schedule.core.timeline import Timed, Timeline
from megatron.pipeline.planner.schedule.lower import program as ops
from megatron.pipeline.planner.schedule.lower.torch_csv import to_csv
from megatron.pipeline.planner.schedule.optimum import bound as bounds
from megatron.pipeline.planner.schedule.optimum.period import least_between
from megatron.pipeline.planner.schedule.rules.verify import verify_programs
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks, activation_profile, simulate
from megatron.pipeline.planner.schedule.transforms.braid import combined
from megatron.pipeline.planner.shape import hybrid
from megatron.pipeline.planner.shape.description import ModelDescription
from megatron.pipeline.planner.shape.gpt import Shape
from megatron.pipeline.planner.shape.shards import Shards
from megatron.pipeline.planner.shape.stages import balanced_by_weight

__all__ = [  # of docs/api.md: these keep their meaning; the others are for the rest of the package
    "Kind",
    "Offload",
    "Pass",
    "Planned",
    "Request",
    "Schedule",
    "Timed",
    "Timeline",
    "Vocabulary",
    "simulate",
    "uniform",
    "view",
]

Schedule._repr_svg_ = Timeline._repr_svg_ = view.svg  # below view's room; in a notebook a cell shows them
