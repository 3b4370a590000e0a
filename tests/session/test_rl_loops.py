"""Loops that call as slime and as NeMo-RL do: log-probabilities, losses, norms and weights have the bits of the same loop under
megatron-core's own schedule. No registry has the frameworks. Log-probabilities come first, by forwards alone; then several steps
train on them. Local attention takes no packed sequences: documents of a row are kept apart by a mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from example_runs import example
from marked import rest
from megatron.core import parallel_state, tensor_parallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.pipeline.patches.loops import finalize_upstream
from pool import Pool

from megatron.pipeline import install

VOCABULARY, MULTIPLE = 64, 4  # rows are padded to a multiple of MULTIPLE tokens
LENGTHS = (5, 11, 7, 3, 9, 6, 12, 4, 8, 10, 5, 7)  # of the samples of a rollout
ROLLOUTS: tuple[tuple[tuple[int, ...], ...], ...] = (((1, 2, 1), (2, 1, 3, 1, 1)), ((4, 2), (1, 1, 1, 1, 2)))  # see ``Rollout``


class Trained(NamedTuple):
    """Of a rank, with the bits of every number.

    Attributes:
        reported: log-probabilities of every rollout, and words of the loss of every step; empty but on the last rank.
        norms: of the gradients, of every step.
        weights: sums of all of them, at the end.
    """

    reported: list[Any]
    norms: list[float]
    weights: list[float]


class Rollout:
    """Samples of one data-parallel rank, and the steps that train on them.

    Args:
        steps: for every step how many samples each of its microbatches has.
    """

    def __init__(self, steps: tuple[tuple[int, ...], ...], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = sum(map(sum, steps))
        self.steps = steps
        self.tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for length in LENGTHS[:count]]
        self.advantages = list(torch.randn(count, generator=generator))
        self.before: list[torch.Tensor] = []  # log-probabilities
        ends = torch.tensor([size for step in steps for size in step]).cumsum(0).tolist()
        self.microbatches = [range(end - size, end) for end, size in zip(ends, (s for step in steps for s in step), strict=True)]
        self.place = 0

    def get_next(self) -> dict[str, Any]:
        """The next microbatch; slime's iterator is no iterator of Python."""
        chosen = self.microbatches[self.place]
        self.place += 1
        tokens = [self.tokens[one] for one in chosen]
        return {
            "tokens": tokens,
            "advantages": [self.advantages[one] for one in chosen],
            "before": [self.before[one] for one in chosen] if self.before else None,
        }


def packed(tokens: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples as one row [1, T], and the mask [1, 1, T, T] that keeps them apart."""
    row = torch.cat(tokens)
    row = torch.nn.functional.pad(row, (0, -len(row) % MULTIPLE))
    sizes = torch.tensor([len(one) for one in tokens] + [len(row) - sum(map(len, tokens))])
    documents = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    apart = documents[:, None] != documents[None, :]
    return row[None], (apart | torch.ones_like(apart).triu(1))[None, None]


def log_probabilities(tokens: list[torch.Tensor], logits: torch.Tensor) -> list[torch.Tensor]:
    """Of every sample's tokens but the first, by logits [1, T, vocabulary]."""
    found, place = [], 0
    for one in tokens:
        found.append(logits[0, place : place + len(one) - 1].float().log_softmax(-1).gather(-1, one[1:, None])[:, 0])
        place += len(one)
    return found


def policy_losses(batch: dict[str, Any], logits: torch.Tensor) -> list[torch.Tensor]:
    """Of every sample, by token: the clipped surrogate of PPO."""
    losses, found = [], log_probabilities(batch["tokens"], logits)
    for now, before, advantage in zip(found, batch["before"], batch["advantages"], strict=True):
        ratio = (now - before).exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage))
    return losses


def prepare(schedule: str, pipeline: int, per_token: bool, **ddp: Any) -> tuple[Any, list[Any], Any]:
    """The loop that is installed, this rank's chunks in DDP, and their optimizer."""
    own = example("own_training_loop")
    loop = install(schedule)
    chunks = loop.pipeline(pipeline).placement.chunks if schedule != "stock" else 1
    parallel_state.initialize_model_parallel(1, pipeline, chunks if chunks > 1 else None)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    models = own.build(position_embedding_type="rope")
    for model in models:
        model.config.variable_seq_lengths, model.config.calculate_per_token_loss = True, per_token
    wrapped = own.wrap(models, **ddp)
    shards = {name: ddp.get(name, False) for name in ("use_distributed_optimizer", "overlap_param_gather")}
    return loop, wrapped, get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, **shards), wrapped)


def from_last_rank(given: Any) -> Any:
    """What the last pipeline rank has, on all of them."""
    sent, group = [given], parallel_state.get_pipeline_model_parallel_group()
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    torch.distributed.broadcast_object_list(sent, src=last, group=group)
    return sent[0]


def bits(value: Any) -> Any:
    """Numbers in the place of tensors; lists must be plain, as those of megatron-core are."""
    return torch.utils._pytree.tree_map(lambda leaf: leaf.tolist() if torch.is_tensor(leaf) else leaf, value)


