"""verl's Megatron engine under a schedule: a tiny Llama of transformers, on this rank's part of 4 ranks.

``verl_loop.py ENGINE SCHEDULE,PIPELINE_RANKS, ..``. In every step the engine computes log-probabilities and trains on them with
verl's own loss of PPO, in float32, on packed sequences of various lengths, one a microbatch: with virtual stages verl makes the
number of microbatches a multiple of the ranks. Ray and what serves models are absent.
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
SAMPLES = (4, 8, 12, 4)  # of each step and replica
ON_A_V = ("zb-v", "v-half")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def build(schedule: str, ranks: int) -> tuple[Any, Any]:
    """The loop that is installed, and verl's engine."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    from megatron.pipeline import install

    importlib.import_module("verl.models.mcore.bridge")  # takes Megatron Bridge's modules
    borders.see_the_cpu("verl", "megatron.bridge")
    borders.attend_in_torch()
    loop = install(schedule)
    torch.manual_seed(11)
    llama = LlamaConfig(**SIZES, vocab_size=VOCABULARY, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(llama).save_pretrained(folder)
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope")  # of Transformer Engine and apex
    settings = {f"{fusion}_fusion": False for fusion in fusions}
    settings |= {"gradient_accumulation_fusion": False, "use_cpu_initialization": True}
    engine = McoreEngineConfig(
        pipeline_model_parallel_size=ranks,
        virtual_pipeline_model_parallel_size=2 if schedule in ON_A_V else None,
        override_transformer_config=settings,
        override_ddp_config={"overlap_grad_reduce": ranks < 4 and schedule not in ON_A_V},  # verl refuses it of several chunks
    )
    object.__setattr__(engine, "dtype", "float32")  # it refuses what is compared bit for bit
    model = HFModelConfig(path=folder, load_tokenizer=False, override_config={"attn_implementation": "eager"})
    model.tokenizer = SimpleNamespace(pad_token_id=0)
    optimizer = McoreOptimizerConfig(lr=1e-2, clip_grad=0.0, total_training_steps=len(SAMPLES))
    made = MegatronEngineWithLMHead(model, engine, optimizer, CheckpointConfig())
    made.initialize()
    return loop, made


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
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_from_nested

    loop, engine = build(row.schedule, row.ranks)
    actor = ActorConfig(strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=1, entropy_coeff=0.01)
    found = []
    for step, count in enumerate(SAMPLES):
        data = samples(count, 10 * parallel_state.get_data_parallel_rank() + step)
        with engine.eval_mode():
            before = engine.infer_batch(data)
        last, group = engine.is_mp_src_rank_with_outputs(), parallel_state.get_pipeline_model_parallel_group()
        sent: list[Any] = [before["model_output"]["log_probs"].unbind() if last else None]
        # verl's driver hands what a rank reports to all of them.
        torch.distributed.broadcast_object_list(sent, parallel_state.get_pipeline_model_parallel_last_rank(), group)
        known = torch.nested.as_nested_tensor(list(sent[0]), layout=torch.jagged)
        if step == 0:
            forwards = known.values().tolist()
        data["old_log_probs"] = response_from_nested(known, data["response_mask"])
        with engine.train_mode():
            after = engine.train_batch(data, partial(ppo_loss, actor))
        if last:
            metrics = {name: str(getattr(value, "values", value)) for name, value in sorted(after["metrics"].items())}
            del metrics["grad_norm"]
            found.append(([known.values().tolist(), after["loss"], metrics], float(after["metrics"]["grad_norm"])))
    borders.report(loop, SAMPLES[-1], f"{', '.join(map(str, SAMPLES))} x 6 to 19", found, forwards)


if __name__ == "__main__":
    borders.train(borders.start(__doc__, "ray", "wandb", "vllm", "megatron.energon"), main)
