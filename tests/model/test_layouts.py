"""Mixture of experts, context parallelism and multi-token prediction train with stock's numbers under split schedules."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tiny_gpt
import torch
from marked import rest
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model
from model.test_random import sums
from pool import Pool
from releases import needs_local_grouped_experts

from megatron.pipeline.backward.weight_tasks import deferring
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.model.context_parallel import causal_mask
from megatron.pipeline.model.split_linear import split_weights

PLAIN = "--untie-embeddings-and-output-weights --disable-bias-linear "
EXPERTS = PLAIN + "--num-experts 4 --expert-model-parallel-size 2 --moe-aux-loss-coeff 1e-2 "
SHARDED = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather "
LAYOUTS: dict[str, dict[str, Any]] = {
    "experts": {"flags": EXPERTS + "--moe-z-loss-coeff 1e-3"},
    "experts, overlapped": {
        "flags": EXPERTS + SHARDED + "--moe-token-dispatcher-type alltoall --moe-layer-freq 2 --moe-router-enable-expert-bias "
        "--moe-router-score-function sigmoid --moe-shared-expert-intermediate-size 32"
    },
    "experts, tensor parallel": {"tp": 2, "flags": EXPERTS + "--sequence-parallel --expert-tensor-parallel-size 1"},
    "grouped experts": {
        "flags": EXPERTS + "--bf16 --moe-grouped-gemm --overlap-grad-reduce --moe-router-topk 1 --moe-router-pre-softmax --swiglu"
    },
    "context": {"cp": 2, "flags": "--overlap-grad-reduce --attention-dropout 0.1"},
    "context, grouped queries": {
        "cp": 2,
        "flags": PLAIN + "--position-embedding-type rope --group-query-attention --num-query-groups 2 "
        "--recompute-granularity selective",
    },
    "several tokens": {"flags": PLAIN + "--position-embedding-type rope --overlap-grad-reduce --mtp-num-layers 2"},
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=needs_local_grouped_experts)
        if name.startswith("grouped")
        else rest(name)
        if name in ("experts", "context")
        else name
        for name in LAYOUTS
    ],
)
def test_equals_stock(pool: Pool, layout: str) -> None:
    options = {**LAYOUTS[layout], "pp": 2, "iterations": 2, "flags": tuple(LAYOUTS[layout]["flags"].split())}
    stock, ours = pool.each(4, tiny_gpt.train, ("stock", "zb-h1"), **options)
    assert len({loss for loss, _ in stock[-1]}) == 2 and ours == stock


def losses(schedule: str, pp: int, flags: str) -> list[float | None]:
    run = tiny_gpt.Run(schedule, pp=pp, cp=4 // pp, flags=tuple(flags.split()))
    return [run.step(iteration)[0] for iteration in range(2)]


@pytest.mark.parametrize(
    ("pp", "more"),
    [
        rest(2, EXPERTS),
        (4, PLAIN + "--num-experts 4 --moe-aux-loss-coeff 1e-2 --num-layers 8 --moe-layer-freq [0,0,1,1,0,1,1,1] "),
    ],
)
def test_all_of_them_under_a_v(pool: Pool, pp: int, more: str) -> None:
    """Both ends of the model on one rank: also the second copy of the embedding, for further tokens."""
    flags = more + "--overlap-grad-reduce --clip-grad 0 --mtp-num-layers 1 --position-embedding-type rope"
    stock, ours = pool.each(4, losses, ("stock", "zb-v"), pp, flags)
    assert [row for row in ours if row[0] is not None] == [row for row in stock if row[0] is not None]


def test_context_parallel_ranks_add_up_to_the_whole(pool: Pool) -> None:
    """Losses of the two halves of every sequence, against those of whole sequences."""
    options: dict[str, Any] = {"pp": 2, "iterations": 3, "flags": tuple(PLAIN.split())}
    whole = pool.run(2, tiny_gpt.train, "zb-h1", **options)[-1]
    *_, first, second = pool.run(4, tiny_gpt.train, "zb-h1", cp=2, **options)
    for (loss, norm), (one, _), (other, their_norm) in zip(whole, first, second, strict=True):
        assert one + other == pytest.approx(loss, rel=1e-5)
        assert their_norm == pytest.approx(norm, rel=1e-5)


def masks() -> tuple[torch.Tensor, torch.Tensor]:
    """The causal mask of this rank's queries: as the attention makes it, and cut from the whole as Megatron cuts batches."""
    group: Any = torch.distributed.group.WORLD
    whole = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1)
    cut = get_batch_on_this_cp_rank({"attention_mask": whole}, is_hybrid_cp=False, cp_group=group)["attention_mask"]
    return causal_mask(6, group.rank(), group.size(), torch.device("cpu")), cut


def test_context_parallel_mask(pool: Pool) -> None:
    for own, cut in pool.run(2, masks):
        assert torch.equal(own, cut)


def weights(pp: int, flags: str) -> dict[str, float]:
    """The sum of every parameter on this rank, by its global name."""
    return sums(tiny_gpt.Run("zb-h1", pp=pp, flags=tuple(flags.split())).chunks)