def _weights(chunks: list[Any]) -> list[float]:
    for chunk in chunks if chunks[0].ddp_config.overlap_param_gather else ():
        chunk.start_param_sync(force_sync=True)
    return [float(weight.sum()) for chunk in chunks for weight in chunk.parameters()]


def _set_up_as_slime(chunks: list[Any], optimizer: Any, again: bool) -> None:
    """Functions of the configuration before a rollout; its first step gathers no parameters. ``finalize_model_grads`` is what a
    module has that imported it before ``install``, and under a name of its own."""
    config, ddp = chunks[0].config, chunks[0].ddp_config
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_upstream
    if ddp.overlap_grad_reduce:
        config.no_sync_func = _one_or_all([chunk.no_sync for chunk in chunks])
        config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if ddp.overlap_param_gather:
        config.param_sync_func = None
        for chunk in chunks:
            chunk.disable_forward_pre_hook(param_sync=again)


def _one_or_all(found: list[Any]) -> Any:
    return found[0] if len(found) == 1 else found


def as_slime(schedule: str, pipeline: int, per_token: bool, **ddp: Any) -> Trained:
    """A list of chunks and one of iterators, which are objects of the loop's own; a loss that is a 3-tuple in every mode, with
    words among the reports; functions of the configuration that are set before each rollout; gradients that are zeroed twice.
    """
    loop, chunks, optimizer = prepare(schedule, pipeline, per_token, **ddp)
    replicas = parallel_state.get_data_parallel_world_size()

    def forward_step(data: Any, model: Any, return_schedule_plan: bool = False, loss: Any = None) -> tuple[torch.Tensor, Any]:
        assert not return_schedule_plan
        batch = data.get_next()
        row, mask = packed(batch["tokens"])
        given = {"input_ids": row, "position_ids": None, "attention_mask": mask, "labels": None, "packed_seq_params": None}
        return model(**given, loss_mask=torch.ones_like(row)), partial(loss, batch)

    def values(batch: Any, logits: torch.Tensor, non_loss_data: bool = True) -> tuple[torch.Tensor, Any]:
        assert non_loss_data
        return torch.empty(0), {"log_probs": log_probabilities(batch["tokens"], logits)}

    def policy(batch: Any, microbatches: int, samples: int, logits: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        losses = policy_losses(batch, logits)
        tokens = torch.tensor(sum(map(len, losses)))
        loss = torch.stack([one.sum() if per_token else one.mean() for one in losses]).sum()
        if not per_token:
            loss = loss * microbatches / samples * replicas
        told = {"keys": ["loss"], "values": torch.tensor([tokens if per_token else 0, loss])}
        return loss, tokens if per_token else torch.tensor(1), told

    def call(data: Any, loss: Any, microbatches: int, **options: Any) -> list[Any]:
        found: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(forward_step, loss=loss),
            data_iterator=data,
            model=chunks,
            num_microbatches=microbatches,
            seq_length=32,
            micro_batch_size=1,
            **options,
        )
        return found

    reported, norms = [], []
    for number, steps in enumerate(ROLLOUTS):
        data = [Rollout(steps, 10 * number + parallel_state.get_data_parallel_rank()) for _ in chunks]
        for chunk in chunks:
            chunk.eval()
        with torch.no_grad():
            passes = [call(data, values, len(step), forward_only=True) for step in steps]
        for chunk in chunks:
            chunk.train()
        found = [one for reports in passes for report in reports for one in report["log_probs"]]
        reported.append(bits(found) if parallel_state.is_pipeline_last_stage() else [])
        for one in data:
            # On a V the last stage is on another rank than the one that reports: what a framework would have to add.
            one.before, one.place = from_last_rank(found), 0
        _set_up_as_slime(chunks, optimizer, again=number > 0)
        for place, step in enumerate(steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            policies = partial(policy, microbatches=len(step), samples=sum(step) * replicas)
            told = call(data, lambda batch, logits, do=policies: do(batch, logits=logits), len(step), decoder_seq_length=None)
            updated, norm, _ = optimizer.step()
            assert updated
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            norms.append(float(norm))
            reported.append(bits(told) if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else [])
            if place == 0 and ddp.get("overlap_param_gather"):
                for chunk in chunks:
                    chunk.enable_forward_pre_hook()
                chunks[0].config.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in chunks])
    _check_ran(schedule, loop, pipeline, len(ROLLOUTS[-1][-1]))
    return Trained(reported, norms, _weights(chunks))


