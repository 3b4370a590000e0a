"""The settings of a training that a schedule must not depend on, and the rows of them that the tests train."""

from __future__ import annotations

from pairwise import Row, Value, covering, rows

LINEAR = ("1f1b", "zb-h1", "zb-h2", "zb-auto")
INTERLEAVED = ("interleaved", "gis", "gis-h")
V = ("1f1b-v", "zb-v", "v-half", "v-min", "v-auto", "dualpipe-v")
SCHEDULES = (*LINEAR, *INTERLEAVED, *V, "seq-1f1b")
# With one placement, and backwards that are split or not: the same handlers, messages and groups, in another order.
ALIKE = (
    ("1f1b",), ("zb-h1", "zb-h2", "zb-auto"), ("interleaved",), ("gis", "gis-h"), ("1f1b-v",),
    ("zb-v", "v-half", "v-min", "v-auto"), ("dualpipe-v",), ("seq-1f1b",),
)  # fmt: skip

# The first value of each column is the plain one. ``FLAGS`` has what the others stand for.
COLUMNS = {
    "pp": ("2", "4", "1"),
    "microbatches": ("5", "1", "3", "8"),
    "parallel": ("data", "tensor", "context"),
    "sequence-parallel": ("off", "on"),
    "experts": ("none", "four"),
    "gradients": ("plain", "overlap", "distributed"),
    "precision": ("fp32", "bf16", "fp16"),
    "recompute": ("nothing", "full", "selective"),
    "dropout": ("0", "0.1"),
    "embeddings": ("tied", "untied"),
    "block": ("gpt", "llama"),
    "positions": ("learned", "rope"),
    "p2p": ("single", "batched"),
    "layers": ("even", "uneven"),
    "predicted": ("one", "two"),
    "loss": ("mean", "per-token"),
    "clip": ("0", "1"),
    "slices": ("no", "yes"),  # whether seq-1f1b can be trained so
}
FLAGS: dict[Value, str] = {
    ("parallel", "tensor"): "--tensor-model-parallel-size 2",
    ("parallel", "context"): "--context-parallel-size 2",
    ("sequence-parallel", "on"): "--sequence-parallel",
    ("experts", "four"): "--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 --disable-bias-linear",
    ("gradients", "overlap"): "--overlap-grad-reduce --ddp-bucket-size 1 --accumulate-allreduce-grads-in-fp32",
    ("gradients", "distributed"): "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ("precision", "bf16"): "--bf16",
    ("precision", "fp16"): "--fp16 --initial-loss-scale 4096",
    ("recompute", "full"): "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ("recompute", "selective"): "--recompute-granularity selective",
    ("dropout", "0.1"): "--hidden-dropout 0.1 --attention-dropout 0.1",
    ("embeddings", "untied"): "--untie-embeddings-and-output-weights",
    ("block", "llama"): "--swiglu --normalization RMSNorm --disable-bias-linear",
    ("positions", "rope"): "--position-embedding-type rope --group-query-attention --num-query-groups 2",
    ("p2p", "batched"): "--pipeline-p2p batched",
    ("layers", "uneven"): "--num-layers 5 --num-layers-in-last-pipeline-stage 2",
    ("predicted", "two"): "--mtp-num-layers 1",
    ("loss", "per-token"): "--calculate-per-token-loss",
    ("clip", "1"): "--clip-grad 1",
}
RANKS = 4


def _never(column: str, value: str, other: str, *others: str) -> set[frozenset[Value]]:
    return {frozenset([(column, value), (other, one)]) for one in others}


NEVER = {
    *_never("pp", "4", "parallel", "tensor", "context"),  # of 4 ranks
    *_never("pp", "4", "experts", "four"),
    *_never("pp", "4", "sequence-parallel", "on"),
    *_never("pp", "4", "layers", "uneven"),  # megatron-core shares the other layers equally
    *_never("pp", "1", "layers", "uneven"),
    *_never("sequence-parallel", "on", "parallel", "data", "context"),
    *_never("experts", "four", "parallel", "tensor", "context"),
    *_never("experts", "four", "sequence-parallel", "on"),
    *_never("parallel", "context", "positions", "learned"),
    *_never("predicted", "two", "positions", "learned"),
    *_never("predicted", "two", "embeddings", "tied"),
    # Slices round differently and draw masks differently, and some settings need whole sequences.
    *_never("slices", "yes", "pp", "1"),
    *_never("slices", "yes", "precision", "bf16", "fp16"),
    *_never("slices", "yes", "dropout", "0.1"),
    *_never("slices", "yes", "recompute", "full"),
    *_never("slices", "yes", "parallel", "context"),
    *_never("slices", "yes", "experts", "four"),
    *_never("slices", "yes", "predicted", "two"),
}
ROWS = rows(COLUMNS, NEVER)


def never_with(schedule: str) -> set[Value]:
    """Values of rows that a schedule is not trained with."""
    if schedule == "seq-1f1b":
        return {("slices", "no")}
    return set() if schedule in LINEAR else {("pp", "1")}  # where there is nothing to place


def ranks(row: Row) -> int:
    """Two data-parallel replicas where gradients are reduced in some way; the sum of three would depend on their order."""
    needed = int(row["pp"]) * (1 if row["parallel"] == "data" else 2)
    reduced = row["gradients"] != "plain" or row["experts"] != "none" or row["loss"] != "mean"
    return min(RANKS, needed * (2 if reduced else 1))


def cases() -> list[tuple[int, str]]:
    """A row and a schedule: with schedules that are alike every value they can be trained with, and every row with some schedule.

    Those that are alike take turns.
    """
    costs = [ranks(row) * (4 + int(row["microbatches"])) for row in ROWS]
    found: set[tuple[int, str]] = set()
    for alike in ALIKE:
        used = {row for row, _ in found}
        cheap = [cost / (1 if row in used else 2) for row, cost in enumerate(costs)]
        chosen = covering(ROWS, never_with(alike[0]), cheap)
        found |= {(row, alike[turn % len(alike)]) for turn, row in enumerate(chosen)}
    for row in set(range(len(ROWS))) - {row for row, _ in found}:
        possible = [schedule for schedule in SCHEDULES if not never_with(schedule) & set(ROWS[row].items())]
        found.add((row, possible[row % len(possible)]))
    return sorted(found)


def flags(row: Row) -> str:
    return " ".join(FLAGS[value] for value in row.items() if value in FLAGS)


def name(row: Row) -> str:
    """A row by what is not plain in it."""
    return " ".join(f"{column}={value}" for column, value in row.items() if value != COLUMNS[column][0]) or "plain"
