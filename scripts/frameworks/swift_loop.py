"""ms-swift's own training under a schedule: a tiny Llama of transformers, which a few lines of chat tune, on 4 ranks.

``swift_loop.py ENGINE SCHEDULE,PIPELINE_RANKS,[lora | lengths] ..``. What ``megatron sft`` runs is run: its arguments, data set,
template and ``MegatronTrainer.train``, over mcore-bridge's model, whose weights, exported before the first step, must be what the
checkpoint has. Rows are packed without padding, as by default; there are evaluations in between, and a checkpoint of transformers
is written behind the last step.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import borders
import torch

STEPS, MICROBATCHES, ROWS = 3, 6, 2  # rows of a microbatch
ON_A_V = ("zb-v", "v-half")
WORDS = [f"w{number}" for number in range(100)]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}


def checkpoint(folder: Path) -> Any:
    """Write a Llama with a tokenizer of words; returns the model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(11)
    ends = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    known = {word: place for place, word in enumerate((*ends.values(), *WORDS))}
    words = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, **ends).save_pretrained(folder)
    llama = LlamaConfig(**SIZES, vocab_size=128, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    theirs = LlamaForCausalLM(llama)
    theirs.save_pretrained(folder)
    return theirs


def chats(path: Path, count: int, seed: int) -> str:
    """Write that many lines of a question and an answer, of various lengths."""
    drawn = random.Random(seed)
    with path.open("w") as lines:
        for _ in range(count):
            asked, answered = (" ".join(drawn.choices(WORDS, k=drawn.randint(2, 20))) for _ in range(2))
            said = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            lines.write(json.dumps({"messages": said}) + "\n")
    return str(path)


def arguments(folder: Path, row: borders.Row, replicas: int) -> Any:
    """What a user gives to ``megatron sft``."""
    from swift.megatron.arguments import MegatronSftArguments

    batch = MICROBATCHES * ROWS * replicas
    fusions = ("masked_softmax", "bias_activation", "bias_dropout", "gradient_accumulation")  # of Transformer Engine and apex
    overlaps = ("overlap_grad_reduce", "overlap_param_gather")
    return MegatronSftArguments(
        model=str(folder),
        model_type="llama",
        template="dummy",
        dataset=[chats(folder / "train.jsonl", STEPS * batch, 1)],
        val_dataset=[chats(folder / "eval.jsonl", batch, 2)],
        output_dir=str(folder / "out"),
        tuner_type="lora" if row.trains == "lora" else "full",
        torch_dtype="float32",
        fp16=False,
        bf16=False,
        pipeline_model_parallel_size=row.ranks,
        virtual_pipeline_model_parallel_size=2 if row.schedule in ON_A_V else None,
        micro_batch_size=ROWS,
        global_batch_size=batch,
        train_iters=STEPS,
        eval_steps=2,
        lr=1e-2,
        clip_grad=0.0,
        lora_dropout=0.0,
        ddp_backend="gloo",
        use_cpu_initialization=True,
        no_save_optim=True,
        logging_steps=1,
        dataset_num_proc=1,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        check_model=False,
        report_to=[],
        callbacks=["numbers"],
        **{f"{fusion}_fusion": False for fusion in fusions},
        **dict.fromkeys(overlaps, replicas > 1),
    )


def main(row: borders.Row) -> None:
    """Train, and have the last rank of the first replica print the loss and the norm of every step."""
    from swift.megatron.callbacks import MegatronCallback, megatron_callbacks_map
    from swift.megatron.pipelines.train.sft import MegatronSft

    found: list[Any] = []

    class Numbers(MegatronCallback):
        def on_log(self, logs: dict[str, Any]) -> None:
            found.append((logs.get("loss", logs.get("eval_loss")), logs.get("grad_norm", 0.0)))

    megatron_callbacks_map["numbers"] = Numbers
    borders.see_the_cpu("mcore_bridge", "swift")
    borders.attend_in_torch()
    loop = borders.install(row)
    with tempfile.TemporaryDirectory() as name:
        theirs = checkpoint(Path(name))
        tuned = MegatronSft(arguments(Path(name), row, torch.distributed.get_world_size() // row.ranks))
        data = tuned._prepare_dataset()
        tuned.args.init_iters(*data)
        trainer = tuned.prepare_trainer()
        exported = dict(trainer.bridge.export_weights(trainer.unwrapped_models))
        differ = [name for name, weight in theirs.state_dict().items() if not torch.equal(exported.get(name, weight[:0]), weight)]
        if differ:
            raise ValueError(f"Error: {len(differ)} weights have not come back equal, {differ[:3]} among them")
        if row.trains == "lora":  # ms-swift draws adapters by rank
            borders.draw(trainer.unwrapped_models)
        trainer.train(*data)
        torch.distributed.barrier()
    borders.report(loop, MICROBATCHES, f"{STEPS} steps of {MICROBATCHES} x {ROWS} rows", found)


if __name__ == "__main__":
    borders.train(borders.start(__doc__, "cryptography", "trl"), main)
