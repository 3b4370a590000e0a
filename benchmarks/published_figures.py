"""What was published of trainings that the model of time and memory is compared with: tables, and how each method was run.

Throughputs and peaks are those of Qi et al., "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241, table 4), and Yeung et al.,
"Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288, table 5), on A100s of 80 GB; what GPUs reach in
training is that of Wan et al., "PipeOffload" (arXiv 2503.01328). ``published.py`` predicts them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.pipeline.planner.costmodel.memory import GIB
from megatron.pipeline.planner.schedule.core.passes import Vocabulary
from megatron.pipeline.planner.shape.gpt import Shape

ROOT = Path(__file__).parents[1]
A100, H100 = "A100-80GB", "H100-80GB"
RANKS = 8  # of all published tables


@dataclass(frozen=True)
class Method:
    """How a published method is planned.

    Attributes:
        schedule: a family.
        limit: microbatches that a rank may hold.
        held: the same for the schedule whose memory is predicted, where this planner takes more for the shortest one.
        vocabulary: how the vocabulary is spread.
        redistributes: layers make room for the output layer.
        synchronized: iterations do not interlock, as they do under post-validation.
        waits: ranks wait for messages, as in megatron-core's own schedules: ``Family.exposed_hops``.
    """

    schedule: str = "1f1b"
    limit: float | None = None
    held: float | None = None
    vocabulary: Vocabulary | None = None
    redistributes: bool = False
    synchronized: bool = True
    waits: bool = False


@dataclass(frozen=True)
class Column:
    """One model and number of microbatches, trained with every method.

    Attributes:
        name: what the tables call it.
        flags: of ``pretrain_gpt.py``.
        microbatches: of an iteration.
        chunks: layers are cut into so many for interleaved schedules.
        throughput, memory: published, in the source's units, by method.
    """

    name: str
    flags: tuple[str, ...]
    microbatches: int
    chunks: int
    throughput: Mapping[str, float]
    memory: Mapping[str, float]


@dataclass(frozen=True)
class Source:
    """A paper's tables.

    Attributes:
        unit, byte_unit: of throughput, and bytes of the unit of memory.
        baseline: the method that others are compared with.
        ends: layers that the first and the last stage have less than others.
        rate: throughput of a shape, in this unit, from microbatches per second.
    """

    name: str
    unit: str
    byte_unit: float
    methods: Mapping[str, Method]
    baseline: str
    ends: int
    columns: tuple[Column, ...]
    rate: Callable[[Shape, float], float]


def _zero_bubble() -> Source:
    # By model: chunks with a layer each, then by method samples/GPU/s with 24, 32 and 64 microbatches, and GB.
    tables: dict[str, tuple[int, dict[str, tuple[tuple[float, ...], float]]]] = {
        "1.5B": (3, {
            "1F1B": ((11.8, 12.5, 13.6), 30),
            "1F1B-interleaved": ((13.1, 13.4, 13.9), 40),
            "ZB-1p": ((12.9, 13.4, 14.2), 32),
            "ZB-2p": ((14.5, 14.8, 14.9), 59),
        }),
        "6.2B": (4, {
            "1F1B": ((3.50, 3.70, 4.03), 39),
            "1F1B-interleaved": ((4.01, 4.08, 4.19), 48),
            "ZB-1p": ((3.88, 4.00, 4.20), 42),
            "ZB-2p": ((4.32, 4.35, 4.39), 70),
        }),
    }  # fmt: skip
    methods = {
        "1F1B": Method("1f1b", waits=True),
        "1F1B-interleaved": Method("interleaved", waits=True),
        "ZB-1p": Method("zb-auto", limit=RANKS, synchronized=False),
        "ZB-2p": Method("zb-auto", limit=2 * RANKS, synchronized=False),
    }
    columns = tuple(
        Column(
            f"{model}, {count}",
            ("--config", str(ROOT / f"configs/zero_bubble/{model}.yaml"), "--transformer-impl", "local"),
            count,
            chunks,
            {method: throughput[index] for method, (throughput, _) in rows.items()},
            {method: memory for method, (_, memory) in rows.items()},
        )
        for model, (chunks, rows) in tables.items()
        for index, count in enumerate((24, 32, 64))
    )
    # Megatron's fork for it does not fuse attention, and its first and last stage have a layer less.
    return Source(
        "Zero Bubble", "samples/GPU/s", 1e9, methods, "1F1B", 1, columns, lambda shape, rate: rate * shape.microbatch / RANKS
    )


def _vocabulary_parallelism() -> Source:
    # By sequence length and method: MFU in % of 320 TFLOP/s, and GiB, with 32k, 64k, 128k and 256k rows.
    sizes = (32, 64, 128, 256)
    tables: dict[int, dict[str, tuple[tuple[float, ...], tuple[float, ...]]]] = {
        2048: {
            "baseline": ((46.16, 40.48, 33.11, 25.23), (14.86, 16.32, 19.25, 25.64)),
            "redistribution": ((46.01, 46.37, 44.22, 38.91), (14.86, 16.32, 19.25, 25.64)),
            "interlaced": ((51.18, 50.94, 50.97, 50.92), (17.20, 17.57, 18.43, 20.17)),
            "1": ((50.42, 50.28, 49.93, 50.12), (15.63, 16.02, 16.84, 18.59)),
            "2": ((50.23, 50.18, 49.82, 49.69), (14.83, 15.23, 16.04, 17.78)),
        },
        4096: {
            "baseline": ((47.05, 41.87, 35.00, 26.75), (21.39, 22.85, 25.78, 31.64)),
            "redistribution": ((46.93, 46.78, 47.44, 43.01), (21.39, 22.85, 25.78, 31.64)),
            "interlaced": ((51.41, 51.82, 51.32, 51.38), (27.20, 27.64, 28.60, 30.53)),
            "1": ((50.98, 50.98, 50.83, 50.66), (24.04, 24.47, 25.41, 27.34)),
            "2": ((50.93, 50.75, 50.56, 50.40), (22.44, 22.89, 23.80, 25.73)),
        },
    }
    methods = {
        "baseline": Method(),
        "redistribution": Method(redistributes=True),
        # The paper's holds half a pipeline more than 1F1B. This planner needs two microbatches more to be as fast.
        "interlaced": Method(vocabulary=Vocabulary.INTERLACED, held=1.5 * RANKS),
        "1": Method(vocabulary=Vocabulary.TWO_BARRIERS),
        "2": Method(vocabulary=Vocabulary.ONE_BARRIER),
    }
    config = ("--config", str(ROOT / "configs/vocabulary_parallelism/4B.yaml"), "--vocab-parallel", "off")
    columns = tuple(
        Column(
            f"{seq}, {size}k",
            (*config, "--seq-length", str(seq), "--vocab-size", str(1024 * size - 1)),
            128,
            1,
            {method: throughput[index] for method, (throughput, _) in rows.items()},
            {method: memory[index] for method, (_, memory) in rows.items()},
        )
        for seq, rows in tables.items()
        for index, size in enumerate(sizes)
    )

    def mfu(shape: Shape, rate: float) -> float:
        return 100 * shape.training_operations() * rate / (RANKS * 320e12)

    return Source("Vocabulary Parallelism", "MFU, %", GIB, methods, "baseline", 0, columns, mfu)


SOURCES = (_zero_bubble(), _vocabulary_parallelism())
# TFLOP/s that the PipeOffload paper's training reaches, by device.
REACHED = {A100: 220.0, H100: 440.0}
