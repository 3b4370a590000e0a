"""A model that computes slices of its microbatches has the losses, reports and gradients of one that computes them whole."""

from __future__ import annotations

import gc
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import tiny_gpt
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.pipeline.patches import schedules as schedules_patch
from pool import Pool

from megatron.pipeline.flags.settings import Settings
from megatron.pipeline.model import seeding
from megatron.pipeline.model.slices import Slices, check_slices
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core.passes import Kind, Pass
from megatron.pipeline.session.planning import as_planned
from megatron.pipeline.trainer.data import forward_step

MICROBATCHES = 3
LEARNED = "--attention-dropout 0"
MODERN = (
    "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--group-query-attention --num-query-groups 2"
)
CORE = "--recompute-granularity selective"
LAYERS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2"


def batches(args: Namespace, documents: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches whose loss masks have few tokens, and none in the third quarter; each is handed out once."""
    generator = torch.Generator().manual_seed(3)
    size = args.micro_batch_size, args.seq_length
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, 60, (size[0], size[1] + 1), generator=generator)
        loss_mask = (torch.rand(size, generator=generator) < 0.6).float()
        loss_mask[:, size[1] // 2 : 3 * size[1] // 4] = 0
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": loss_mask,
            "position_ids": torch.arange(size[1]).expand(size),
        }
        if documents:
            document = torch.cumsum(torch.rand(size, generator=generator) < 0.2, 1)
            across = document[:, :, None] != document[:, None, :]
            batch["attention_mask"] = (across | torch.ones(size[1], size[1], dtype=torch.bool).triu(1))[:, None]
        yield batch


def iteration(
    run: Any, splits: int, documents: bool = False, slices: Any = None, train: bool = True
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Reports with the number of tokens that count, and all gradients, of one iteration that runs passes as a runtime would."""
    chunk, config = run.chunks[0], run.config
    seeding.set_iteration(run.chunks, 0)
    chunk.zero_grad_buffer()
    name = "seq-1f1b" if splits > 1 else "1f1b"
    schedule = planning.plan(name, 1, MICROBATCHES, splits=splits if splits > 1 else None)
    source = batches(run.args, documents)
    slices = slices or Slices(run.chunks, splits, keep_graphs=train)
    outputs: dict[int, torch.Tensor] = {}
    reports: list[Any] = []
    total = 0
    for work in (schedule if train else schedule.forward_only()).passes[0]:
        with slices.around(work), torch.set_grad_enabled(train):
            if work.kind is Kind.F:
                output, tokens = schedules.forward_step(
                    forward_step,
                    slices.iterator(work, source),
                    chunk,
                    MICROBATCHES,
                    None,
                    reports if slices.completes(work) else [],
                    config,
                    cp_group_size=1,
                    current_microbatch=work.microbatch,
                )
                if train:
                    outputs[work.microbatch] = output
                total += int(tokens) if slices.completes(work) else 0
            else:
                schedules_patch.backward(None, outputs.pop(work.microbatch), None, config, chunk)
    gradients = {name: parameter.main_grad.clone() for name, parameter in chunk.named_parameters()}
    for name, parameter in chunk.named_parameters():
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradients[name])  # over the tensor-parallel ranks, here all there are
    assert next(source, None) is None, "every microbatch has been read"
    return ([report["lm loss"].tolist() for report in reports], total), gradients


def differences(splits: int, flags: str, tp: int = 1, documents: bool = False) -> tuple[Any, Any, dict[str, float]]:
    """Reports of the whole microbatches and of slices, and how far apart every gradient is, relative to its largest."""
    run = tiny_gpt.Run("1f1b", pp=1, tp=tp, microbatches=MICROBATCHES, flags=tuple(flags.split()))
    whole_reports, whole = iteration(run, 1, documents)
    reports, sliced = iteration(run, splits, documents)
    assert all(gradient.any() for gradient in whole.values())
    apart = {name: float((sliced[name] - whole[name]).abs().max() / whole[name].abs().max()) for name in whole}
    return whole_reports, reports, apart


@pytest.mark.parametrize(
    ("splits", "flags", "tp", "documents"),
    [
        (2, LEARNED, 1, False),
        (4, MODERN, 1, False),
        (16, LEARNED, 1, True),
        (4, f"{MODERN} --calculate-per-token-loss", 1, True),
        (4, f"{LEARNED} {CORE}", 1, False),
        (4, f"{MODERN} {LAYERS}", 1, True),
        (2, f"{MODERN} --sequence-parallel", 2, False),
    ],
)
def test_slices_have_the_numbers_of_the_whole(pool: Pool, splits: int, flags: str, tp: int, documents: bool) -> None:
    for (expected, tokens), (reports, sliced_tokens), apart in pool.run(tp, differences, splits, flags, tp, documents):
        assert len(reports) == MICROBATCHES
        for report, whole in zip(reports, expected, strict=True):
            assert report == pytest.approx(whole, rel=1e-6)
        assert sliced_tokens == tokens
        assert max(apart.values()) < 1e-5, apart


