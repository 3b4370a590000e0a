"""Megatron Bridge's model and calls under a schedule: a tiny Llama of transformers, on this rank's part of 4 ranks.

``bridge_loop.py SCHEDULE PIPELINE_RANKS ENGINE [lora]``. AutoBridge makes the provider, which builds the chunks and wraps them in
DDP; with ``lora`` Megatron Bridge's adapters are what trains. The function of megatron-core is taken once, before the loop, and
called as Megatron Bridge's ``train_step`` calls it. The folder ENGINE has Transformer Engine's own Python, whose kernels are the
stand-in's of the tests. What needs a GPU is replaced by ``patches/cpu.py`` and ``patches/training_cpu.py``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from engine import stand_in

LENGTH, VOCABULARY, BATCH = 32, 128, 2
MICROBATCHES = (4, 8, 3, 5)  # of each iteration
ON_A_V = ("zb-v", "v-half")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
FUSIONS = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope")  # of Transformer Engine and apex


def build(schedule: str, ranks: int, adapters: bool) -> tuple[Any, Any, Any]:
    """The loop that is installed, the provider's chunks in DDP, and their optimizer."""
    from megatron.bridge import AutoBridge  # type: ignore[import-untyped]
    from megatron.bridge.peft.lora import LoRA  # type: ignore[import-untyped]
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import unwrap_model
    from transformers import LlamaConfig  # type: ignore[import-not-found]

    from megatron.pipeline import install

    loop = install(schedule)
    llama = LlamaConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    provider = AutoBridge.from_hf_config(llama).to_megatron_provider(load_weights=False)
    provider.pipeline_model_parallel_size, provider.seq_length = ranks, LENGTH
    if schedule in ON_A_V:
        provider.virtual_pipeline_model_parallel_size = 2
    provider.pipeline_dtype = provider.params_dtype = torch.float32
    provider.use_cpu_initialization = True
    for name in ("bf16", "fp16", "gradient_accumulation_fusion", *(f"{fusion}_fusion" for fusion in FUSIONS)):
        setattr(provider, name, False)
    if adapters:
        provider.register_pre_wrap_hook(LoRA(dim=4, alpha=4))
    provider.finalize()
    provider.initialize_model_parallel(seed=7)
    overlap = parallel_state.get_data_parallel_world_size() > 1
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=overlap)
    model = provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=True, bf16=False, fp16=False)
    for chunk in map(unwrap_model, model):
        _draw({layer.layer_number: layer for layer in chunk.decoder.layers})
        _draw({0: getattr(chunk, "embedding", None), SIZES["num_hidden_layers"] + 1: getattr(chunk, "output_layer", None)})
    config = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        syncs = [(chunk.no_sync, chunk.start_grad_sync) for chunk in model]
        config.no_sync_func, config.grad_sync_func = (
            syncs[0] if len(syncs) == 1 else map(list, zip(*syncs, strict=True))  # as Megatron Bridge's setup does
        )
    options = OptimizerConfig(optimizer="adam", lr=1e-2, use_distributed_optimizer=True, clip_grad=0.0)
    return loop, model, get_megatron_optimizer(options, model)


def _draw(parts: dict[int, Any]) -> None:
    """Draw the weights of layers by their numbers, wherever they are."""
    for number, part in parts.items():
        weights = [weight for weight in part.parameters() if weight.dim() > 1] if part is not None else []
        for place, weight in enumerate(weights):
            weight.data.normal_(std=0.05, generator=torch.Generator().manual_seed(100 * number + place))


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean().clone()})


def main(schedule: str, ranks: int, adapters: bool) -> None:
    """Train, and have the last rank of the first replica print the loss and the norm of every iteration."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    loop, model, optimizer = build(schedule, ranks, adapters)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    function, communicator = get_forward_backward_func(), P2PCommunicator(groups.pp, model[0].config)
    found = []
    for iteration, microbatches in enumerate(MICROBATCHES):
        seed = 10 * parallel_state.get_data_parallel_rank() + iteration
        drawn = torch.randint(VOCABULARY, (microbatches, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = function(
            forward_step_func=forward_step,
            data_iterator=[iter(drawn) for _ in model] if len(model) > 1 else iter(drawn),
            model=model,
            num_microbatches=microbatches,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            decoder_seq_length=LENGTH,
            forward_only=False,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        _, norm, _ = optimizer.step()
        if parallel_state.is_pipeline_last_stage():
            found.append((float(torch.stack([report["lm loss"] for report in reports]).mean()), float(norm)))
    assert schedule == "stock" or loop.pipeline(ranks).microbatches == MICROBATCHES[-1], "another function has run"
    if found and parallel_state.get_data_parallel_rank() == 0:
        print(f"found {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    stand_in.load(Path(sys.argv[3]))  # before megatron-core looks for it
    from megatron.pipeline.patches import training_cpu

    from megatron.pipeline import patches

    patches.install()
    training_cpu.install()  # Megatron Bridge takes functions of megatron.training
    stand_in.see_the_cpu()
    torch.distributed.init_process_group("gloo")
    main(sys.argv[1], int(sys.argv[2]), "lora" in sys.argv)
