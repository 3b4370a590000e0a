"""Steps ahead in a loop of one's own: that of docs/post_validation.md, against a loop without them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import tiny_gpt
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from optimizer.injected_runs import _digest
from pool import Pool

from megatron.pipeline.flags.config import parameter_scheduler
from megatron.pipeline.runtime.optimizer.post_validation import PostValidation
from megatron.pipeline.runtime.optimizer.step_ahead import parts_of

PAGE = Path(__file__).parents[2] / "docs" / "post_validation.md"
ITERATIONS, INTERVAL = 10, 4


def train(schedule: str, flags: tuple[str, ...], ahead: bool) -> tuple[list[Any], list[Any], list[str]]:
    """Losses and norms, what evaluations saw of parameters and optimizer state, and how steps were taken."""
    run = tiny_gpt.Run(schedule, pp=4, flags=("--num-layers", "8", "--lr-warmup-iters", "6", *flags), measure=False)
    scheduler = parameter_scheduler(run.args, run.optimizer)

    def tokens() -> Iterator[torch.Tensor]:
        for iteration in range(ITERATIONS):
            yield from run._tokens(iteration)

    call = {
        "forward_step_func": tiny_gpt.forward_step,
        "data_iterator": [tokens() for _ in run.chunks],
        "model": run.chunks,
        "num_microbatches": run.microbatches,
        "seq_length": run.args.seq_length,
        "micro_batch_size": run.args.micro_batch_size,
        "forward_only": False,
    }
    told: list[Any] = []
    seen: list[Any] = []
    how: list[str] = []

    def log(losses: list[Any], norm: float | None) -> None:
        told.append(([total.item() for total, _ in losses], norm))

    def evaluate() -> None:
        seen.append([_digest(parameter) for chunk in run.chunks for parameter in chunk.parameters()])
        for part in parts_of(run.optimizer):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    state = part.optimizer.state[parameter]
                    seen[-1] += [_digest(parameter), *(_digest(state[name]) for name in sorted(state))]
        seen[-1].append(repr(scheduler.state_dict()))

    class Steps(PostValidation):
        def step(self, *given: Any, **options: Any) -> Any:
            step = super().step(*given, **options)
            how.append(step.how)
            return step

    if ahead:
        names: dict[str, Any] = {}
        exec(PAGE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0], names)
        names["PostValidation"] = partial(Steps, when="always")
        names["train"](run.pipeline, call, run.chunks, run.optimizer, scheduler, log, evaluate, ITERATIONS, INTERVAL)
        return told, seen, how
    for iteration in range(1, ITERATIONS + 1):
        for chunk in run.chunks:
            chunk.zero_grad_buffer()
        run.optimizer.zero_grad()
        losses = get_forward_backward_func()(**call)
        successful, norm, _ = run.optimizer.step()
        if successful:
            scheduler.step(increment=1)
        log(losses, norm)
        if iteration % INTERVAL == 0 or iteration == ITERATIONS:
            evaluate()
    return told, seen, how


FP16 = "--clip-grad 5 --fp16 --initial-loss-scale 4194304 --hysteresis 1 --loss-scale-window 2"


def test_the_loop_of_the_page(pool: Pool) -> None:
    schedule, flags = "zb-v", FP16
    plain = pool.run(4, train, schedule, tuple(flags.split()), False)
    ahead = pool.run(4, train, schedule, tuple(flags.split()), True)
    for (told, seen, how), (expected, same, _) in zip(ahead, plain, strict=True):
        assert (told, seen) == (expected, same) and len(seen) == 3
        assert how.count("ahead") > 1 and how.count("undone") > 1 and how.count("synchronous") == 3
