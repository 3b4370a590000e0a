"""Trains a tiny GPT on random tokens, straight on megatron-core: what the numerics tests compare schedules with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.pipeline.patches import schedules

from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.validation import validate
from megatron.pipeline.model import seeding
from megatron.pipeline.session.groups import initialize_model_parallel
from megatron.pipeline.session.planning import as_planned, plan_pipeline
from megatron.pipeline.trainer.data import cut_for_context_parallelism
from megatron.pipeline.trainer.state import build_training

Step = tuple[float | None, float]  # loss on the rank that has it, and the gradient norm


def train(
    schedule: str,
    *,
    pp: int = 1,
    tp: int = 1,
    cp: int = 1,
    microbatches: int = 4,
    iterations: int = 20,
    flags: tuple[str, ...] = (),
    inspect: Any = None,
) -> Any:
    """Losses and gradient norms of a few iterations on this rank; the rest of the world is data parallel.

    Args:
        flags: of ``pretrain_gpt.py``, added to a tiny model's.
        inspect: called with (pipeline, chunks) after the last iteration; its result is returned instead.
    """
    run = Run(schedule, pp=pp, tp=tp, cp=cp, microbatches=microbatches, flags=flags)
    steps = [run.step(iteration) for iteration in range(iterations)]
    return inspect(run.pipeline, run.chunks) if inspect else steps


class Run:
    """A model, its optimizer and its pipeline, ready to step."""

    def __init__(
        self,
        schedule: str,
        *,
        pp: int,
        tp: int = 1,
        cp: int = 1,
        microbatches: int = 4,
        flags: tuple[str, ...] = (),
        measure: bool = True,
    ) -> None:
        world = torch.distributed.get_world_size()
        dp = world // (pp * tp * cp)
        args = parse(
            [
                *"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1e-2 --seed 7".split(),
                *"--attention-dropout 0 --hidden-dropout 0 --clip-grad 1.0 --train-iters 20".split(),
                *"--mock-data --tokenizer-type NullTokenizer --vocab-size 64".split(),
                *f"--micro-batch-size 2 --global-batch-size {2 * microbatches * dp}".split(),
                *f"--pipeline-model-parallel-size {pp} --tensor-model-parallel-size {tp}".split(),
                *f"--context-parallel-size {cp}".split(),
                *("--pipeline-schedule", schedule),
                *flags,
            ]
        )
        settings = validate(args, world) | {"padded_vocab_size": 64}
        self.microbatches = microbatches
        self.pipeline = plan_pipeline(settings, measure=measure)
        self.args = args = as_planned(settings, self.pipeline)
        schedules.restore()
        initialize_model_parallel(args, self.pipeline.placement)
        training = build_training(args, self.pipeline.placement)
        self.config, self.chunks, self.optimizer = training.config, training.chunks, training.optimizer
        self.pipeline.install()

    def step(self, iteration: int, forward_only: bool = False, **options: Any) -> Step:
        """One training (or evaluation) step on tokens that depend on the iteration and the data-parallel rank alone."""
        seeding.set_iteration(self.chunks, iteration)
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
        with torch.no_grad() if forward_only else torch.enable_grad():
            losses = self.forward_backward(iteration, forward_only, **options)
        loss = torch.stack([total for total, _ in losses]).sum().item() if losses else None
        if forward_only:
            return loss, 0.0
        _, norm, _ = self.optimizer.step()
        return loss, norm

    def forward_backward(self, iteration: int, forward_only: bool = False, **options: Any) -> list[Any]:
        """megatron-core's own call, whoever answers it."""
        iterators = [self._tokens(iteration) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
            **options,
        )

    def _tokens(self, iteration: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * iteration + parallel_state.get_data_parallel_rank())
        device = "cuda" if torch.cuda.is_available() else "cpu"
        for _ in range(self.microbatches):
            yield torch.randint(0, 60, (self.args.micro_batch_size, self.args.seq_length + 1), generator=generator).to(device)


def forward_step(
    data_iterator: Iterator[torch.Tensor], model: Any, return_schedule_plan: bool = False
) -> tuple[torch.Tensor, Any]:
    """What Megatron-LM's pretrain_gpt.py does, on tokens without a mask."""
    tokens = next(data_iterator)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    mask = torch.ones(1, 1, inputs.shape[1], inputs.shape[1], dtype=torch.bool, device=inputs.device).triu(1)
    batch = cut_for_context_parallelism({"tokens": inputs, "labels": labels, "position_ids": positions, "attention_mask": mask})
    forward = model.build_schedule_plan if return_schedule_plan else model
    return forward(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]), partial(loss)


def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The three values of Megatron's loss functions: sum, number of tokens, what is reported."""
    total, count = output.float().sum(), torch.full((), output.numel(), dtype=torch.int, device=output.device)
    return total, count, (total.detach().clone(), count)
