"""Megatron Bridge's model and calls under a schedule: a tiny model of transformers, on this rank's part of 4 ranks.

``bridge_loop.py ENGINE SCHEDULE,PIPELINE_RANKS,[WHAT] ..``. AutoBridge makes the provider, which builds the chunks and wraps
them in DDP. With ``lora``, ``dora`` and ``canonical`` Megatron Bridge's adapters are what trains. With ``weights`` those of a
checkpoint of transformers train: of a Llama; ``tied``, with its output layer tied to the embedding; ``experts``, of a
Qwen3-MoE. Exported before the first iteration, they must be what the checkpoint has. The function of megatron-core is taken
once, before the loop, and called as Megatron Bridge's ``train_step`` calls it. The folder ENGINE has Transformer Engine's own
Python, whose kernels are the stand-in's of the tests. What needs a GPU is replaced by ``patches/cpu.py`` and
``patches/training_cpu.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import borders
import torch

VOCABULARY, BATCH = 128, 2
STEPS = ((4, 32), (8, 24), (3, 40), (5, 32))  # microbatches, and the length of their sequences
LOADED = ("weights", "tied", "experts")
ON_A_V = ("zb-v", "v-half")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
FUSIONS = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope", "moe_permute")  # of Transformer Engine and apex


def build(schedule: str, ranks: int, trains: str) -> tuple[Any, Any, Any]:
    """The loop that is installed, the provider's chunks in DDP, and their optimizer."""
    from megatron.bridge import AutoBridge  # type: ignore[import-untyped]
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from safetensors.torch import load_file  # type: ignore[import-not-found]

    from megatron.pipeline import install

    loop = install(schedule)
    with tempfile.TemporaryDirectory() as folder:
        _theirs(trains).save_pretrained(folder)
        bridge = AutoBridge.from_hf_pretrained(folder)
        model = _chunks(bridge, schedule, ranks, trains)
        if trains in LOADED:
            bridge.load_hf_weights(model)
            exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
            _compare(exported, load_file(Path(folder) / "model.safetensors"))
    config = model[0].config
    config.finalize_model_grads_func = finalize_model_grads
    if model[0].ddp_config.overlap_grad_reduce:
        syncs = [(chunk.no_sync, chunk.start_grad_sync) for chunk in model]
        config.no_sync_func, config.grad_sync_func = (
            syncs[0] if len(syncs) == 1 else map(list, zip(*syncs, strict=True))  # as Megatron Bridge's setup does
        )
    gathers = model[0].ddp_config.overlap_param_gather
    options = OptimizerConfig(
        optimizer="adam", lr=1e-2, use_distributed_optimizer=True, overlap_param_gather=gathers, clip_grad=0.0
    )
    for chunk in model if gathers else ():  # in the first step, by Megatron Bridge's train
        chunk.disable_forward_pre_hook(param_sync=False)
    return loop, model, get_megatron_optimizer(options, model)


def _theirs(trains: str) -> Any:
    """The model of transformers, with random weights."""
    from transformers import (  # type: ignore[import-not-found]
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    torch.manual_seed(11)
    sizes = {**SIZES, "vocab_size": VOCABULARY, "tie_word_embeddings": trains == "tied"}
    if trains != "experts":
        return LlamaForCausalLM(LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, architectures=["Qwen3MoeForCausalLM"]))


def _chunks(bridge: Any, schedule: str, ranks: int, trains: str) -> list[Any]:
    """This rank's chunks in DDP, with weights that follow from the layer alone."""
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA  # type: ignore[import-untyped]
    from megatron.bridge.peft.dora import DoRA  # type: ignore[import-untyped]
    from megatron.bridge.peft.lora import LoRA  # type: ignore[import-untyped]
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    provider = bridge.to_megatron_provider(load_weights=False)
    provider.pipeline_model_parallel_size, provider.seq_length = ranks, STEPS[0][1]
    if schedule in ON_A_V:
        provider.virtual_pipeline_model_parallel_size = 2
    provider.pipeline_dtype = provider.params_dtype = torch.float32
    provider.use_cpu_initialization = True
    for name in (
        "bf16",
        "fp16",
        "moe_grouped_gemm",
        "moe_permute_fusion",
        "gradient_accumulation_fusion",
        *(f"{fusion}_fusion" for fusion in FUSIONS),
    ):
        setattr(provider, name, False)
    adapters = {"lora": LoRA, "dora": DoRA, "canonical": CanonicalLoRA}
    if trains in adapters:
        provider.register_pre_wrap_hook(adapters[trains](dim=4, alpha=4))
    provider.finalize()
    provider.initialize_model_parallel(seed=7)
    overlap = parallel_state.get_data_parallel_world_size() > 1
    # As its CommOverlapConfig has them.
    overlaps = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    overlaps |= {"align_param_gather": overlap and schedule in ON_A_V}
    provider.overlap_p2p_comm, provider.batch_p2p_comm = schedule in ON_A_V, schedule not in ON_A_V
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, **overlaps)
    model: list[Any] = provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=True, bf16=False, fp16=False)
    borders.draw(model)
    return model


def _compare(exported: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    differ = [name for name, weight in theirs.items() if name not in exported or not torch.equal(exported[name], weight)]
    if differ or exported.keys() != theirs.keys():
        raise ValueError(f"Error: {len(differ)} of {len(theirs)} weights have not come back equal, {differ[:3]} among them")


def forward_step(data: Any, model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(data)
    inputs = tokens[:, :-1]
    losses = model(inputs, torch.arange(inputs.shape[1]).expand(inputs.shape), None, labels=tokens[:, 1:])
    return losses, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean().clone()})


def main(row: borders.Row) -> None:
    """Train, and have the last rank of the first replica print the loss and the norm of every iteration."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection

    loop, model, optimizer = build(*row)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    function, communicator = get_forward_backward_func(), P2PCommunicator(groups.pp, model[0].config)
    found = []
    for iteration, (microbatches, length) in enumerate(STEPS):
        seed = 10 * parallel_state.get_data_parallel_rank() + iteration
        drawn = torch.randint(VOCABULARY, (microbatches, BATCH, length + 1), generator=torch.Generator().manual_seed(seed))
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reports = function(
            forward_step_func=forward_step,
            data_iterator=[iter(drawn) for _ in model] if len(model) > 1 else iter(drawn),
            model=model,
            num_microbatches=microbatches,
            seq_length=length,
            micro_batch_size=BATCH,
            decoder_seq_length=length,
            forward_only=False,
            adjust_tensor_shapes_fn=None,
            p2p_communicator=communicator,
            pg_collection=groups,
        )
        _, norm, _ = optimizer.step()
        if iteration == 0 and model[0].ddp_config.overlap_param_gather:
            gathers = [chunk.start_param_sync for chunk in model]
            model[0].config.param_sync_func = gathers if len(gathers) > 1 else gathers[0]
            for chunk in model:
                chunk.enable_forward_pre_hook()
        if parallel_state.is_pipeline_last_stage():
            found.append((float(torch.stack([report["lm loss"] for report in reports]).mean()), float(norm)))
    borders.report(loop, STEPS[-1][0], ", ".join(f"{count} x {length}" for count, length in STEPS), found)


if __name__ == "__main__":
    borders.train(borders.start(__doc__), main)