def test_weights_do_not_depend_on_the_pipeline_size(pool: Pool) -> None:
    flags = EXPERTS + "--mtp-num-layers 1 --position-embedding-type rope"
    whole, cut = ({k: v for r in pool.run(ranks, weights, ranks // 2, flags) for k, v in r.items()} for ranks in (2, 4))
    assert cut == whole
    matrices = [value for name, value in whole.items() if "experts" in name or "eh_proj" in name]
    assert len(matrices) == 2 * 5 * 4 + 1, "two matrices of each expert, of all layers and the one for another token"
    assert len(set(matrices)) == len(matrices), "layers and experts differ"


def deferred(flags: str) -> tuple[list[str], int, int, list[float]]:
    """What runs fused, how many tasks a B of one microbatch leaves to W and how many matrices the experts have, and
    the sums of the experts' gradients before and after W."""
    run = tiny_gpt.Run("zb-h1", pp=1, flags=tuple(flags.split()), microbatches=1)
    (model,) = run.chunks
    matrices = [weight for name, weight in model.named_parameters() if ".experts." in name]
    model.zero_grad_buffer()
    tasks: list[Any] = []
    losses, _ = tiny_gpt.forward_step(run._tokens(0), model)
    with model.no_sync():
        with deferring(tasks):
            losses.sum().backward()
        before = sum(weight.main_grad.abs().sum().item() for weight in matrices)
        with torch.no_grad():
            for task in tasks:
                task.run()
    after = sum(weight.main_grad.abs().sum().item() for weight in matrices)
    return split_weights(unwrap_model(model)), len(tasks), len(matrices), [before, after]


@pytest.mark.parametrize("kind", ["", pytest.param("--moe-grouped-gemm --bf16", marks=needs_local_grouped_experts)])
def test_weight_gradients_of_experts_are_left_to_w(pool: Pool, kind: str) -> None:
    for fused, tasks, matrices, (before, after) in pool.run(2, deferred, EXPERTS + kind):
        assert matrices == 4 * 2 * (1 if kind else 2), "4 layers, each with 2 matrices, of 2 experts"
        assert tasks == matrices + 4 * 2 + 1, "experts, attention, output layer"
        assert not [name for name in fused if "experts" in name or "attention" in name]
        assert before == 0 < after


def without_tokens() -> list[Any]:
    """What a microbatch without tokens for this rank's experts leaves to W, and their gradients."""
    run = tiny_gpt.Run("zb-h1", pp=1, flags=tuple((EXPERTS + "--moe-grouped-gemm --bf16").split()))
    experts = next(module for module in run.chunks[0].modules() if type(module).__name__ == "SeededGroupedExperts")
    run.chunks[0].zero_grad_buffer()
    tokens = torch.zeros(0, 32, dtype=torch.bfloat16, requires_grad=True)
    output, _ = experts(tokens, torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.bfloat16))
    tasks: list[Any] = []
    with deferring(tasks):
        output.sum().backward()
    untouched = experts.weight1.grad is None and experts.weight2.grad is None
    with run.chunks[0].no_sync(), torch.no_grad():
        for task in tasks:
            task.run()
    return [len(tasks), untouched, experts.weight1.main_grad.abs().sum().item()]


@needs_local_grouped_experts
def test_experts_without_tokens_are_heard_of(pool: Pool) -> None:
    """DDP waits for every weight, also for those that no token met."""
    assert pool.run(2, without_tokens) == [[2, True, 0.0]] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 3 --expert-model-parallel-size 2", "not a multiple of --expert-model-parallel-size 2"),
        ("--num-experts 8 --expert-model-parallel-size 4", "4 ranks cannot share experts over 1 x 4 x 2 = 8"),
        ("--num-experts 2 --moe-router-topk 3", "--moe-router-topk 3 is more than --num-experts 2"),
        ("--num-experts 2 --moe-router-topk 1", "--moe-router-pre-softmax"),
        ("--num-experts 2 --moe-grouped-gemm", "--bf16 and --disable-bias-linear"),
        ("--num-experts 2 --tensor-model-parallel-size 2", "--sequence-parallel"),
        ("--num-experts 2 --tensor-model-parallel-size 2 --sequence-parallel", "be cut into 2: give --disable-bias-linear"),
        ("--num-experts 2 --moe-layer-freq [1]*3", "lists 3 layers, but --num-layers is 4"),
        ("--num-experts 2 --moe-layer-freq [2]", "expected a number or a list"),
        ("--num-experts 2 --moe-layer-freq __import__", "expected a number or a list"),
        ("--num-experts 2 --moe-aux-loss-coeff 1 2", "has 1 values and --moe-aux-loss-coeff 2"),
        ("--num-experts 2", "experts with biases that no ranks share cannot be trained"),
    ],
)
def test_flags_that_do_not_fit(flags: str, message: str) -> None:
    required = (
        "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 --lr 1 "
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 64 --pipeline-model-parallel-size 2 "
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(parse((required + flags).split()), 4)