def as_nemo_rl(schedule: str, pipeline: int, in_parts: bool, **ddp: Any) -> Trained:
    """One module and a generator; outputs are divided in place; the loss undoes megatron-core's mean over microbatches, and gives
    no number of tokens although losses are by token; the last rank broadcasts its reports.

    Args:
        in_parts: a step is several calls within the chunk's own ``no_sync``, without any of the configuration's functions; the
            loop scales the gradients, starts their reduction where it overlaps, and finalizes them.
    """
    loop, [model], optimizer = prepare(schedule, pipeline, True, **ddp)
    config = model.config
    if ddp.get("overlap_grad_reduce"):
        config.no_sync_func, config.grad_sync_func = model.no_sync, model.start_grad_sync

    def forward_step(data: Iterator[Any], chunk: Any, loss: Callable[..., Any]) -> tuple[torch.Tensor, Any]:
        batch = next(data)
        positions = torch.arange(batch["input"].shape[1]).expand(batch["input"].shape)
        output = chunk(input_ids=batch["input"], position_ids=positions, attention_mask=batch["mask"])
        output.div_(0.9)  # on every stage
        return output, partial(loss, batch)

    def values(batch: Any, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        found = [torch.nn.functional.pad(one, (1, 0)) for one in log_probabilities(batch["tokens"], logits)]
        return torch.tensor(0.0), {"logprobs": torch.cat(found)[None]}

    def policy(batch: Any, logits: torch.Tensor, microbatches: int, tokens: torch.Tensor) -> tuple[torch.Tensor, Any]:
        loss = torch.cat(policy_losses(batch, logits)).sum() / tokens
        return loss * microbatches, {"loss": loss.item(), "tokens": int(tokens)}

    def call(data: Rollout, loss: Callable[..., Any], microbatches: int, forward_only: bool = False) -> list[Any]:
        def prepared() -> Iterator[Any]:
            for _ in range(microbatches):
                batch = data.get_next()
                row, mask = packed(batch["tokens"])
                yield {**batch, "input": row, "mask": mask}

        found: list[Any] = get_forward_backward_func()(
            forward_step_func=partial(forward_step, loss=loss),
            data_iterator=prepared(),
            model=model,
            num_microbatches=microbatches,
            seq_length=32,
            micro_batch_size=1,
            decoder_seq_length=32,
            forward_only=forward_only,
        )
        return found

    reported, norms, last = [], [], parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    for number, steps in enumerate(ROLLOUTS):
        data = Rollout(steps, 10 * number + parallel_state.get_data_parallel_rank())
        model.eval()
        with torch.no_grad():
            found = [report["logprobs"] for report in call(data, values, len(data.microbatches), True)]
        row = from_last_rank(torch.cat(found, 1) if last else None)[0]
        data.before, data.place = [one[1:] for one in row.split([len(one) for one in data.tokens])], 0
        reported.append(row.tolist())
        model.train()
        tokens = torch.tensor(float(sum(len(one) - 1 for one in data.tokens)))
        torch.distributed.all_reduce(tokens, group=parallel_state.get_data_parallel_group())
        for calls in [steps] if in_parts else [[step] for step in steps]:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            saved = config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func
            if in_parts:
                config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = None, nullcontext, None
            share = torch.tensor(1.0) if in_parts else tokens
            for step in calls:
                with model.no_sync() if in_parts else nullcontext():
                    told = call(data, partial(policy, microbatches=len(step), tokens=share), len(step))
                reported.append(from_last_rank(told if last else None))
            config.grad_sync_func, config.no_sync_func, config.finalize_model_grads_func = saved
            if in_parts:
                model.scale_gradients(1 / float(tokens))
                if ddp.get("overlap_grad_reduce"):
                    model.start_grad_sync()
                config.finalize_model_grads_func([model], None)
            norms.append(float(optimizer.step()[1]))
    _check_ran(schedule, loop, pipeline, len(ROLLOUTS[-1][-1]))
    return Trained(reported, norms, _weights([model]))


def _check_ran(schedule: str, loop: Any, pipeline: int, microbatches: int) -> None:
    assert schedule == "stock" or loop.pipeline(pipeline).microbatches == microbatches, "another function has run"


OVERLAP = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5000}


def check(stock: list[Trained], ours: list[Trained], exact: bool) -> None:
    """Norms are sums of squares over other ranks, or buckets, where they are not exact."""
    assert [rank.reported for rank in ours] == [rank.reported for rank in stock]
    assert any(map(any, (rank.reported for rank in ours)))
    norms = [rank.norms for rank in stock]
    assert [rank.norms for rank in ours] == (norms if exact else [pytest.approx(row, rel=1e-6) for row in norms])
    assert min(map(min, norms)) > 1e-4
    assert not exact or [rank.weights for rank in ours] == [rank.weights for rank in stock]


@pytest.mark.parametrize(
    ("loop", "schedule", "pipeline", "how", "ddp"),
    [
        rest(as_slime, "zb-v", 4, False, {}),
        (as_slime, "zb-v", 2, True, OVERLAP),
        (as_nemo_rl, "zb-auto", 4, True, {}),
        rest(as_nemo_rl, "zb-h1", 2, False, OVERLAP),
        rest(as_nemo_rl, "zb-h1", 2, True, OVERLAP),
    ],
)
def test_trains_as_under_stock(pool: Pool, loop: Any, schedule: str, pipeline: int, how: bool, ddp: dict[str, Any]) -> None:
    """Losses by token or not in slime's loop, steps in parts or not in NeMo-RL's, with replicas and without."""
    stock, ours = pool.each(4, loop, ("stock", schedule), pipeline, how, **ddp)
    check(stock, ours, exact=schedule == "zb-auto")
