"""verl's actor update under a schedule: a tiny Llama of transformers, on this rank's part of 4 ranks.

``verl_loop.py ENGINE SCHEDULE,PIPELINE_RANKS,[lengths] ..``. In every step verl's worker, over its Megatron engine, computes
log-probabilities and trains on them in one or more mini-batches with verl's own loss of PPO, in float32, on packed sequences of
various lengths, one a microbatch: with virtual stages verl makes the number of microbatches a multiple of the ranks. The first
log-probabilities are computed with two sequences per microbatch, too: of responses they must be the same. Behind the end of a
sequence verl computes that of the next one's first token, which is not used. Ray and what serves models are absent.
"""

from __future__ import annotations

import importlib
import tempfile
from functools import partial
from types import SimpleNamespace
from typing import Any

import borders
import torch

VOCABULARY = 128
SAMPLES, MINI = (8, 24), 8  # of each step and replica, and of what trains at once
ON_A_V = ("zb-v", "v-half")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(row: borders.Row) -> tuple[Any, Any]:
    """The loop that is installed, and verl's engine."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        ActorConfig,
        HFModelConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    importlib.import_module("verl.models.mcore.bridge")  # takes Megatron Bridge's modules
    importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    borders.see_the_cpu("verl", "megatron.bridge")
    borders.attend_in_torch()
    loop = borders.install(row)
    torch.manual_seed(11)
    llama = LlamaConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(llama).save_pretrained(folder)
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope")  # of Transformer Engine and apex
    settings = {f"{fusion}_fusion": False for fusion in fusions}
    settings |= {"gradient_accumulation_fusion": False, "use_cpu_initialization": True}
    schedule, ranks = row.schedule, row.ranks
    overlaps = ranks < torch.distributed.get_world_size() and schedule not in ON_A_V  # verl refuses them of several chunks
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=2 if schedule in ON_A_V else None,
        override_transformer_config=settings,
        override_ddp_config=dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "align_param_gather"), overlaps),
    )
    object.__setattr__(engine, "dtype", "float32")  # it refuses what is compared bit for bit
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "eager"})
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    gathers = {"overlap_param_gather": overlaps}
    optimizer = McoreOptimizerConfig(lr=1e-2, clip_grad=0.0, total_training_steps=len(SAMPLES), override_optimizer_config=gathers)
    parts = {"model_config": model, "engine_config": engine, "optimizer_config": optimizer}
    worker = TrainingWorker(TrainingWorkerConfig(model_type="language_model", checkpoint_config=CheckpointConfig(), **parts))
    worker.reset()
    worker.flops_counter = None  # it knows the speed of GPUs
    actor = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01)
    worker.set_loss_fn(partial(ppo_loss, actor))
    return loop, worker


def samples(count: int, seed: int) -> Any:
    """Prompts and responses, as verl's workers have them without padding."""
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 20, (count,), generator=generator).tolist()
    responses = [length // 2 for length in lengths]

    def nested(sizes: list[int], draw: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([draw(size) for size in sizes], layout=torch.jagged)

    prompts = [whole - response for whole, response in zip(lengths, responses, strict=True)]
    drawn = {
        "input_ids": nested(lengths, lambda size: torch.randint(VOCABULARY, (size,), generator=generator)),
        "position_ids": nested(lengths, torch.arange),
        "prompts": nested(prompts, torch.zeros),
        "responses": nested(responses, torch.zeros),
        "response_mask": nested(responses, lambda size: torch.ones(size, dtype=torch.long)),
        "loss_mask": nested(responses, lambda size: torch.ones(size, dtype=torch.long)),
        "advantages": nested(responses, lambda size: torch.randn(size, generator=generator)),
        "temperature": torch.full((count,), 0.9),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "global_batch_size": None, "calculate_entropy": True}
    return tensordict_utils.get_tensordict(drawn, settings)


def main(row: borders.Row) -> None:
    """Train, and have the last rank of the first replica print what came of every step."""
    from megatron.core import parallel_state
    from verl.utils import tensordict_utils
    from verl.workers.utils.padding import response_from_nested

    loop, worker = build(row)
    found: list[Any] = []
    forwards: list[float] = []
    replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    for step, count in enumerate(SAMPLES):
        data = samples(count, 10 * replica + step)
        for rows in (2, 1) if step == 0 else (1,):
            tensordict_utils.assign_non_tensor(data, micro_batch_size_per_gpu=rows, compute_loss=False)
            before = worker.infer_batch(data)
            last, group = before is not None, parallel_state.get_pipeline_model_parallel_group()
            sent: list[Any] = [before["log_probs"].unbind() if last else None]
            # verl's driver hands what a rank reports to all of them.
            torch.distributed.broadcast_object_list(sent, parallel_state.get_pipeline_model_parallel_last_rank(), group)
            known = torch.nested.as_nested_tensor(list(sent[0]), layout=torch.jagged)
            data["old_log_probs"] = response_from_nested(known, data["response_mask"])
            forwards += data["old_log_probs"].values().tolist() if step == 0 else []
        tensordict_utils.assign_non_tensor(data, mini_batch_size=MINI * replicas)
        after = worker.train_mini_batch(data)
        if last:
            metrics = dict(sorted(tensordict_utils.get(after, "metrics").items()))
            norms = metrics.pop("grad_norm")
            reported = {name: str(value) for name, value in metrics.items() if not name.startswith("perf/")}
            found += [((known.values().tolist(), reported), norm) for norm in norms]
    of_two, of_one = torch.tensor(forwards).chunk(2)
    if not torch.allclose(of_two, of_one, rtol=1e-6, atol=0.0):
        raise ValueError(f"Error: log-probabilities follow rows of a microbatch: {(of_two - of_one).abs().max()} apart")
    borders.report(loop, MINI, f"{', '.join(map(str, SAMPLES))} x 6 to 19", found, forwards)


if __name__ == "__main__":
    borders.train(borders.start(__doc__, "ray", "wandb", "vllm", "megatron.energon", "fastapi"), main)