def sums(flags: tuple[str, ...]) -> list[float]:
    """The sum of every gradient of an iteration in slices."""
    run = tiny_gpt.Run("1f1b", pp=1, microbatches=MICROBATCHES, flags=flags)
    return [gradient.double().sum().item() for gradient in iteration(run, 4)[1].values()]


@pytest.mark.parametrize("recompute", [CORE, LAYERS])
def test_recomputed_slices_draw_the_same_masks(pool: Pool, recompute: str) -> None:
    dropout = "--attention-dropout 0.2 --hidden-dropout 0.2".split()
    assert pool.run(1, sums, (*dropout, *recompute.split())) == pool.run(1, sums, tuple(dropout))


def tensors_left(recompute: str) -> tuple[int, int]:
    """Tensors alive after an iteration, and after an evaluation, in slices, less those before; what runs slices lives on."""
    run = tiny_gpt.Run("1f1b", pp=1, microbatches=MICROBATCHES, flags=tuple(recompute.split()))
    iteration(run, 4)
    before = _tensors()
    training, evaluation = Slices(run.chunks, 4), Slices(run.chunks, 4, keep_graphs=False)
    iteration(run, 4, slices=training)
    trained = _tensors() - before
    iteration(run, 4, slices=evaluation, train=False)
    return trained, _tensors() - before


def _tensors() -> int:
    while gc.collect():  # what one round ends may leave more for the next, of earlier tests on this rank too
        pass
    return sum(isinstance(item, torch.Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("recompute", ["", LAYERS])
def test_nothing_is_remembered_after_the_backwards(pool: Pool, recompute: str) -> None:
    assert pool.run(1, tensors_left, recompute) == [(0, 0)]


def evaluations() -> tuple[Any, Any]:
    run = tiny_gpt.Run("1f1b", pp=1, microbatches=MICROBATCHES)
    return iteration(run, 1, train=False)[0], iteration(run, 4, train=False)[0]


def test_evaluation(pool: Pool) -> None:
    ((expected, tokens), (reports, sliced_tokens)) = pool.run(1, evaluations)[0]
    assert sliced_tokens == tokens and len(reports) == len(expected)
    for report, whole in zip(reports, expected, strict=True):
        assert report == pytest.approx(whole, rel=1e-6)


FLAGS = {
    "seq_length": 16,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "transformer_impl": "local",
    "masked_softmax_fusion": True,
}


@pytest.mark.parametrize(
    ("splits", "flags", "message"),
    [
        (3, {}, "--seq-length 16 cannot be cut into 3 equal slices: it must be a multiple of 3, such as 15 or 18"),
        (32, {}, "a multiple of 32, such as 32; or choose another number"),
        (16, {"sequence_parallel": True}, "16 equal slices over 2 ranks of --sequence-parallel: it must be a multiple of 32"),
        (2, {"moe_router_load_balancing_type": ["none", "sinkhorn"]}, "--moe-router-load-balancing-type sinkhorn needs"),
    ],
)
def test_what_needs_whole_sequences_is_refused(splits: int, flags: dict[str, Any], message: str) -> None:
    args = Namespace(**FLAGS | flags)
    check_slices(args, 1)
    with pytest.raises(ValueError, match=message):
        check_slices(args, splits)


def test_the_fused_softmax_is_switched_off() -> None:
    for splits in (1, 2):
        planned: Any = Namespace(plans=Namespace(splits=splits, vocabulary=None))
        assert as_planned(Settings.of(Namespace(**FLAGS)), planned).masked_softmax_fusion == (splits == 1)


def what_is_refused() -> list[str]:
    """Messages for: slices that would differ in length, a model that is to return logits, an input of whole sequences."""
    run = tiny_gpt.Run("1f1b", pp=1)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    messages = []
    for splits, inputs in ((5, {}), (2, {}), (2, {"packed_seq_params": "some"})):
        with pytest.raises(ValueError) as caught, Slices(run.chunks, splits).around(Pass(Kind.F, 0)):  # noqa: PT011
            run.chunks[0](tokens, tokens, None, **inputs)
        messages.append(str(caught.value))
    return messages


def test_what_cannot_be_cut_is_refused(pool: Pool) -> None:
    length, logits, packed = pool.run(1, what_is_refused)[0]
    assert length.startswith("input_ids has 16 tokens, which cannot be cut into 5 equal slices")
    assert logits.startswith("the model needs labels")
    assert packed.startswith("packed_seq_params cannot be cut into 2 slices")
