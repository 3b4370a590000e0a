"""An own loop with another number of microbatches in every step: DDP, which learns in the first step when a bucket is complete,
reduces each bucket once, behind its last gradient."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from marked import rest
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from pool import Pool, RankFailed

from megatron.pipeline import install

LENGTH, BATCH, WIDTH = 2, 2, 8
STEPS, MOST = 12, 8


class Own:
    """A training loop on data that depend on the iteration and the data-parallel rank alone; one chunk is given as a module.

    Args:
        loop: how it sets megatron-core's configuration up. "megatron" as Megatron-LM does; "aligned" as it does with
            ``align_grad_reduce``; "bare" without ``no_sync_func``; "deferred" so, too, and every second step finalizes gradients
            itself, behind two calls.
        ddp: settings of DDP.
    """

    def __init__(self, pipeline: Any, loop: str = "bare", **ddp: Any) -> None:
        placement, rank = pipeline.placement, parallel_state.get_pipeline_model_parallel_rank()
        sizes = {"num_layers": placement.depth, "hidden_size": WIDTH, "num_attention_heads": 1}
        pipelined = {"pipeline_model_parallel_size": placement.ranks, "pipeline_dtype": torch.float32}
        self.config = config = TransformerConfig(**sizes, **pipelined, use_cpu_initialization=True)
        stages = [stage(config, number, placement.depth) for number in placement.stages[rank]]
        settings = DistributedDataParallelConfig(**ddp)
        self.chunks = [DistributedDataParallel(config, settings, one) for one in stages]
        names = ("use_distributed_optimizer", "overlap_param_gather")
        shards = {name: ddp.get(name, False) for name in names}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.5, **shards), self.chunks)
        self.loop, self.loss = loop, lambda output: (output.mean(), output.detach().mean())
        if settings.overlap_grad_reduce and loop in ("megatron", "aligned"):
            config.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
        if settings.overlap_grad_reduce and loop == "aligned":
            config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])

    def step(self, iteration: int, microbatches: int, forward_only: bool) -> tuple[list[float], float]:
        """Losses by microbatch, where they are known, and the norm of the gradients."""
        if forward_only:
            return self.call(iteration, microbatches, True), 0.0
        self.optimizer.zero_grad()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        deferred = self.loop == "deferred" and iteration % 2 == 1
        self.config.finalize_model_grads_func = None if deferred else finalize_model_grads
        losses = self.call(iteration, microbatches)
        if deferred:
            losses += self.call(iteration + STEPS * 2, 1 + iteration % 3)
            finalize_model_grads(self.chunks)
        return list(map(float, losses)), self.optimizer.step()[1]

    def call(self, iteration: int, microbatches: int, forward_only: bool = False) -> list[Any]:
        """What is reported."""
        generator = torch.Generator().manual_seed(1000 * iteration + parallel_state.get_data_parallel_rank())
        data = [torch.randn(LENGTH, BATCH, WIDTH, generator=generator) for _ in range(microbatches)]
        reported: list[Any] = get_forward_backward_func()(
            forward_step_func=lambda data, chunk: (chunk(next(data)), self.loss),
            data_iterator=_one_or_all([iter(data) for _ in self.chunks]),
            model=_one_or_all(self.chunks),
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )
        return reported

    def weights(self) -> dict[tuple[int, str], torch.Tensor]:
        for chunk in self.chunks if self.chunks[0].ddp_config.overlap_param_gather else ():
            chunk.start_param_sync(force_sync=True)
        return {(place, name): weight for place, chunk in enumerate(self.chunks) for name, weight in chunk.named_parameters()}


def _one_or_all(given: list[Any]) -> Any:
    return given if len(given) > 1 else given[0]


def stage(config: Any, number: int, depth: int) -> Any:
    """A norm, which B completes, and linears, which W does: one is for tokens above a threshold, of which there may be none."""

    class Stage(MegatronModule):
        model_type, pre_process, share_embeddings_and_output_weights = ModelType.encoder_or_decoder, False, False

        def __init__(self) -> None:
            super().__init__(config)
            options = {"config": config, "init_method": torch.nn.init.zeros_}
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.up, self.down, self.expert = (ColumnParallelLinear(WIDTH, WIDTH, **options) for _ in range(3))
            self.given: Any = None
            for place, weight in enumerate(self.parameters()):
                generator = torch.Generator().manual_seed(100 * number + place)
                weight.data.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)

        def set_input_tensor(self, tensors: Any) -> None:
            self.given = tensors[0] if isinstance(tensors, list) else tensors

        def forward(self, data: torch.Tensor) -> torch.Tensor:
            hidden = self.given if number else data
            hidden = hidden + self.down(torch.tanh(self.up(self.norm(hidden))[0]))[0]
            flat = hidden.reshape(-1, WIDTH)
            chosen = (flat[:, 0] > 1.0).nonzero()[:, 0]
            hidden = flat.index_add(0, chosen, self.expert(flat[chosen])[0]).view(hidden.shape)
            return hidden if number < depth - 1 else (hidden - data.roll(1, 2)).pow(2)

    return Stage()


def start(schedule: str, pp: int) -> Any:
    """The pipeline, in megatron-core's place; the rest of the world is data parallel."""
    pipeline = install(schedule).pipeline(pp)
    chunks = pipeline.placement.chunks
    parallel_state.initialize_model_parallel(1, pp, chunks if chunks > 1 else None)
    return pipeline


