"""A model that is no GPT costs one adapter: everything that knows ``Stack`` is in this file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from pool import Pool

LAYERS, HIDDEN, LENGTH, BATCH, MICROBATCHES, ITERATIONS, SEED = 4, 8, 6, 2, 4, 2, 7


class StackAdapter:
    """Residual layers between a scale of the inputs and the same scale of the outputs: first and last stage share it."""

    by_token = ("inputs", "labels")
    whole = ()
    positions = ()
    attention = ()

    @property
    def called_as(self) -> Any:
        return stack()

    def build(self, args: Namespace, config: Any, stage: Any) -> torch.nn.Module:
        from megatron.core import parallel_state
        from megatron.core.transformer.enums import LayerType

        rank, layout = parallel_state.get_pipeline_model_parallel_rank(), config.pipeline_model_parallel_layout
        first = layout.get_layer_offset(vp_stage=stage.vp_stage)
        count = layout.layout[rank][stage.vp_stage or 0].count(LayerType.decoder)
        model: torch.nn.Module = stack()(config, range(first, first + count), stage)
        return model

    def layers(self, args: Namespace, numbers: Sequence[int]) -> list[list[Any]]:
        from megatron.core.transformer.enums import LayerType

        rows = [[LayerType.decoder] * number for number in numbers]
        rows[0].insert(0, LayerType.embedding)
        rows[-1].append(LayerType.loss)
        return rows

    def last_stage_in_layers(self, args: Namespace) -> float:
        return 0.0

    def shared_weight(self, model: Any) -> torch.nn.Parameter | None:
        weight: torch.nn.Parameter | None = model.scale
        return weight

    def extra_uses(self, model: Any) -> dict[torch.nn.Parameter, int]:
        return {}

    def remove_vocabulary(self, args: Namespace, model: Any, stage: Any, embedding: torch.nn.Module) -> None:
        raise ValueError("a stack has no vocabulary")


def stack() -> Any:
    """The class, once ``patches.install`` has run."""
    from megatron.core.enums import ModelType
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.module import MegatronModule

    from megatron.pipeline.model import seeding

    class Stack(MegatronModule):
        pipeline_adapter = StackAdapter()
        model_type = ModelType.encoder_or_decoder

        def __init__(self, config: Any, layers: Sequence[int], stage: Any) -> None:
            super().__init__(config)
            self.vp_stage, self.pre_process, self.post_process = stage.vp_stage, stage.first, stage.last
            scale = torch.linspace(0.5, 1.5, HIDDEN) if stage.first else torch.zeros(HIDDEN)
            self.scale: Any = torch.nn.Parameter(scale) if stage.first or stage.last else None
            self.linears, self.numbers = torch.nn.ModuleList(), list(layers)
            for layer in layers:
                seeding.seed_layer(SEED, layer + 1)
                self.linears.append(ColumnParallelLinear(HIDDEN, HIDDEN, config=config, init_method=config.init_method))
            self.received: torch.Tensor | None = None

        def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
            self.received = tensors[0]

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            """[batch, sequence, hidden] each; [sequence, batch, hidden] between stages; losses [batch, sequence]."""
            hidden: Any = inputs.transpose(0, 1) * self.scale if self.pre_process else self.received
            for linear in self.linears:
                hidden = hidden + torch.tanh(linear(hidden)[0])
            if self.post_process:
                hidden = (hidden * self.scale - labels.transpose(0, 1)).square().sum(-1).transpose(0, 1)
            result: torch.Tensor = hidden
            return result

    return Stack


def batches(iteration: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(iteration)
    return [torch.randn(2, BATCH, LENGTH, HIDDEN, generator=generator).unbind() for _ in range(MICROBATCHES)]  # type: ignore[misc]


def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = output.mean()
    return total, total.detach().clone()


def forward_step(data: Iterator[Any], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    inputs, labels = next(data)
    return model(inputs, labels), partial(loss)


def train(schedule: str) -> tuple[list[float], dict[str, list[float]]]:
    """Losses where they are known, and this rank's weights by layer, after gradient descent."""
    from megatron.pipeline import patches

    patches.install()
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig
    from megatron.pipeline.patches import schedules

    from megatron.pipeline.flags.settings import Settings
    from megatron.pipeline.model.build import build_model
    from megatron.pipeline.model.layout import PlacementLayout, stage_layers
    from megatron.pipeline.planner.planning import Request
    from megatron.pipeline.runtime.pipeline import Pipeline

    ranks = torch.distributed.get_world_size()
    pipeline = Pipeline(Request(schedule, ranks, MICROBATCHES))
    schedules.restore()
    placement, adapter = pipeline.placement, StackAdapter()
    virtual = placement.chunks if placement.chunks > 1 else None
    parallel_state.initialize_model_parallel(1, ranks, virtual)
    args = Settings.of(Namespace(
        num_layers=LAYERS, pipeline_model_parallel_layout=None, decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None, account_for_embedding_in_pipeline_split=False, ddp_bucket_size=None,
        account_for_loss_in_pipeline_split=False, layer_redistribution=False, mtp_num_layers=None, seed=SEED,
        pipeline_schedule=schedule, transformer_impl="local", recompute_fused_backward=False,
        accumulate_allreduce_grads_in_fp32=True, overlap_grad_reduce=False, overlap_param_gather=False,
        use_distributed_optimizer=False, check_for_nan_in_loss_and_grad=False,
    ))  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=1, use_cpu_initialization=True,
        pipeline_model_parallel_size=ranks, virtual_pipeline_model_parallel_size=virtual, pipeline_dtype=torch.float32,
        pipeline_model_parallel_layout=PlacementLayout(stage_layers(args, placement, adapter), placement),
        gradient_accumulation_fusion=False,
    )  # fmt: skip
    chunks: list[Any] = list(build_model(args, config, placement, adapter))
    pipeline.install()
    losses: list[float] = []
    for iteration in range(ITERATIONS):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        reported = pipeline.forward_backward(
            forward_step_func=forward_step,
            data_iterator=[iter(batches(iteration)) for _ in chunks],
            model=chunks,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
        )
        losses += [float(value) for value in reported]
        with torch.no_grad():
            for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
                parameter.sub_(0.1 * parameter.main_grad)
    weights = {
        f"{number}": linear.weight.flatten().tolist()
        for chunk in chunks
        for number, linear in zip(chunk.module.numbers, chunk.module.linears, strict=True)
    }
    scales = [chunk.module.scale for chunk in chunks]
    return losses, weights | {f"scale {index}": scale.tolist() for index, scale in enumerate(scales) if scale is not None}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> tuple[list[float], dict[str, list[float]]]:
    """One rank with the whole model, as torch's own autograd differentiates it in a pass BW."""
    result: tuple[list[float], dict[str, list[float]]] = pool.run(1, train, "1f1b")[0]
    return result


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "v-half", "seq-1f1b"])
def test_another_model_trains_under_any_placement(schedule: str, pool: Pool, alone: Any) -> None:
    expected_losses, expected = alone
    results = pool.run(2, train, schedule)
    assert pytest.approx(expected_losses) == [loss for losses, _ in results for loss in losses]
    merged = {number: values for _, weights in results for number, values in weights.items()}
    for number in range(LAYERS):
        assert merged[f"{number}"] == pytest.approx(expected[f"{number}"], rel=1e-6, abs=1e-7)
    copies = [values for _, weights in results for name, values in weights.items() if name.startswith("scale")]
    assert len(copies) == 2 and all(values == pytest.approx(expected["scale 0"]) for values in copies)


def without_adapter() -> str:
    from megatron.pipeline.model.adapter import adapter_of

    with pytest.raises(ValueError, match="pipeline_adapter") as error:
        adapter_of(torch.nn.Linear(1, 1))
    return str(error.value)


def test_a_model_without_an_adapter_is_refused(pool: Pool) -> None:
    assert "Linear is no GPTModel or HybridModel: give it an attribute pipeline_adapter" in pool.run(1, without_adapter)[0]
