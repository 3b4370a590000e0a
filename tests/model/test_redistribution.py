"""``--layer-redistribution``: what is chosen from the flags, and that stages without layers train with the same numbers."""

from __future__ import annotations

import pytest
import tiny_gpt
from marked import rest
from megatron.core.transformer.enums import LayerType
from pool import Pool

from megatron.pipeline.model.layout import stage_layers
from megatron.pipeline.session.startup_lines import plan_in_words
from megatron.pipeline.trainer import program

MODEL = (
    "--num-layers 32 --hidden-size 3072 --num-attention-heads 24 --seq-length 2048 --micro-batch-size 1 --lr 1e-2 --mock-data "
    "--train-iters 6 --tokenizer-type NullTokenizer --pipeline-model-parallel-size 8 --global-batch-size 128 "
    "--layer-redistribution"
)


def layers(flags: str) -> tuple[list[int], str]:
    """Of every stage, and what the log says about it."""
    args, _, pipeline = program.prepare(f"{MODEL} {flags}".split(), world_size=8)
    numbers = [stage.count(LayerType.decoder) for stage in stage_layers(args, pipeline.placement)]
    return numbers, plan_in_words(args, pipeline)[0]


@pytest.mark.parametrize(
    ("flags", "last", "words"),
    [
        ("--vocab-size 131072", 1, "as long as 3.2 layers: the heaviest rank has the work of 5, the mean is 4.4"),
        (
            "--vocab-size 131072 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            2,
            "as long as 2.4 layers",
        ),
        ("--vocab-size 131072 --swiglu --group-query-attention --num-query-groups 8", 1, "as long as 3.56 layers"),
        # Up to 0.16 a NullTokenizer has one token more than that.
        ("--vocab-size 131071 --num-experts 8 --moe-router-topk 2 --disable-bias-linear", 3, "as long as 2 layers"),
        ("--vocab-size 262144", 0, "as long as 6.4 layers: the heaviest rank has the work of 6.4, the mean is 4.8"),
    ],
)
def test_layers_follow_from_the_shape(flags: str, last: int, words: str) -> None:
    numbers, said = layers(f"--pipeline-schedule 1f1b {flags}")
    assert numbers[-1] == last and words in said


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_ranks_are_balanced_where_they_have_several_stages(schedule: str) -> None:
    """The last stage's rank gets fewer layers, on whichever of its stages; on a V that is the first rank."""
    numbers, _ = layers(f"--pipeline-schedule {schedule} --vocab-size 131072")
    ranks = [numbers[rank] + numbers[rank + 8 if schedule == "interleaved" else 15 - rank] for rank in range(8)]
    assert sorted(ranks) == [1, 4, 4, 4, 4, 5, 5, 5] and ranks.index(1) == (7 if schedule == "interleaved" else 0)


@pytest.mark.parametrize(
    ("schedule", "ranks", "flags"),
    [
        ("zb-h1", 4, "--num-layers 2 --overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"),
        rest("1f1b", 4, "--num-layers 2 --position-embedding-type rope"),
        ("zb-v", 2, "--num-layers 2"),
        rest("interleaved", 2, "--num-layers 2 --bf16 --overlap-grad-reduce"),
    ],
)
def test_first_and_last_stages_without_layers(pool: Pool, schedule: str, ranks: int, flags: str) -> None:
    given = tuple(f"--hidden-size 8 --clip-grad 0 --untie-embeddings-and-output-weights {flags}".split())
    whole = pool.run(1, tiny_gpt.train, "1f1b", pp=1, flags=given, iterations=3)
    cut = pool.run(ranks, tiny_gpt.train, schedule, pp=ranks, flags=(*given, "--layer-redistribution"), iterations=3)
    found = [[loss for loss, _ in steps] for steps in cut if steps[0][0] is not None]
    assert found == [[loss for loss, _ in whole[-1]]]