def numbers(first: int) -> Iterator[tuple[int, bool]]:
    """Numbers of microbatches, and whether a call is forwards alone: before the first step and in between, of other numbers."""
    draw = random.Random(first)
    for step in range(STEPS):
        if step % 5 == 0:
            yield draw.randint(1, MOST), True
        yield draw.randint(1, MOST) if step else first, False


def beside(schedule: str, pp: int, first: int, loop: str, **ddp: Any) -> int:
    """Checks on this rank that losses, norms and weights are those without overlap; returns how many losses were compared."""
    pipeline = start(schedule, pp)
    plain = {"use_distributed_optimizer": ddp.get("use_distributed_optimizer", False)}
    runs, compared = [Own(pipeline, loop, **settings) for settings in (ddp, plain)], 0
    for iteration, (microbatches, forward_only) in enumerate(numbers(first)):
        (losses, norm), expected = (run.step(iteration, microbatches, forward_only) for run in runs)
        assert (losses, norm) == expected, f"{iteration}: {microbatches} microbatches: {losses, norm}, and not {expected}"
        compared += len(losses)
    found, weights = (run.weights() for run in runs)
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name
    return compared


BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 100}
BOTH = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("schedule", "loop", "both"),
    [
        ("zb-v", "bare", True),
        rest("zb-h1", "megatron", True),
        rest("zb-v", "megatron", False),
        rest("zb-h1", "bare", False),
        rest("v-half", "aligned", False),
        rest("v-half", "deferred", True),
    ],
)
def test_equals_the_run_without_overlap(pool: Pool, schedule: str, loop: str, both: bool) -> None:
    first = MOST if both else 1
    assert any(pool.run(4, beside, schedule, 2, first, loop, timeout=300, **(BOTH if both else BUCKETS)))


@pytest.mark.parametrize(("schedule", "ranks"), [rest("zb-v", 8), ("zb-h1", 4)])
def test_four_pipeline_ranks(pool: Pool, schedule: str, ranks: int) -> None:
    assert any(pool.run(ranks, beside, schedule, 4, 3, "bare", timeout=300, **BOTH))


@pytest.mark.rest
def test_megatron_core_alone_reduces_early_where_a_loop_gives_no_function(pool: Pool) -> None:
    """The public bug of frameworks, which is no matter of schedules."""
    with pytest.raises(
        RankFailed, match=r"\d+ microbatches: .*, and not |Communication call has not been issued for this bucket"
    ):
        pool.run(4, beside, "stock", 2, 2, "bare", timeout=300, **BUCKETS)
    assert any(pool.run(4, beside, "stock", 2, 2, "megatron", timeout=300, **BUCKETS))


def kept_by_reports(schedule: str) -> int:
    """The most microbatches of which a report with its graph would keep what no backward frees."""
    own, made, most = Own(start(schedule, 2)), [], [0]

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, Any]:
        inner = output.exp()
        made.append(weakref.ref(inner))
        most.append(sum(one() is not None for one in made))
        return output.mean(), {"beside": (inner.sin().sum(), "text")}

    own.loss = loss
    for forward_only in (True, False):
        reported = own.call(0, 8, forward_only)
        assert all(one["beside"][1] == "text" and not one["beside"][0].requires_grad for one in reported)
    return max(most)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_reports_keep_no_graphs(pool: Pool, schedule: str) -> None:
    assert sorted(pool.run(2, kept_by_reports, schedule)) == [0, 1]
