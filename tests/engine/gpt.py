"""A GPT whose linears and norms are Transformer Engine's, trained under a schedule on a CPU."""

from __future__ import annotations

import hashlib
import re
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import tiny_gpt
import torch

from megatron.pipeline.planner.schedule.core.costs import Costs
from megatron.pipeline.planner.schedule.core.names import STOCK


class Weights(NamedTuple):
    """Megatron-LM's flags of weights that are kept and gathered in FP8.

    Attributes:
        recipe: --fp8-recipe.
        gathered: --fp8-param-gather; without it linears round weights of 16 bits in every forward.
        reused: --reuse-grad-buf-for-mxfp8-param-ag.
    """

    recipe: str
    gathered: bool = True
    reused: bool = False


def train(
    schedule: str, flags: str, tp: int = 1, pp: int = 2, fp8: Weights | None = None
) -> tuple[list[tiny_gpt.Step], dict[str, str]]:
    """Losses and gradient norms of three iterations, and digests of all weights behind them, by their names."""
    # Measured, activations are counted, and hooks hide weights up to 2.14: DDP then fails under megatron-core's own schedule.
    run = _built(schedule, flags, tp, pp, fp8, measure=schedule != STOCK and not fp8)
    return [_step(run, iteration) for iteration in range(3)], _digests(run)


def profile(flags: str, fp8: Weights) -> tuple[Costs, Costs]:
    """Costs of a profile, and the formulas', from which their bytes are."""
    from megatron.pipeline.runtime.profiling import ITERATIONS, profiled
    from megatron.pipeline.session.memory import uncounted_sizes

    run = _built("zb-h1", flags, 1, 2, fp8, measure=True)
    sizes = uncounted_sizes(run.args, run.pipeline)
    assert sizes is not None
    steps = profiled(run.pipeline, sizes)
    next(steps)
    try:
        for iteration in range(ITERATIONS):
            run.step(iteration)
            report = run.pipeline.report()
            assert report is not None
            steps.send(report)
    except StopIteration as end:
        return end.value.costs, sizes
    raise AssertionError("a profile ends")


def _built(schedule: str, flags: str, tp: int, pp: int, fp8: Weights | None, measure: bool) -> tiny_gpt.Run:
    """``--transformer-impl transformer_engine`` asks for a GPU: it is set once flags are read, which grouped experts of other
    layers do not pass, and so is FP8, which has no flag here. Attention is megatron-core's. Linears add their products to
    ``main_grad``.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from megatron.pipeline.flags import validation
    from megatron.pipeline.flags.settings import Settings
    from megatron.pipeline.model import build, layer_spec, te_linear
    from megatron.pipeline.trainer import state

    validate, replacements, ddp_config = tiny_gpt.validate, layer_spec._replacements, build._ddp_config
    configured = state.transformer_config

    def validated(args: Namespace, world: int) -> Settings:
        quantized = {"fp8": "hybrid", "fp8_recipe": fp8.recipe, "fp8_param": fp8.gathered} if fp8 else {}
        reused = {"reuse_grad_buf_for_mxfp8_param_ag": bool(fp8 and fp8.reused)}
        return validate(args, world) | {"transformer_impl": "transformer_engine"} | quantized | reused

    def replaced(config: object) -> dict[type, type]:
        return replacements(config) | {TEDotProductAttention: DotProductAttention}  # type: ignore[arg-type]

    def of_ddp(args: Namespace) -> Any:
        of_fp8 = {"fp8_param_gather": fp8.gathered, "reuse_grad_buf_for_mxfp8_param_ag": fp8.reused} if fp8 else {}
        return replace(ddp_config(args), **of_fp8)

    def as_on_a_gpu(*args: Any) -> Any:
        config = configured(*args)
        # Or else Transformer Engine keeps, as what the optimizer starts from, numbers that are not set.
        config.use_cpu_initialization = not fp8
        return config

    with ExitStack() as patched:
        patched.enter_context(patch.object(state, "transformer_config", as_on_a_gpu))
        patched.enter_context(patch.object(tiny_gpt, "validate", validated))
        patched.enter_context(patch.object(validation, "check_grouped_experts", lambda _: None))
        patched.enter_context(patch.object(layer_spec, "_replacements", replaced))
        patched.enter_context(patch.object(build, "_ddp_config", of_ddp))
        run = tiny_gpt.Run(schedule, pp=pp, tp=tp, flags=tuple(flags.split()), measure=measure)
    linears = [module for chunk in run.chunks for module in chunk.modules() if te_linear.is_engines(module)]
    assert linears
    for linear in linears:  # as a schedule that splits them does; under megatron-core's own it takes apex
        linear.fuse_wgrad_accumulation = True  # type: ignore[assignment]
    return run


def _step(run: tiny_gpt.Run, iteration: int) -> tiny_gpt.Step:
    """As Megatron-LM's loop has it: weights are not gathered in the first iteration, and are where gradients will be."""
    if not run.args.overlap_param_gather:
        return run.step(iteration)
    if iteration == 0:
        for chunk in run.chunks:
            chunk.disable_forward_pre_hook(param_sync=False)
        result = run.step(iteration)
        for chunk in run.chunks:
            chunk.enable_forward_pre_hook()
        return result
    zero_grad = run.optimizer.zero_grad

    def and_place_weights() -> None:
        zero_grad()
        for optimizer in run.optimizer.chained_optimizers if run.args.reuse_grad_buf_for_mxfp8_param_ag else ():
            optimizer._copy_main_params_to_param_buffer()

    with patch.object(run.optimizer, "zero_grad", and_place_weights):
        return run.step(iteration)


def _digests(run: tiny_gpt.Run) -> dict[str, str]:
    """Of the optimizer's weights, which its data-parallel replicas share, and unless they are gathered later of the model's."""
    from engine.quantized import matrix_of
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    found: dict[str, torch.Tensor] = {}
    dense, experts = parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group()
    for chunk in unwrap_model(run.chunks):
        layers = [f"layer {layer.layer_number}." for layer in chunk.decoder.layers]
        for local, parameter in chunk.named_parameters():
            name = re.sub(r"layers\.(\d+)\.", lambda match, of=layers: of[int(match[1])], local)  # type: ignore[misc]
            if not run.args.overlap_param_gather:
                found[f"forward's {name}"] = matrix_of(parameter.detach())
            group = dense if getattr(parameter, "allreduce", True) else experts
            parts: list[Any] = [None] * group.size()
            torch.distributed.all_gather_object(parts, getattr(parameter, "main_param", None), group)
            if whole := [part.detach().flatten() for part in parts if part is not None]:
                found[name] = torch.cat(whole)
    return {name: hashlib.sha256(weight.numpy().tobytes()).hexdigest() for name, weight in found.items()}


def bytes_kept_by_w(tp: int) -> set[int]:
    """What waits for each W of four layers, each memory once."""
    from megatron.pipeline.model.te_linear import DelayedGradient
    from megatron.pipeline.runtime import stage_passes

    found, run_weights = set[int](), stage_passes.run_weights

    def noted(tasks: list[Any]) -> None:
        held = [tensor.untyped_storage() for task, _ in tasks if isinstance(task, DelayedGradient) for tensor in task.held]
        found.add(sum({storage.data_ptr(): storage.nbytes() for storage in held}.values()))
        run_weights(tasks)

    with patch.object(stage_passes, "run_weights", noted):
        train("zb-h1", f"--bf16 {'--sequence-parallel' if tp > 1 else ''}", tp, pp=1)
    return found
